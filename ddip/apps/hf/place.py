"""Where a rank computes, as accelerate sees it.

accelerate 1.15 asks torch for GPUs, and where there is none it takes a process for one alone, whatever torchrun has
set, unless it is told ``cpu=True``; a CUDA build of torch on a machine without GPUs trains N copies so. On a group on
the CPU the ranks are told that: ``PartialState``, and with it ``Accelerator``, and ``TrainingArguments.use_cpu``.

``PartialState``, ``AcceleratorState`` and ``GradientState`` are made once for a process, for the group that is there
then; they are forgotten when the ranks join another. ``Accelerator.end_training`` would destroy that group, and with it
the models that a later cell uses.
"""

from __future__ import annotations

import functools
import os
import sys
from types import ModuleType
from typing import Any

from ddip.apps import patches
from ddip.rank.gpu import gpu

USE_CPU = "ACCELERATE_USE_CPU"
NOT_OURS = "FORK_LAUNCHED"
"""By which accelerate knows that the group is its launcher's: ``end_training`` does not destroy it."""


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
        state.GradientState._reset_state()


def apply() -> None:
    """Tell accelerate whose the group is, and of one on the CPU."""
    patches.set_variable(NOT_OURS, "1")
    if gpu.device.type != "cpu":
        return
    state, arguments = _state(), sys.modules.get("transformers.training_args")
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
