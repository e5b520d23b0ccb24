"""Where a rank computes, as accelerate sees it.

accelerate 1.15 asks torch for GPUs, and where there is none it takes a process for one alone, whatever torchrun has
set, unless it is told ``cpu=True``; a CUDA build of torch on a machine without GPUs trains N copies so. On a group on
the CPU the ranks are told that: ``PartialState``, and with it ``Accelerator``, and ``TrainingArguments.use_cpu``.

``PartialState``, ``AcceleratorState`` and ``GradientState`` are made once for a process, for the group that is there
then; they are forgotten when the ranks join another, and an ``Accelerator`` or a loader that was made before says so.
``Accelerator.end_training`` would destroy that group, and with it the models that a later cell uses.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddip.apps import patches
from ddip.rank.runtime.gpu import gpu

USE_CPU = "ACCELERATE_USE_CPU"
NOT_OURS = "FORK_LAUNCHED"
"""By which accelerate knows that the group is its launcher's: ``end_training`` does not destroy it."""

STALE = (
    "this {kind} was made for a group that has changed its ranks: recreate the Accelerator, and what it has prepared"
)


class StaleStateError(RuntimeError, AttributeError):
    """Something of accelerate's was used that belongs to a former group."""


def accelerate_is_there() -> bool:
    """Can it be used here?"""
    return _state() is not None


def _state() -> ModuleType | None:
    return sys.modules.get("accelerate.state")


def forget() -> None:
    """Have accelerate look anew when it is used next."""
    state = _state()
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
        if state.GradientState._shared_state:  # not emptied: loaders use it before what tells that they are stale
            gradients = state.GradientState()
            gradients.sync_gradients, gradients.dataloader_references = True, [None]


def apply() -> None:
    """Tell accelerate whose the group is, and of one on the CPU."""
    patches.set_variable(NOT_OURS, "1")
    if (state := _state()) is not None:
        for kind in (state.AcceleratorState, state.PartialState):
            patches.patch(kind, "__getattr__", _refusing(kind.__getattr__))
    if gpu.device.type != "cpu":
        return
    arguments = sys.modules.get("transformers.training_args")
    if state is not None:
        own = state.PartialState.__init__

        @functools.wraps(own)
        def on_cpu(self: Any, cpu: bool = False, **kwargs: Any) -> None:
            __tracebackhide__ = True
            own(self, True, **kwargs)

        patches.patch(state.PartialState, "__init__", on_cpu)
        patches.set_variable(USE_CPU, os.environ.get(USE_CPU, "true"))
    if arguments is not None:
        complete = arguments.TrainingArguments.__post_init__

        @functools.wraps(complete)
        def complete_on_cpu(self: Any) -> None:
            __tracebackhide__ = True
            self.use_cpu = True
            complete(self)

        patches.patch(arguments.TrainingArguments, "__post_init__", complete_on_cpu)


def _refusing(own: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    @functools.wraps(own)
    def refuse(self: Any, name: str) -> Any:
        try:
            return own(self, name)
        except AttributeError as error:
            if self.__dict__ or name not in self._known_attrs:
                raise
            raise StaleStateError(f"{STALE.format(kind=type(self).__name__)} ({error})") from None

    return refuse
