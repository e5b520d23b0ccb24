"""Make accelerate's objects equal on all ranks when the group is rebuilt after an error or a stop.

DDP wrappers continue with rank 0's parameters (``rank/objects/wrappers.py``). In accelerate 1.15, more state differs
between ranks that stopped at different points: all ranks get rank 0's state of optimizers and schedulers, the step
count of gradient accumulation restarts, unfinished loaders are forgotten, and gradients of the failed step are freed.

A stop may interrupt the ranks after the collectives of a step, when only some of them have updated the parameters. So
if a cell fails in which an optimizer took a step, the group is rebuilt even if no rank waits for another.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ddip.apps import patches, rank_exchange
from ddip.rank.objects import wrappers
from ddip.rank.objects.checksum import tensor_checksums
from ddip.rank.objects.wrappers import match_fingerprints
from ddip.rank.process_group import membership
from ddip.rank.runtime import current
from ddip.rank.runtime.gpu import gpu
from ddip.sharded import contents

State: TypeAlias = dict[str, tuple[dict[str, Tensor], bytes]]
"""Tensors, and the rest pickled, of each entry of the state of an optimizer or scheduler."""
_numbers = itertools.count()
_stateful_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Optimizers and schedulers that accelerate has wrapped, with numbers in the order of their creation."""
_has_stepped = False
"""True if an optimizer has taken a step in this cell."""
_accelerators: weakref.WeakSet[Any] = weakref.WeakSet()


def apply_patches() -> None:
    """Patch accelerate to note new objects and optimizer steps, and share their states in a rebuilt group."""
    for module, name, note in (
        ("accelerate.accelerator", "Accelerator", _accelerators.add),
        ("accelerate.optimizer", "AcceleratedOptimizer", _assign_number),
        ("accelerate.scheduler", "AcceleratedScheduler", _assign_number),
    ):
        if module in sys.modules:
            kind = getattr(sys.modules[module], name)
            patches.wrap_function(kind, "__init__", functools.partial(_init_and_note, note))
    if "accelerate.optimizer" in sys.modules:
        kind = sys.modules["accelerate.optimizer"].AcceleratedOptimizer
        patches.wrap_function(kind, "step", _step_noted)
    patches.set_attribute(wrappers, "share_also", share_states)


def _init_and_note(
    note: Callable[[Any], object], init: Callable[..., None], self: Any, /, *args: Any, **kwargs: Any
) -> None:
    __tracebackhide__ = True
    init(self, *args, **kwargs)
    note(self)


def _step_noted(step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    global _has_stepped
    _has_stepped = True
    return step(*args, **kwargs)


def begin_cell() -> None:
    """Note that no optimizer has taken a step in this cell yet."""
    global _has_stepped
    _has_stepped = False


def end_cell(error: BaseException | None) -> None:
    """After an error, request a rebuild of the group if some ranks may be an optimizer step ahead of others."""
    if error is not None and _has_stepped and current.is_everywhere():
        membership.give_up()


def _assign_number(stateful: Any) -> None:
    _stateful_numbers[stateful] = next(_numbers)


def reset_iterations() -> None:
    """Reset counts, gradients and loaders of the broken iteration on this rank, in a rebuilt group."""
    for accelerator in _accelerators:
        accelerator.step = 0
    state = sys.modules.get("accelerate.state")
    if state is not None and state.GradientState._shared_state:
        gradients = state.GradientState()
        gradients.sync_gradients, gradients.dataloader_references = True, [None]
    for stateful in _stateful_numbers:
        if hasattr(stateful, "param_groups"):
            stateful.optimizer.zero_grad(set_to_none=True)


def share_states() -> None:
    """Copy rank 0's state to the optimizers and schedulers that exist on all ranks. A collective."""
    by_number = {number: stateful for stateful, number in _stateful_numbers.items()}
    descriptions = rank_exchange.gather_objects(
        {number: _describe_stateful(stateful) for number, stateful in by_number.items()}
    )
    common = [by_number[numbers[rank_exchange.rank()]] for numbers in match_fingerprints(descriptions)]
    states = [_take_apart(stateful.state_dict()) for stateful in common]
    fingerprints = rank_exchange.gather_objects([_fingerprint_state(state) for state in states])
    for number, (stateful, state) in enumerate(zip(common, states, strict=True)):
        if len({of_rank[number] for of_rank in fingerprints}) > 1:
            _share_state(stateful, state)


def _fingerprint_state(state: State) -> int:
    parts = [(name, rest, tensor_checksums([*tensors.values()])) for name, (tensors, rest) in state.items()]
    return rank_exchange.fingerprint_value(parts)


def _share_state(stateful: Any, state: State) -> None:
    """Copy rank 0's `state` to the optimizer or scheduler of all ranks. A collective."""
    forms = {
        name: ({key: (t.shape, t.dtype, t.device.type) for key, t in tensors.items()}, rest)
        for name, (tensors, rest) in state.items()
    }
    forms = rank_exchange.broadcast_object(forms)
    is_source = rank_exchange.rank() == 0
    if not is_source:
        state = {
            name: ({key: _allocate_tensor(*form) for key, form in entry.items()}, rest)
            for name, (entry, rest) in forms.items()
        }
    rank_exchange.broadcast_tensors([tensor for tensors, _ in state.values() for tensor in tensors.values()])
    if not is_source:
        received = {
            name: contents.put_together(pickle.loads(rest)[name], found) for name, (found, rest) in state.items()
        }
        stateful.load_state_dict({**stateful.state_dict(), **received})


def _allocate_tensor(shape: torch.Size, dtype: torch.dtype, kind: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=gpu.device if kind == gpu.device.type else kind)


def _describe_stateful(stateful: Any) -> str:
    """Return a description that must be equal on all ranks: classes and parameter shapes."""
    inner = stateful.optimizer if hasattr(stateful, "param_groups") else stateful.scheduler
    shapes = [
        tuple(parameter.shape) for group in getattr(stateful, "param_groups", ()) for parameter in group["params"]
    ]
    return repr((type(stateful).__name__, type(inner).__qualname__, shapes))


def _take_apart(state: dict[str, Any]) -> State:
    """Return the tensors of each entry of `state`, and the rest of the entry, pickled.

    Entries that cannot be pickled, such as a scheduler's lambda, are left out: each rank keeps its own.
    """
    apart = {}
    for name, value in state.items():
        with contextlib.suppress(Exception):
            apart[name] = contents.take_apart({name: value})
    return apart
