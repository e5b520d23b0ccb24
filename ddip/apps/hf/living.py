"""What accelerate keeps in use while the ranks form their group again, after an error or a stop.

DDP wrappers go on with rank 0's parameters (``rank/objects/wrappers.py``). In accelerate 1.15 more differs between
ranks that stopped at different places: the state of optimizers and schedulers, where rank 0's is given to all, the
count of steps over which gradients are accumulated, which begins anew, and the loaders that each was in the midst of,
which are forgotten. Gradients of the step that failed go, with their memory.

A stop may find all ranks at work, after the collectives of a step, when only some have taken it: so where a cell fails
in which an optimizer has taken steps, the group is formed again, although no rank waits for another.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import pickle
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ddip.apps import patches, rank_exchange
from ddip.rank.objects import wrappers
from ddip.rank.objects.checksum import checksum
from ddip.rank.objects.wrappers import matches
from ddip.rank.process_group import membership
from ddip.rank.runtime import current
from ddip.rank.runtime.gpu import gpu

_numbers = itertools.count()
_kept: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""Optimizers and schedulers that accelerate has wrapped, in the order in which they were made."""
_has_stepped = False
"""Has an optimizer taken a step in this cell?"""
_accelerators: weakref.WeakSet[Any] = weakref.WeakSet()


def apply() -> None:
    """Note what is made."""
    for module, name, note in (
        ("accelerate.accelerator", "Accelerator", _accelerators.add),
        ("accelerate.optimizer", "AcceleratedOptimizer", _number),
        ("accelerate.scheduler", "AcceleratedScheduler", _number),
    ):
        if module in sys.modules:
            kind = getattr(sys.modules[module], name)
            patches.patch(kind, "__init__", _noting(kind.__init__, note))
    if "accelerate.optimizer" in sys.modules:
        kind = sys.modules["accelerate.optimizer"].AcceleratedOptimizer
        patches.patch(kind, "step", _noted(kind.step))
    patches.patch(wrappers, "share_also", share_states)


def _noting(init: Callable[..., None], note: Callable[[Any], object]) -> Callable[..., None]:
    @functools.wraps(init)
    def make(self: Any, *args: Any, **kwargs: Any) -> None:
        __tracebackhide__ = True
        init(self, *args, **kwargs)
        note(self)

    return make


def _noted(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        global _has_stepped
        _has_stepped = True
        return step(self, *args, **kwargs)

    return take


def begin_cell() -> None:
    """No step has been taken yet."""
    global _has_stepped
    _has_stepped = False


def end_cell(error: BaseException | None) -> None:
    """Some ranks may be a step ahead of others."""
    if error is not None and _has_stepped and current.is_everywhere():
        membership.give_up()


def _number(thing: Any) -> None:
    _kept[thing] = next(_numbers)


def go_on() -> None:
    """On each rank, in a new group."""
    for accelerator in _accelerators:
        accelerator.step = 0
    state = sys.modules.get("accelerate.state")
    if state is not None and state.GradientState._shared_state:
        gradients = state.GradientState()
        gradients.sync_gradients, gradients.dataloader_references = True, [None]
    for thing in _kept:
        if hasattr(thing, "param_groups"):
            thing.optimizer.zero_grad(set_to_none=True)


def share_states() -> None:
    """On all ranks at once: give them rank 0's state of the optimizers and schedulers that each of them has."""
    mine = {number: thing for thing, number in _kept.items()}
    described = rank_exchange.gather_objects({number: _description(thing) for number, thing in mine.items()})
    things = [mine[numbers[rank_exchange.rank()]] for numbers in matches(described)]
    packed = [_pack(thing.state_dict()) for thing in things]
    marks = rank_exchange.gather_objects(
        [rank_exchange.fingerprint((data, checksum(tensors))) for data, tensors in packed]
    )
    for number, (thing, (data, tensors)) in enumerate(zip(things, packed, strict=True)):
        if len({of_rank[number] for of_rank in marks}) > 1:
            state, received = _unpack(rank_exchange.broadcast_object(data))
            rank_exchange.broadcast_tensors(tensors if rank_exchange.rank() == 0 else received)
            if rank_exchange.rank() != 0:
                thing.load_state_dict({**thing.state_dict(), **state})


def _description(thing: Any) -> str:
    """What must be the same on all ranks."""
    inner = thing.optimizer if hasattr(thing, "param_groups") else thing.scheduler
    shapes = [tuple(parameter.shape) for group in getattr(thing, "param_groups", ()) for parameter in group["params"]]
    return repr((type(thing).__name__, type(inner).__qualname__, shapes))


def _pack(state: dict[str, Any]) -> tuple[bytes, list[Tensor]]:
    """`state` without its tensors, and these; what cannot be pickled, such as a scheduler's lambda, stays each rank's
    own."""
    data: dict[str, bytes] = {}
    tensors: list[Tensor] = []
    for name, value in state.items():
        with contextlib.suppress(Exception):
            data[name], of_value = _pack_value(value)
            tensors += of_value
    return pickle.dumps(data), tensors


def _pack_value(value: Any) -> tuple[bytes, list[Tensor]]:
    tensors: list[Tensor] = []

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return None
            tensors.append(value)
            return tuple(value.shape), value.dtype, value.device.type

    data = io.BytesIO()
    Pickler(data).dump(value)
    return data.getvalue(), tensors


def _unpack(data: bytes) -> tuple[dict[str, Any], list[Tensor]]:
    """What was packed, with tensors to be filled, and these."""
    tensors: list[Tensor] = []

    class Unpickler(pickle.Unpickler):
        def persistent_load(self, told: Any) -> Tensor:
            shape, dtype, kind = told
            tensors.append(torch.empty(shape, dtype=dtype, device=gpu.device if kind == gpu.device.type else kind))
            return tensors[-1]

    return {name: Unpickler(io.BytesIO(value)).load() for name, value in pickle.loads(data).items()}, tensors
