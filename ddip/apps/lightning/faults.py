"""What Lightning does when a rank has failed does not wait for the others, which are elsewhere.

In Lightning 2.6, callbacks that write a checkpoint on an exception, and the end of ``lr_find``, wait for all ranks: a
rank that has failed would wait there for ranks that wait for it in a backward pass, and its error would not be seen.
Rank 0 writes the checkpoint, when it has been released. That of a sharded model needs all ranks, and is left out. An
``lr_find`` that has failed leaves the Trainer with callbacks and limits of its own: they are taken out.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from lightning_utilities.core.rank_zero import rank_zero_warn

from ddip.apps import patches
from ddip.apps.lightning.packages import modules

NOT_SAVED = "no checkpoint was written of what has failed: its model is sharded, and the ranks stand at different steps"

_alone: weakref.WeakKeyDictionary[Any, list[tuple[Any, str]]] = weakref.WeakKeyDictionary()
"""Trainers in a run that has failed here, with what was replaced for as long as it lasts: object and attribute."""
_waste: weakref.WeakKeyDictionary[Any, list[Any]] = weakref.WeakKeyDictionary()
"""Checkpoints that other ranks may still read."""


def apply() -> None:
    """Of Lightning's private functions."""
    for module in modules("pytorch.trainer.call"):
        patches.patch(module, "_interrupt", _of_a_failed_run(module._interrupt))
    for module in modules("pytorch.tuner.lr_finder"):
        restore = vars(module)["__lr_finder_restore_params"]
        patches.patch(module, "_try_loop_run", _that_may_fail(module._try_loop_run, restore))


def _of_a_failed_run(interrupt: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(interrupt)
    def leave_and_interrupt(trainer: Any, *args: Any) -> None:
        leave_others(trainer)
        interrupt(trainer, *args)

    return leave_and_interrupt


def _that_may_fail(loop_run: Callable[..., None], restore: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(loop_run)
    def run(trainer: Any, params: Any) -> None:
        try:
            loop_run(trainer, params)
        except BaseException:
            leave_others(trainer)
            restore(trainer, params)
            if trainer.progress_bar_callback:
                trainer.progress_bar_callback.enable()
            raise

    return run


def leave_others(trainer: Any) -> None:
    """From here on `trainer` waits for no other rank, until ``return_to_others``."""
    if trainer.world_size == 1 or trainer in _alone:
        return
    strategy = trainer.strategy
    _alone[trainer] = []
    _replace(trainer, strategy, "barrier", lambda *_, **__: None)
    _replace(trainer, strategy, "broadcast", lambda obj, src=0: obj)
    _replace(trainer, strategy, "reduce", lambda tensor, *_, **__: tensor)
    _replace(trainer, strategy, "all_gather", lambda tensor, *_, **__: tensor[None])
    _replace(trainer, strategy, "reduce_boolean_decision", lambda decision, all=True: decision)
    _replace(trainer, strategy, "remove_checkpoint", lambda path: _waste.setdefault(trainer, []).append(path))
    if not any(kind.__name__ == "DDPStrategy" for kind in type(strategy).__mro__):
        _replace(trainer, trainer, "save_checkpoint", lambda *_, **__: rank_zero_warn(NOT_SAVED))


def return_to_others(trainer: Any) -> None:
    """The run of `trainer` has ended."""
    for owner, name in _alone.pop(trainer, []):
        del vars(owner)[name]


def clean_up(trainer: Any) -> None:
    """All ranks are in the next run of `trainer`: remove what they might have read."""
    for path in _waste.pop(trainer, []):
        trainer.strategy.remove_checkpoint(path)


def _replace(trainer: Any, owner: Any, name: str, value: Callable[..., Any]) -> None:
    vars(owner)[name] = value
    _alone[trainer].append((owner, name))
