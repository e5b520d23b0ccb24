"""``Tuner.lr_find`` stops at the same step on every rank, and shows one bar.

In Lightning 2.6 each rank looks at its own loss to see whether training diverges; the first that stops would leave the
others waiting. And each shows a bar.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddip.apps.lightning import patches


def apply() -> None:
    """Have the ranks look at the mean loss."""
    for module in patches.modules("pytorch.tuner.lr_finder"):
        patches.patch(module._LRCallback, "on_train_batch_start", _with_one_bar)
        patches.patch(module._LRCallback, "on_train_batch_end", _with_the_mean_loss)


def _with_one_bar(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def begin(self: Any, trainer: Any, *args: Any) -> None:
        if not trainer.is_global_zero:
            self.progress_bar_refresh_rate = 0
        method(self, trainer, *args)

    return begin


def _with_the_mean_loss(method: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(method)
    def end(self: Any, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        if isinstance(outputs, dict) and "loss" in outputs:
            outputs = {**outputs, "loss": trainer.strategy.reduce(outputs["loss"], reduce_op="mean")}
        method(self, trainer, module, outputs, *args)

    return end
