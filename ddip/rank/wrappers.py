"""What wraps a model for one process group (DDP, FSDP), when that group is formed again.

    leave    retire    each wrapper of the former group says so if it is used; DDP's reducer goes
    join               the next group
             revive    a DDP over the default group goes on if all ranks have it: reducer and logger are made anew, and
                       rank 0's parameters and buffers are sent to all

Which of its wrappers is which, a rank knows by what they wrap and by their order: DDP's constructor meets the other
ranks, so all ranks make theirs in the same one. Where there is any doubt they are not revived. FSDP's are not either:
the shards of ranks that stopped at different steps fit no more (``ddip.dist_state`` keeps some that do).
``tests/unit/test_private_names.py`` fails when a release of torch changes what is used here.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import itertools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ddip.protocol.reports import OptimizerState, Revived
from ddip.rank import c10d, changes
from ddip.rank.checksum import checksum
from ddip.rank.housekeeping import collect_garbage

WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "torch.distributed.fsdp": "FSDPModule",
    "torch.distributed._composable.fsdp": "FSDPModule",
}
"""Modules that hold the group that they were made in, by the module that has them; the last one is torch 2.4's."""
LOST = (
    "this {name} was made in a process group that has been destroyed: the ranks have formed another since. Wrap its "
    "module again, such as model = DDP(model.module); the parameters are unchanged"
)
LOST_SHARDS = (
    "this {name} was made in a process group that has been destroyed: the ranks have formed another since. Its "
    "parameters are divided among the ranks, which may have left them at different steps: make the model again; "
    "ddip.dist_state brings parameters and optimizer back"
)
SETTINGS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_bytes_cap", "dim")
"""Of a DDP, what must be the same on all ranks for their collectives to match."""
FIRST_STEP = {"_has_rebuilt_buckets": False, "_static_graph_delay_allreduce_enqueued": False}
"""What a DDP knows of its reducer's first step."""
BUCKET_BYTES = 250 << 20
"""Of parameters that are sent together, as DDP's constructor does."""


@dataclass
class _Made:
    """A DDP over the default group."""

    number: int
    """In the order in which they were made."""
    trained: frozenset[str]
    """The parameters that required a gradient then, which its reducer has: it may be frozen now."""


_made: weakref.WeakKeyDictionary[torch.nn.Module, _Made] = weakref.WeakKeyDictionary()
_next = itertools.count()
_retired: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
"""Those of a former group, with the handle of the hook that refuses."""
_revivable: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Of those, the ones that can go on in the next group."""
_untold: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Of those, or of those that have gone on since, the ones of which the user has not been told."""
_dropped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
share_also: Callable[[], None] | None = None
"""An app's: called on all ranks when wrappers were revived; gives all of them rank 0's state of optimizers it knows."""


def watch() -> None:
    """Once: see in which order DDPs are made."""
    register_module_module_registration_hook(_number)


def _number(module: torch.nn.Module, name: str, part: Any) -> None:
    """A `module` gets a `part`: DDP's constructor takes the model when it knows its group."""
    if name == "module" and isinstance(module, DistributedDataParallel) and _is_over_the_world(module):
        trained = frozenset(name for name, parameter in part.named_parameters() if parameter.requires_grad)
        _made[module] = _Made(next(_next), trained)
        changes.watch_wrapper(module, part)


def _is_over_the_world(wrapper: torch.nn.Module) -> bool:
    return wrapper.__dict__.get("process_group") is c10d.world()


# -- the former group


def retire() -> int:
    """Have each wrapper of the group that is left say so when it is used.

    Returns how many there are, with those of former groups of which the user has not been told.

    DDP's reducer goes: it has hooks on the parameters, which would take part in the backward pass of the next wrapper.
    """
    if not _all():
        return 0
    collect_garbage()  # it may hold some, on one rank or the other
    compiled = _compiled()
    for wrapper in _all():
        if wrapper in _retired or wrapper in _dropped:
            continue
        if isinstance(wrapper, DistributedDataParallel) and wrapper in _made and _can_be_revived(wrapper, compiled):
            _revivable.add(wrapper)
        for name in ("reducer", "logger"):
            if name in wrapper.__dict__:
                wrapper.__dict__[name] = None
        _retired[wrapper] = wrapper.register_forward_pre_hook(_refuse, prepend=True)
        _untold.add(wrapper)
    return len(_untold)


def forget_gone() -> None:
    """The user has been told of those that were retired."""
    _untold.clear()


def _all() -> list[torch.nn.Module]:
    loaded = [(sys.modules[module], name) for module, name in WRAPPERS.items() if module in sys.modules]
    kinds = tuple(getattr(module, name) for module, name in loaded if hasattr(module, name))
    return [thing for thing in gc.get_objects() if issubclass(type(thing), kinds)]


def _refuse(wrapper: torch.nn.Module, *_: Any) -> None:
    text = LOST if isinstance(wrapper, DistributedDataParallel) else LOST_SHARDS
    raise RuntimeError(text.format(name=type(wrapper).__name__))


def is_lost(module: torch.nn.Module) -> bool:
    """Is this a wrapper of a former group, which refuses to be used?"""
    return module in _retired


def drop(wrapper: torch.nn.Module) -> None:
    """Be done with a wrapper of ddip's own: its hooks on the parameters go now, and not when it is collected."""
    _dropped.add(wrapper)
    _untold.discard(wrapper)
    changes.forget(wrapper)
    for name in ("reducer", "logger"):
        wrapper.__dict__.pop(name, None)


def _compiled() -> set[int]:
    """Ids of the modules that were given to ``torch.compile``."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return {id(thing._orig_mod) for thing in gc.get_objects() if type(thing) is kind} if kind else set()


def _can_be_revived(wrapper: DistributedDataParallel, compiled: Collection[int]) -> bool:
    """Is all of `wrapper` known that its constructor was told?

    A hook for gradients may keep a state, which depends on the steps that its rank has done; one of torch's own in C++
    is not kept; with mixed precision of DDP's own, and with parameters that are reduced late, hooks lie elsewhere. A
    wrapper that was compiled itself, and not only what it wraps, meets no other rank in its next backward pass.
    """
    told = wrapper.__dict__
    hooks: list[tuple[Any, Any]] = told.get("_comm_hooks") or []
    data: Any = wrapper._get_ddp_logging_data() if told.get("logger") is not None else {}
    return (
        told.get("logger") is not None
        and _is_over_the_world(wrapper)
        and (len(hooks) == 1 if data.get("comm_hook") else not hooks)
        and all(state is None or state is c10d.world() for _, state in hooks)
        and told.get("mixed_precision") is None
        and told.get("device_mesh") is None
        and told.get("_compiled_call_impl") is None
        and id(wrapper) not in compiled
        and not told.get("_delay_all_reduce_params")
        and not told.get("_use_python_reducer")
    )


# -- the next one


def begin_group() -> None:
    """The rank joins a group: where nothing waits to be revived, all ranks begin to count anew."""
    if not _revivable:
        _number_anew(())


def revive() -> Revived:
    """On all ranks, in the group that they have just joined: have the DDPs go on that each of them has."""
    try:
        revived = _revive_common()
        if revived and share_also is not None:
            share_also()
    except Exception:  # but an interrupt: it is tried again in the next group
        _revivable.clear()
        _made.clear()  # it would fail before each cell from here on: they are lost
        raise
    _revivable.clear()
    _number_anew(revived)
    return {"wrappers": len(revived), "optimizers": _optimizers(revived)}


def _revive_common() -> list[torch.nn.Module]:
    """Revive those that all ranks have; returns them in the order of rank 0's."""
    mine = {_made[wrapper].number: wrapper for wrapper in list(_revivable)}
    described = {number: _description(wrapper) for number, wrapper in mine.items()}
    theirs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(theirs, described)
    wrappers = [mine[numbers[dist.get_rank()]] for numbers in matches(theirs)]
    for wrapper in wrappers:
        _revive(wrapper)
    return wrappers


def matches(described: Sequence[Mapping[int, str]]) -> list[tuple[int, ...]]:
    """The numbers on each rank of those that are one wrapper: the only one of its kind everywhere, or one of several
    that have the same numbers everywhere.

    >>> matches([{0: "a", 1: "b", 2: "b"}, {4: "a", 1: "b", 2: "b"}])
    [(0, 4), (1, 1), (2, 2)]
    >>> matches([{1: "b", 2: "b"}, {0: "b", 1: "b"}])
    []
    """
    found = []
    for kind in dict.fromkeys(described[0].values()):
        numbers = [sorted(number for number, other in one.items() if other == kind) for one in described]
        if all(len(one) == 1 for one in numbers) or all(one == numbers[0] for one in numbers):
            found += list(zip(*numbers, strict=True))
    return sorted(found)


def _description(wrapper: torch.nn.Module) -> str:
    """What must be the same on all ranks."""
    parts = [*wrapper.named_parameters(), *wrapper.named_buffers()]
    text = repr(
        [
            type(wrapper).__qualname__,
            [getattr(wrapper, name, None) for name in SETTINGS],
            sorted(_made[wrapper].trained),
        ]
        + [(name, tuple(part.shape), part.dtype, part.device.type) for name, part in parts]
        + [getattr(hook, "__qualname__", "") for hook, _ in getattr(wrapper, "_comm_hooks", [])]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _revive(wrapper: Any) -> None:
    told = wrapper.__dict__
    hooks = [(hook, None if state is None else c10d.world()) for hook, state in told.get("_comm_hooks", [])]
    told["process_group"] = c10d.world()
    c10d.share_state(wrapper.module, told["parameters_to_ignore"], BUCKET_BYTES)
    told.update(FIRST_STEP)
    with _as_made(wrapper):
        wrapper.__setstate__(wrapper.__getstate__())  # makes reducer and logger
    if hooks:
        told["_comm_hooks"] = []
        for hook, state in hooks:
            wrapper.register_comm_hook(state, hook)
    _retired.pop(wrapper).remove()


@contextlib.contextmanager
def _as_made(wrapper: Any) -> Iterator[None]:
    """While this lasts, the parameters that require a gradient are those that did when `wrapper` was made."""
    now = [(parameter, parameter.requires_grad) for parameter in wrapper.module.parameters()]
    for name, parameter in wrapper.module.named_parameters():
        parameter.requires_grad_(name in _made[wrapper].trained)
    try:
        yield
    finally:
        for parameter, requires_grad in now:
            parameter.requires_grad_(requires_grad)


def _number_anew(wrappers: Sequence[torch.nn.Module]) -> None:
    """On all ranks alike: some may have begun to make one that the others have not."""
    global _next
    _next = itertools.count()
    trained = [_made[wrapper].trained for wrapper in wrappers]
    _made.clear()
    for wrapper, names in zip(wrappers, trained, strict=True):
        _made[wrapper] = _Made(next(_next), names)


def _optimizers(wrappers: list[torch.nn.Module]) -> list[OptimizerState]:
    """What is known of the optimizers of these: their state is each rank's own."""
    parameters = dict.fromkeys(parameter for wrapper in wrappers for parameter in wrapper.parameters())
    numbers = {parameter: number for number, parameter in enumerate(parameters)}
    found: list[OptimizerState] = []
    for thing in gc.get_objects() if wrappers else ():
        if issubclass(type(thing), torch.optim.Optimizer):
            groups = getattr(thing, "param_groups", ())
            own = [numbers.get(parameter, -1) for group in groups for parameter in group["params"]]
            if max(own, default=-1) >= 0:
                found.append({"name": type(thing).__name__, "parameters": own, "state": _state(thing)})
    return sorted(found, key=lambda one: (one["parameters"], one["name"]))


def _state(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Checksums of the tensors, and the numbers as text."""
    parts = [optimizer.state.get(parameter, {}) for group in optimizer.param_groups for parameter in group["params"]]
    values = [value for part in [*parts, *optimizer.param_groups] for value in part.values()]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    return [*checksum(tensors), repr([value for value in values if isinstance(value, int | float)])]
