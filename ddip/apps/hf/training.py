"""A ``Trainer`` whose ``train`` or ``evaluate`` failed, or was stopped, is as good as before.

transformers 5.23 leaves it as in training, with the bars of the step that failed: the next evaluation would count on in
them. The hooks of NEFTune would be there twice, and the gradients keep their memory.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from ddip.apps import patches

METHODS = ("train", "evaluate", "predict")
BARS = ("training_bar", "prediction_bar", "training_tracker")


def apply() -> None:
    """Have each of them tidy up."""
    module = sys.modules.get("transformers.trainer")
    if module is not None:
        for name in METHODS:
            patches.patch(module.Trainer, name, _tidied(getattr(module.Trainer, name)))


def _tidied(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        was_in_train = self.is_in_train
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            if not was_in_train:  # an evaluation within `train` leaves that to it
                _tidy(self)
            raise

    return run


def _tidy(trainer: Any) -> None:
    trainer.is_in_train = False
    for callback in trainer.callback_handler.callbacks:
        for name in BARS:
            bar = vars(callback).get(name)
            if bar is not None:
                setattr(callback, name, None)
                if isinstance(bar, tqdm):  # to close a notebook's is to take it away
                    bar.close()
    handle = vars(trainer).pop("neftune_hook_handle", None)
    if handle is not None:
        handle.remove()
    trainer.model.zero_grad(set_to_none=True)
