"""Tell accelerate and transformers on which device a rank computes, and keep them from using a former group.

accelerate 1.15 asks torch for GPUs. Without one, it treats each process as the only one, regardless of torchrun's
variables, unless it gets ``cpu=True``; a CUDA build of torch on a machine without GPUs then trains N separate copies.
In a group on the CPU, ddip therefore sets ``cpu=True`` for ``PartialState``, and so for ``Accelerator``, and
``TrainingArguments.use_cpu``.

accelerate makes ``PartialState``, ``AcceleratorState`` and ``GradientState`` once per process, for the current group.
ddip resets them when the ranks join another group; an older ``Accelerator`` or loader then raises `StaleStateError`.
``Accelerator.end_training`` must not destroy the group, which the models of later cells use.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ddip.apps import patches
from ddip.rank.runtime.gpu import gpu

USE_CPU = "ACCELERATE_USE_CPU"
NOT_OURS = "FORK_LAUNCHED"
"""Variable that tells accelerate that a launcher owns the group, so that ``end_training`` does not destroy it."""

STALE = "the {kind} was made for former ranks of the group: recreate it, and prepare its objects again"


_had_state = False
"""True if accelerate had a state for a former group, so that objects with that state may exist."""


class StaleStateError(RuntimeError, AttributeError):
    """An object of accelerate from a former group was used."""

    def __init__(self, state: object, reason: object = "") -> None:
        text = STALE.format(kind=type(state).__name__.replace("AcceleratorState", "Accelerator"))
        super().__init__(f"{text} ({reason})" if reason else text)


def _state_module() -> ModuleType | None:
    return sys.modules.get("accelerate.state")


def reset_state() -> None:
    """Reset accelerate's state so that it is made for the current group on next use."""
    global _had_state
    state = _state_module()
    if state is not None:
        _had_state = _had_state or bool(state.AcceleratorState._shared_state)
        state.AcceleratorState._reset_state(reset_partial_state=True)
        if state.GradientState._shared_state:  # not emptied: loaders read it before they would raise StaleStateError
            gradients = state.GradientState()
            gradients.sync_gradients, gradients.dataloader_references = True, [None]


def apply_patches() -> None:
    """Patch accelerate and transformers for this group and, if it is on the CPU, for the CPU."""
    patches.set_variable(NOT_OURS, "1")
    if (state := _state_module()) is not None:
        for kind in (state.AcceleratorState, state.PartialState):
            patches.wrap_function(kind, "__getattr__", _get_or_raise)
        patches.wrap_function(state.AcceleratorState, "__init__", _init_by_accelerator)
    if gpu.device.type != "cpu":
        return
    arguments = sys.modules.get("transformers.training_args")
    if state is not None:
        patches.wrap_function(state.PartialState, "__init__", _init_on_cpu)
        patches.set_variable(USE_CPU, os.environ.get(USE_CPU, "true"))
    if arguments is not None:
        patches.wrap_function(arguments.TrainingArguments, "__post_init__", _post_init_on_cpu)


def _init_on_cpu(init: Callable[..., None], self: Any, cpu: bool = False, **kwargs: Any) -> None:
    __tracebackhide__ = True
    init(self, True, **kwargs)


def _post_init_on_cpu(post_init: Callable[[Any], None], self: Any) -> None:
    __tracebackhide__ = True
    self.use_cpu = True
    post_init(self)


def _get_or_raise(get: Callable[[Any, str], Any], self: Any, name: str) -> Any:
    try:
        return get(self, name)
    except AttributeError as error:
        if self.__dict__ or name.startswith("__"):
            raise
        raise StaleStateError(self, error) from None


def _init_by_accelerator(init: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any) -> None:
    """Call ``AcceleratorState.__init__``, or raise StaleStateError if a former object asks for the state.

    Such an object is a scheduler or a loader of an Accelerator of former ranks.

    accelerate raises, too, but without a hint, and leaves half a state, with which all that follows fails.
    """
    __tracebackhide__ = True
    if _had_state and not self._shared_state and not kwargs.get("_from_accelerator"):
        raise StaleStateError(self)
    init(self, *args, **kwargs)
