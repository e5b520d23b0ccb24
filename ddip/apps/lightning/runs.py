"""``fit``, ``validate``, ``test`` and ``predict``: a stop is a stop, and the same Trainer goes on after a fault.

In Lightning 2.6 they end with SystemExit after an interrupt, and may leave SIGINT ignored. A Trainer counts epochs and
steps on each rank for itself: those that a fault has left behind would leave the others waiting in the next run. What
ends in a validation leaves the model in eval mode, in which the next ``fit`` would train it. Their handler of SIGTERM,
with which ranks are ended, waits in a collective, and LightningEnvironment takes WORLD_SIZE away.
"""

from __future__ import annotations

import functools
import operator
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddip.apps import patches, rank_exchange
from ddip.apps.lightning import faults, trainers
from ddip.apps.lightning.packages import modules

RUNS = ("fit", "validate", "test", "predict")
LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
SAVED = ("_last_global_step_saved", "_last_checkpoint_saved")
"""What ModelCheckpoint keeps beside its ``state_dict``, by which a rank decides whether to save."""

_failed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers whose last run has failed on this rank."""


def apply() -> None:
    """Of the Trainer's public methods, and of its private signal handlers."""
    for module in modules("pytorch"):
        for name in RUNS:
            patches.patch(module.Trainer, name, _guarded(getattr(module.Trainer, name)))
    for module in modules("pytorch.trainer.connectors.signal_connector"):
        patches.patch(module._SignalConnector, "register_signal_handlers", lambda self: None)


def _guarded(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True  # IPython leaves out this frame
        trainers.ensure_there(self, f"trainer.{method.__name__}")
        if self.world_size > 1 and _has_failed_anywhere(self):
            _level(self)
        model = args[0] if args else kwargs.get("model", self.lightning_module)
        modes = {part: part.training for part in _parts(model)}
        try:
            result = _stoppable(method, self, *args, **kwargs)
        except BaseException:
            _failed.add(self)
            for part in _parts(model):
                part.training = modes.get(part, True)  # those that the run has made were made to be trained
            raise
        finally:
            faults.return_to_others(self)
        _failed.discard(self)
        return result

    return run


def _parts(model: Any) -> list[torch.nn.Module]:
    return list(model.modules()) if isinstance(model, torch.nn.Module) else []


def _stoppable(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    handler, size = signal.getsignal(signal.SIGINT), os.environ["WORLD_SIZE"]
    try:
        return method(*args, **kwargs)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise end.__context__ from None
        raise
    finally:
        signal.signal(signal.SIGINT, handler)
        os.environ["WORLD_SIZE"] = size


# -- after a fault


def _has_failed_anywhere(trainer: Any) -> bool:
    return any(rank_exchange.gather_numbers(trainer in _failed))


def _level(trainer: Any) -> None:
    """Have all ranks be where rank 0 is, as their parameters will be."""
    faults.clean_up(trainer)
    loops, callbacks = rank_exchange.broadcast_object(_state(trainer) if rank_exchange.rank() == 0 else None)
    for loop, progress in loops.items():
        for name, state in progress.items():
            operator.attrgetter(name)(getattr(trainer, loop)).load_state_dict(state)
    for callback, (state, saved) in zip(_monitoring(trainer), callbacks, strict=True):
        callback.load_state_dict(state)
        vars(callback).update(saved)


def _state(trainer: Any) -> tuple[dict[str, dict[str, Any]], list[tuple[Any, dict[str, Any]]]]:
    """How far `trainer` is; and of the callbacks that decide for all ranks what they know."""
    loops = {name: _progress(getattr(trainer, name)) for name in LOOPS}
    callbacks = [
        (one.state_dict(), {name: vars(one)[name] for name in SAVED if name in vars(one)})
        for one in _monitoring(trainer)
    ]
    return loops, callbacks


def _progress(loop: Any) -> dict[str, Any]:
    """The counts of `loop` and of the loops in it, by the paths of the attributes that hold them."""
    return {name: state for name, state in loop.state_dict().items() if not name.endswith("state_dict")}


def _monitoring(trainer: Any) -> Iterator[Any]:
    return iter([*trainer.early_stopping_callbacks, *trainer.checkpoint_callbacks])
