"""Make a ``Trainer`` usable again after ``train`` or ``evaluate`` failed or was stopped.

transformers 5.23 leaves the Trainer in training state with the bars of the failed step, which the next evaluation would
continue. NEFTune's hooks would be registered twice, and gradients keep their memory. ``train`` recreates a wrapper that
cannot continue in the next group, such as a compiled one, and the Accelerator if the ranks have changed. In a cell on
some ranks only, the Trainer would wait for the other ranks without an error, so ddip raises one.
"""

from __future__ import annotations

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


def apply_patches() -> None:
    """Patch the methods of Trainer to check the ranks before, and to tidy up after an error."""
    module = sys.modules.get("transformers.trainer")
    if module is not None:
        for name in METHODS:
            patches.wrap_function(module.Trainer, name, _run_and_tidy)


def _run_and_tidy(method: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    if not current.is_everywhere() and self.args.world_size > 1:
        here = ", ".join(map(str, current.cell_ranks()))
        raise RuntimeError(ON_SOME.format(method=method.__name__, size=rank_exchange.world_size(), here=here))
    was_in_train = self.is_in_train
    _join_current_group(self)
    _unwrap_if_lost(self)
    try:
        return method(self, *args, **kwargs)
    except BaseException:
        if not was_in_train:  # an evaluation within `train` leaves this to `train`
            _tidy_trainer(self)
        raise


def _join_current_group(trainer: Any) -> None:
    """Give `trainer` a new device and Accelerator if the ranks have joined another group since."""
    if not sys.modules["accelerate.state"].AcceleratorState._shared_state:
        vars(trainer.args).pop("_setup_devices", None)  # of the former group
        assert trainer.args.device  # sets up the device again
        trainer.create_accelerator_and_postprocess()


def _unwrap_if_lost(trainer: Any) -> None:
    """Unwrap the model if its wrapper belongs to a former group; ``train`` wraps it again.

    The optimizer is kept; all ranks get rank 0's state.
    """
    wrapped = trainer.model_wrapped
    if wrapped is not trainer.model and any(wrappers.is_lost(module) for module in wrapped.modules()):
        trainer.model_wrapped = trainer.model
        if rank_exchange.on_all_ranks():
            living.share_states()


def _tidy_trainer(trainer: Any) -> None:
    trainer.is_in_train = False
    for callback in trainer.callback_handler.callbacks:
        for name in BARS:
            bar = vars(callback).get(name)
            if bar is not None:
                setattr(callback, name, None)
                if isinstance(bar, tqdm):  # closing a notebook's bar would remove it
                    bar.close()
    handle = vars(trainer).pop("neftune_hook_handle", None)
    if handle is not None:
        handle.remove()
    trainer.model.zero_grad(set_to_none=True)
