"""Make ``Tuner`` show one progress bar and clean up after errors, and explain how to tune a batch size.

In Lightning 2.6, ``lr_find`` shows a bar on each rank. After an error, its callback stays in the Trainer, so that the
next ``fit`` would begin with a search. ``scale_batch_size`` does not support several ranks.
"""

from __future__ import annotations

import functools
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
        callback = module._LRCallback
        patches.set_attribute(callback, "on_train_batch_start", _show_bar_on_rank_0(callback.on_train_batch_start))
    for module in installed_modules("pytorch.tuner"):
        patches.set_attribute(module.Tuner, "lr_find", _remove_callback_on_error(module.Tuner.lr_find))
        patches.set_attribute(module.Tuner, "scale_batch_size", _on_one_rank(module.Tuner.scale_batch_size))


def _show_bar_on_rank_0(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def begin_batch(self: Any, trainer: Any, *args: Any) -> None:
        if not trainer.is_global_zero:
            self.progress_bar_refresh_rate = 0
        method(self, trainer, *args)

    return begin_batch


def _remove_callback_on_error(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def find_rate(self: Any, *args: Any, **kwargs: Any) -> Any:
        callbacks = self._trainer.callbacks
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            self._trainer.callbacks = callbacks
            raise

    return find_rate


def _on_one_rank(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def scale_batch_size(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves out this frame
        if self._trainer.world_size > 1:
            raise ValueError(ALONE)
        return method(self, *args, **kwargs)

    return scale_batch_size
