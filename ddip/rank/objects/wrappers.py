"""What wraps a model for one process group (DDP, FSDP), when that group is formed again.

    leave    retire    each wrapper of the former group says so if it is used; DDP's reducer goes
    join               the next group
             revive    a DDP over the default group goes on if all ranks have it: reducer and logger are made anew, and
                       rank 0's parameters and buffers are sent to all

    reset              after a failed cell that trained, in the same group: each DDP gets a new reducer

Which of its wrappers is which, a rank knows by what they wrap and by their order: DDP's constructor meets the other
ranks, so all ranks make theirs in the same one. Where there is any doubt they are not revived. FSDP's are not either:
the shards of ranks that stopped at different steps fit no more (``ddip.dist_state`` keeps some that do).
``tests/unit/test_private_names.py`` fails when a release of torch changes what is used here.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from ddip.protocol import compat_torch
from ddip.rank.objects import changes, reducers
from ddip.rank.objects.live_objects import all_objects
from ddip.rank.runtime import c10d
from ddip.rank.runtime.housekeeping import collect_garbage

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
BROKEN = (
    "a failed cell left this {name} in the middle of an iteration, and it could not be reset ({why}). Recreate it from "
    "its module, such as model = DDP(model.module); the parameters are unchanged"
)
SETTINGS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_bytes_cap", "dim")
"""Of a DDP, what must be the same on all ranks for their collectives to match."""
BUCKET_BYTES = 250 << 20
"""Of parameters that are sent together, as DDP's constructor does."""


_made: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
"""The DDPs over the default group, numbered in the order in which they were made."""
_next = itertools.count()
"""Of these numbers."""
_retired: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
"""Those of a former group, with the handle of the hook that refuses."""
_texts: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
"""What such a hook says."""
_builtin_hooks: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
"""Names of the C++ communication hooks of those that can be revived."""
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
    if name == "module" and isinstance(module, DistributedDataParallel):
        reducers.note_trained(module, part)
        if _is_over_the_world(module):
            _made[module] = next(_next)
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
    for wrapper in _all():
        if wrapper in _retired or wrapper in _dropped:
            continue
        if isinstance(wrapper, DistributedDataParallel) and wrapper in _made and _can_be_revived(wrapper):
            _revivable.add(wrapper)
            _builtin_hooks[wrapper] = reducers.builtin_hook(wrapper)
        reducers.remove_reducer(wrapper)
        refuse(wrapper, LOST if isinstance(wrapper, DistributedDataParallel) else LOST_SHARDS)
        _untold.add(wrapper)
    return len(_untold)


def forget_gone() -> None:
    """The user has been told of those that were retired."""
    _untold.clear()


def _all() -> list[torch.nn.Module]:
    loaded = [(sys.modules[module], name) for module, name in WRAPPERS.items() if module in sys.modules]
    kinds = tuple(getattr(module, name) for module, name in loaded if hasattr(module, name))
    return [thing for thing in all_objects() if issubclass(type(thing), kinds)]


def refuse(wrapper: torch.nn.Module, text: str) -> None:
    """Have `wrapper` raise a RuntimeError with `text` when it is used next."""
    _texts[wrapper] = text.format(name=type(wrapper).__name__)
    _retired[wrapper] = wrapper.register_forward_pre_hook(_refuse, prepend=True)


def _refuse(wrapper: torch.nn.Module, *_: Any) -> None:
    raise RuntimeError(_texts[wrapper])


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


def _can_be_revived(wrapper: DistributedDataParallel) -> bool:
    """Is all of `wrapper` known that its constructor was told?

    A user's hook for gradients may keep a state, which depends on the steps that its rank has done; with mixed
    precision of DDP's own hooks lie elsewhere; a device mesh is of the former group.
    """
    if not compat_torch.is_on(compat_torch.WRAPPERS):
        return False
    told = wrapper.__dict__
    hooks: list[tuple[Any, Any]] = told.get("_comm_hooks") or []
    data: Any = wrapper._get_ddp_logging_data() if told.get("logger") is not None else {}
    return (
        told.get("logger") is not None
        and _is_over_the_world(wrapper)
        and (len(hooks) == 1 or bool(reducers.builtin_hook(wrapper)) if data.get("comm_hook") else not hooks)
        and all(reducers.is_of_the_world(state) for _, state in hooks)
        and told.get("mixed_precision") is None
        and told.get("device_mesh") is None
        and not told.get("_use_python_reducer")
    )


# -- the next one


def begin_group() -> None:
    """The rank joins a group: where nothing waits to be revived, all ranks begin to count anew."""
    if not _revivable:
        _number_anew(())


def revive() -> int:
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
    return len(revived)


def _revive_common() -> list[torch.nn.Module]:
    """Revive those that all ranks have; returns them in the order of rank 0's."""
    mine = {_made[wrapper]: wrapper for wrapper in list(_revivable)}
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
            sorted(reducers.trained_by(wrapper)),
        ]
        + [(name, tuple(part.shape), part.dtype, part.device.type) for name, part in parts]
        + [getattr(hook, "__qualname__", "") for hook, _ in getattr(wrapper, "_comm_hooks", [])]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _revive(wrapper: Any) -> None:
    told = wrapper.__dict__
    told["_comm_hooks"] = [(hook, reducers.of_this_world(state)) for hook, state in told.get("_comm_hooks") or []]
    told["process_group"] = c10d.world()
    late = {id(parameter) for parameter in told.get("_delay_all_reduce_params") or []}
    shared = {name for name, parameter in wrapper.module.named_parameters() if id(parameter) in late}
    c10d.share_state(wrapper.module, told["parameters_to_ignore"] - shared, BUCKET_BYTES)
    reducers.replace_reducer(wrapper, _builtin_hooks.get(wrapper, ""))
    _retired.pop(wrapper).remove()


# -- the same group


def reset(wrappers: Sequence[DistributedDataParallel], broken: bool, is_same_group: bool) -> None:
    """On all ranks, when a cell that trained has failed: have each DDP ready for a forward pass.

    It gets a new reducer, if `revive` has not given it one; if it cannot have that, it refuses its next use. `broken`:
    the cell has ended within an iteration.
    """
    for wrapper in wrappers:
        if wrapper in _dropped or wrapper.__dict__.get("reducer") is None:
            continue
        reducers.restart_settings(wrapper, broken)
        if is_same_group:
            try:
                reducers.replace_reducer(wrapper, reducers.builtin_hook(wrapper))
            except Exception as error:
                reducers.remove_reducer(wrapper)
                refuse(wrapper, BROKEN.replace("{why}", type(error).__name__))


def averaged() -> dict[str, list[torch.nn.Parameter]]:
    """The parameters of each DDP over the default group whose gradients are the same on all ranks after a backward
    pass, by the wrapper's number."""
    found = {}
    for wrapper, number in list(_made.items()):
        told = wrapper.__dict__
        states = [state for _, state in told.get("_comm_hooks") or []]
        if (
            wrapper not in _retired
            and wrapper not in _dropped
            and all(reducers.is_averaging(state) for state in states)
        ):
            trained = reducers.trained_by(wrapper)
            parameters = told["_modules"]["module"].named_parameters()
            found[str(number)] = [parameter for name, parameter in parameters if name in trained]
    return found


def _number_anew(wrappers: Sequence[torch.nn.Module]) -> None:
    """On all ranks alike: some may have begun to make one that the others have not."""
    global _next
    _next = itertools.count()
    _made.clear()
    for wrapper in wrappers:
        _made[wrapper] = next(_next)
