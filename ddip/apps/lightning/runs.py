"""Make ``fit``, ``validate``, ``test`` and ``predict`` stop on an interrupt, and reuse a Trainer after a fault.

In Lightning 2.6, these methods end with SystemExit after an interrupt, and may leave SIGINT ignored. A Trainer counts
epochs and steps separately on each rank, so after a fault the ranks with lower counts would leave the others waiting in
the next run. An error in a validation leaves the model in eval mode, in which the next ``fit`` would train it. The
handler of SIGTERM, the signal that ends ranks, waits in a collective. LightningEnvironment deletes WORLD_SIZE.
"""

from __future__ import annotations

import operator
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from ddip.apps import patches, rank_exchange
from ddip.apps.lightning import faults, trainers
from ddip.apps.lightning.packages import installed_modules

RUNS = ("fit", "validate", "test", "predict")
LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
SAVED = ("_last_global_step_saved", "_last_checkpoint_saved")
"""Attributes of ModelCheckpoint by which a rank decides whether to save, and which its ``state_dict`` lacks."""

_failed: weakref.WeakSet[Any] = weakref.WeakSet()
"""Trainers whose last run failed on this rank."""


def apply_patches() -> None:
    """Patch the Trainer's public methods, and disable its private signal handlers."""
    for module in installed_modules("pytorch"):
        for name in RUNS:
            patches.wrap_function(module.Trainer, name, _run_guarded)
    for module in installed_modules("pytorch.trainer.connectors.signal_connector"):
        patches.set_attribute(module._SignalConnector, "register_signal_handlers", lambda self: None)


def _run_guarded(method: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True  # IPython leaves out this frame
    trainers.ensure_same_ranks(self, f"trainer.{method.__name__}")
    if self.world_size > 1 and _has_failed_anywhere(self):
        _align_ranks(self)
    model = args[0] if args else kwargs.get("model", self.lightning_module)
    modes = {module: module.training for module in _modules_of(model)}
    try:
        result = _run_interruptible(method, self, *args, **kwargs)
    except BaseException:
        _failed.add(self)
        for module in _modules_of(model):
            module.training = modes.get(module, True)  # modules that the run has made are for training
        raise
    finally:
        faults.rejoin_other_ranks(self)
    _failed.discard(self)
    return result


def _modules_of(model: Any) -> list[torch.nn.Module]:
    return list(model.modules()) if isinstance(model, torch.nn.Module) else []


def _run_interruptible(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    in_main_thread = threading.current_thread() is threading.main_thread()  # elsewhere Lightning sets no handler
    handler, size = signal.getsignal(signal.SIGINT), os.environ["WORLD_SIZE"]
    try:
        return method(*args, **kwargs)
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):
            raise end.__context__ from None
        raise
    finally:
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        os.environ["WORLD_SIZE"] = size


# -- after a fault


def _has_failed_anywhere(trainer: Any) -> bool:
    return any(rank_exchange.gather_numbers(trainer in _failed))


def _align_ranks(trainer: Any) -> None:
    """Copy rank 0's progress and callback states to all ranks, as DDP does for parameters. A collective."""
    faults.remove_obsolete_checkpoints(trainer)
    loops, callbacks = rank_exchange.broadcast_object(_run_state(trainer) if rank_exchange.rank() == 0 else None)
    for loop, progress in loops.items():
        for name, state in progress.items():
            operator.attrgetter(name)(getattr(trainer, loop)).load_state_dict(state)
    for callback, (state, saved) in zip(_deciding_callbacks(trainer), callbacks, strict=True):
        callback.load_state_dict(state)
        vars(callback).update(saved)


def _run_state(trainer: Any) -> tuple[dict[str, dict[str, Any]], list[tuple[Any, dict[str, Any]]]]:
    """Return the progress of `trainer`'s loops, and the state of callbacks that decide for all ranks."""
    loops = {name: _loop_progress(getattr(trainer, name)) for name in LOOPS}
    callbacks = [
        (callback.state_dict(), {name: vars(callback)[name] for name in SAVED if name in vars(callback)})
        for callback in _deciding_callbacks(trainer)
    ]
    return loops, callbacks


def _loop_progress(loop: Any) -> dict[str, Any]:
    """Return the counts of `loop` and of the loops in it, by the paths of the attributes that hold them."""
    return {name: state for name, state in loop.state_dict().items() if not name.endswith("state_dict")}


def _deciding_callbacks(trainer: Any) -> Iterator[Any]:
    return iter([*trainer.early_stopping_callbacks, *trainer.checkpoint_callbacks])
