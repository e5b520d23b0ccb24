"""``Tuner``: one bar, and where a batch size can be tuned.

In Lightning 2.6, ``lr_find`` shows a bar on each rank, and stays with a Trainer in which it has failed: the next
``fit`` would begin with it. ``scale_batch_size`` refuses groups.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddip.apps import patches
from ddip.apps.lightning.packages import modules

ALONE = (
    "scale_batch_size: Lightning tunes the batch size of one process; make a Trainer() for it in a cell whose first "
    "line is %%dip -r 0"
)


def apply() -> None:
    """Of the Tuner, and of its callback."""
    for module in modules("pytorch.tuner.lr_finder"):
        callback = module._LRCallback
        patches.patch(callback, "on_train_batch_start", _with_one_bar(callback.on_train_batch_start))
    for module in modules("pytorch.tuner"):
        patches.patch(module.Tuner, "lr_find", _taken_out(module.Tuner.lr_find))
        patches.patch(module.Tuner, "scale_batch_size", _on_one_rank(module.Tuner.scale_batch_size))


def _with_one_bar(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def begin(self: Any, trainer: Any, *args: Any) -> None:
        if not trainer.is_global_zero:
            self.progress_bar_refresh_rate = 0
        method(self, trainer, *args)

    return begin


def _taken_out(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def find(self: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks = self._trainer.callbacks
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self._trainer.callbacks = callbacks
            raise

    return find


def _on_one_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def scale(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves out this frame
        if self._trainer.world_size > 1:
            raise ValueError(ALONE)
        return method(self, *args, **kwargs)

    return scale
