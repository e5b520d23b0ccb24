"""Keep Lightning's error handling on a failed rank from waiting for the other ranks.

In Lightning 2.6, callbacks that write a checkpoint on an exception, and the end of ``lr_find``, wait for all ranks. A
failed rank would wait there for ranks that wait for it in a backward pass, and its error would never appear. Rank 0
writes the checkpoint once ddip has aborted its own wait. The checkpoint of a sharded model needs all ranks and is left
out. A failed ``lr_find`` leaves its callbacks and limits in the Trainer; ddip removes them.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from ddip.apps import patches
from ddip.apps.lightning.packages import installed_modules

NOT_SAVED = "no checkpoint was written after the failure: the model is sharded, and the ranks are at different steps"

_detached: weakref.WeakKeyDictionary[Any, list[tuple[Any, str]]] = weakref.WeakKeyDictionary()
"""Trainers in a run that has failed on this rank, with the objects and attributes replaced until the run ends."""
_obsolete: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Paths of obsolete checkpoints that other ranks may still read, by Trainer."""


def apply_patches() -> None:
    """Patch Lightning's handling of errors and interrupts, and ``lr_find``; these functions are private."""
    for module in installed_modules("pytorch.trainer.call"):
        patches.wrap_function(module, "_interrupt", _detach_and_interrupt)
    for module in installed_modules("pytorch.tuner.lr_finder"):
        restore = vars(module)["__lr_finder_restore_params"]
        patches.wrap_function(module, "_try_loop_run", functools.partial(_run_search, restore))


def _detach_and_interrupt(interrupt: Callable[..., None], trainer: Any, *args: Any) -> None:
    detach_from_other_ranks(trainer)
    interrupt(trainer, *args)


def _run_search(restore: Callable[..., None], loop_run: Callable[..., None], trainer: Any, params: Any) -> None:
    try:
        loop_run(trainer, params)
    except BaseException:
        detach_from_other_ranks(trainer)
        restore(trainer, params)
        if trainer.progress_bar_callback:
            trainer.progress_bar_callback.enable()
        raise


def detach_from_other_ranks(trainer: Any) -> None:
    """Replace the collectives of `trainer` with local results until `rejoin_other_ranks`.

    Checkpoints of sharded models are not written meanwhile, and obsolete ones stay until `remove_obsolete_checkpoints`.
    """
    if trainer.world_size == 1 or trainer in _detached:
        return
    strategy = trainer.strategy
    _detached[trainer] = []
    _replace_method(trainer, strategy, "barrier", lambda *_, **__: None)
    _replace_method(trainer, strategy, "broadcast", lambda obj, src=0: obj)
    _replace_method(trainer, strategy, "reduce", lambda tensor, *_, **__: tensor)
    _replace_method(trainer, strategy, "all_gather", lambda tensor, *_, **__: tensor[None])
    _replace_method(trainer, strategy, "reduce_boolean_decision", lambda decision, all=True: decision)
    _replace_method(trainer, strategy, "remove_checkpoint", lambda path: _obsolete.setdefault(trainer, []).append(path))
    if not any(kind.__name__ == "DDPStrategy" for kind in type(strategy).__mro__):
        _replace_method(trainer, trainer, "save_checkpoint", lambda *_, **__: rank_zero_warn(NOT_SAVED))


def rejoin_other_ranks(trainer: Any) -> None:
    """Undo `detach_from_other_ranks` at the end of the run of `trainer`."""
    for owner, name in _detached.pop(trainer, []):
        del vars(owner)[name]


def remove_obsolete_checkpoints(trainer: Any) -> None:
    """Remove the obsolete checkpoints of `trainer`. Called when all ranks are in its next run."""
    for path in _obsolete.pop(trainer, []):
        trainer.strategy.remove_checkpoint(path)


def _replace_method(trainer: Any, owner: Any, name: str, value: Callable[..., Any]) -> None:
    vars(owner)[name] = value
    _detached[trainer].append((owner, name))
