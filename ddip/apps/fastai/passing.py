"""Base class of the callbacks that ddip adds to a learner."""

from __future__ import annotations

from typing import Any

from fastai.callback.core import Callback


class TemporaryCallback(Callback):
    """Callback for one call, pickled as a plain Callback so that an exported learner does not need ddip."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Callback, ())
