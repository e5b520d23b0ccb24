"""Make ``Tuner`` show one progress bar and clean up after errors, and explain how to tune a batch size.

In Lightning 2.6, ``lr_find`` shows a bar on each rank. After an error, its callback stays in the Trainer, so that the
next ``fit`` would begin with a search. ``scale_batch_size`` does not support several ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddip.apps import patches
from ddip.apps.lightning.packages import installed_modules

ALONE = (
    "scale_batch_size: Lightning tunes the batch size of one process; make a Trainer() for it in a cell whose first "
    "line is %%dip -r 0"
)


def apply_patches() -> None:
    """Patch the Tuner and its callback."""
    for module in installed_modules("pytorch.tuner.lr_finder"):
        patches.wrap_function(module._LRCallback, "on_train_batch_start", _begin_batch)
    for module in installed_modules("pytorch.tuner"):
        patches.wrap_function(module.Tuner, "lr_find", _find_rate)
        patches.wrap_function(module.Tuner, "scale_batch_size", _scale_on_one_rank)


def _begin_batch(method: Callable[..., None], self: Any, trainer: Any, *args: Any) -> None:
    """Begin a batch of a search, whose bar only rank 0 shows."""
    if not trainer.is_global_zero:
        self.progress_bar_refresh_rate = 0
    method(self, trainer, *args)


def _find_rate(method: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call ``lr_find``, and remove its callback after an error."""
    callbacks = self._trainer.callbacks
    try:
        return method(self, *args, **kwargs)
    except BaseException:
        self._trainer.callbacks = callbacks
        raise


def _scale_on_one_rank(method: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True  # IPython leaves out this frame
    if self._trainer.world_size > 1:
        raise ValueError(ALONE)
    return method(self, *args, **kwargs)
