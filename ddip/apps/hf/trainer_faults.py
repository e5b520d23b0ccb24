"""A ``Trainer`` whose ``train`` or ``evaluate`` failed, or was stopped, is as good as before.

transformers 5.23 leaves it as in training, with the bars of the step that failed: the next evaluation would count on in
them. The hooks of NEFTune would be there twice, and the gradients keep their memory. A wrapper that cannot go on in the
next group, such as one that was compiled, is made again by ``train``, and so is the Accelerator of a group of other
ranks. On some of the ranks it would wait for the others, with no word of what is wrong.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from ddip.apps import patches, rank_exchange
from ddip.apps.hf import living
from ddip.rank.objects import wrappers
from ddip.rank.runtime import current

METHODS = ("train", "evaluate", "predict")
ON_SOME = (
    "trainer.{method}(): a Trainer trains and evaluates on all {size} ranks, and this cell runs on rank {here} only, "
    "where it would wait for the others; run it without -r"
)
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
        if not current.is_everywhere() and self.args.world_size > 1:
            here = ", ".join(map(str, current.ranks()))
            raise RuntimeError(ON_SOME.format(method=method.__name__, size=rank_exchange.world_size(), here=here))
        was_in_train = self.is_in_train
        _take_place(self)
        _unwrap_if_lost(self)
        try:
            return method(self, *args, **kwargs)
        except BaseException:
            if not was_in_train:  # an evaluation within `train` leaves that to it
                _tidy(self)
            raise

    return run


def _take_place(trainer: Any) -> None:
    """Where the ranks have joined another group since, and have no Accelerator yet: in that one from here on."""
    if not sys.modules["accelerate.state"].AcceleratorState._shared_state:
        vars(trainer.args).pop("_setup_devices", None)  # what they were in the former
        assert trainer.args.device  # it asks for them anew
        trainer.create_accelerator_and_postprocess()


def _unwrap_if_lost(trainer: Any) -> None:
    """``train`` wraps a model that is not wrapped; the optimizer is used as it is."""
    wrapped = trainer.model_wrapped
    if wrapped is not trainer.model and any(wrappers.is_lost(module) for module in wrapped.modules()):
        trainer.model_wrapped = trainer.model
        if rank_exchange.on_all_ranks():
            living.share_states()


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
