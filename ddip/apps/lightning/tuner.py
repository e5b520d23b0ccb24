"""``Tuner``: one bar, and where a batch size can be tuned.

In Lightning 2.6, ``lr_find`` shows a bar on each rank, and ``scale_batch_size`` refuses groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddip.apps.lightning import patches

ALONE = (
    "scale_batch_size: Lightning tunes the batch size of one process; make a Trainer() for it in a cell whose first "
    "line is %%dip -r 0"
)


def apply() -> None:
    """Have rank 0 show the bar."""
    for module in patches.modules("pytorch.tuner.lr_finder"):
        patches.patch(module._LRCallback, "on_train_batch_start", _with_one_bar)
    for module in patches.modules("pytorch.tuner"):
        patches.patch(module.Tuner, "scale_batch_size", _on_one_rank)


def _with_one_bar(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def begin(self: Any, trainer: Any, *args: Any) -> None:
        if not trainer.is_global_zero:
            self.progress_bar_refresh_rate = 0
        method(self, trainer, *args)

    return begin


def _on_one_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves out this frame
        if self._trainer.world_size > 1:
            raise ValueError(ALONE)
        return method(self, *args, **kwargs)

    return scale
