"""Handle DDP and FSDP wrappers when the process group is rebuilt, and reset DDP wrappers after a failed cell.

    leave_group   retire_all        remove DDP reducers; each wrapper of the former group raises an error if it is used
    join_group                      the next group
                  revive_wrappers   a DDP wrapper over the default group that all ranks have gets a new reducer and
                                    logger, and rank 0's parameters and buffers are sent to all ranks

    reset_reducers                  after a failed cell that trained, in the same group: each DDP wrapper gets a new
                                    reducer

Ranks match their wrappers by structure and order of creation. The order is the same on all ranks because DDP's
constructor communicates. Ambiguous wrappers are not revived. Neither are FSDP wrappers, because ranks may have stopped
at different steps and their shards no longer fit together (``ddip.dist_state`` keeps shards that do).
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
from ddip.rank import user_namespace
from ddip.rank.objects import changes, reducers
from ddip.rank.objects.live_objects import all_objects
from ddip.rank.runtime import c10d
from ddip.rank.runtime.housekeeping import collect_garbage
from ddip.sharded import contents
from ddip.sharded.copies import from_all

WRAPPERS = {
    "torch.nn.parallel.distributed": "DistributedDataParallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "FullyShardedDataParallel",
    "torch.distributed.fsdp": "FSDPModule",
    "torch.distributed._composable.fsdp": "FSDPModule",
}
"""Wrapper classes that keep the group they were created in, by defining module; the last one is for torch 2.4."""
LOST = (
    "this {name} was made in a process group that has been destroyed: the ranks have formed another since. Wrap its "
    "module again, as in model = DDP(model.module); the parameters are unchanged"
)
LOST_SHARDS = (
    "this {name} was made in a process group that has been destroyed: the ranks have formed another since. Its "
    "parameters are divided among the ranks, which may have left them at different steps: recreate the model; "
    "ddip.dist_state restores parameters and optimizer"
)
BROKEN = (
    "a failed cell left this {name} in the middle of an iteration, and it could not be reset ({why}). Recreate it from "
    "its module, such as model = DDP(model.module); the parameters are unchanged"
)
SETTINGS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "bucket_bytes_cap", "dim")
"""Settings of a DDP wrapper that must be equal on all ranks for their collectives to match."""
BUCKET_BYTES = 250 << 20
"""Size of the buckets in which rank 0's parameters are sent, as in DDP's constructor."""


_numbers: weakref.WeakKeyDictionary[torch.nn.Module, int] = weakref.WeakKeyDictionary()
"""DDP wrappers over the default group, numbered in the order of their creation."""
_counter = itertools.count()
"""Source of the numbers in `_numbers`."""
_retired: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
"""Unusable wrappers, mostly of former groups, each with the handle of the hook that raises the error."""
_error_texts: weakref.WeakKeyDictionary[torch.nn.Module, str] = weakref.WeakKeyDictionary()
"""Error texts of these hooks."""
_revivable: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, reducers.Buckets]] = weakref.WeakKeyDictionary()
"""Retired wrappers that can be revived in the next group, each with the name of its C++ communication hook and the
buckets that its reducer had."""
_unreported: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Retired or since revived wrappers that have not been reported to the user."""
_dropped: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
"""Wrappers of ddip that are no longer used."""
share_also: Callable[[], None] | None = None
"""Set by an app: called on all ranks after wrappers were revived, to send rank 0's state of the app's optimizers."""


def watch_creation() -> None:
    """Number DDP wrappers in the order of their creation; call this once per process."""
    register_module_module_registration_hook(_number_wrapper)
    if compat_torch.is_on(compat_torch.WRAPPERS):
        contents.buckets_of, contents.use_buckets = reducers.next_buckets, reducers.use_buckets


def _number_wrapper(module: torch.nn.Module, name: str, part: Any) -> None:
    """Number and watch `module` if it is a DDP wrapper that is being created.

    torch calls this when `module` registers a submodule `part`. DDP's constructor registers the model after it has set
    its group.
    """
    if name == "module" and isinstance(module, DistributedDataParallel):
        reducers.note_trained(module, part)
        if _uses_default_group(module):
            _numbers[module] = next(_counter)
            changes.watch_wrapper(module, part)


def _uses_default_group(wrapper: torch.nn.Module) -> bool:
    return wrapper.__dict__.get("process_group") is c10d.default_group()


# -- the former group


def retire_all() -> int:
    """Make all wrappers of the group that this rank leaves unusable, and remove their DDP reducers.

    A reducer's hooks on the parameters would otherwise run in the backward pass of the next wrapper. Returns how many
    wrappers have not been reported to the user yet, including wrappers of earlier groups.
    """
    if not _find_wrappers():
        return 0
    collect_garbage()  # ranks may differ in which wrappers are garbage
    for wrapper in _find_wrappers():
        if wrapper in _retired or wrapper in _dropped:
            continue
        if isinstance(wrapper, DistributedDataParallel) and wrapper in _numbers and _can_be_revived(wrapper):
            _revivable[wrapper] = reducers.builtin_hook(wrapper), reducers.buckets_of(wrapper)
        reducers.remove_reducer(wrapper)
        refuse_use(wrapper, LOST if isinstance(wrapper, DistributedDataParallel) else LOST_SHARDS)
        _unreported.add(wrapper)
    return len(_unreported)


def forget_lost_objects() -> list[str]:
    """Mark all retired wrappers as reported to the user; return the variables with unusable ones."""
    lost = {id(wrapper) for wrapper in list(_unreported) if is_lost(wrapper)}
    _unreported.clear()
    modules = {n: v for n, v in list(user_namespace().items()) if issubclass(type(v), torch.nn.Module)}
    holds_lost = {n: any(id(part) in lost for part in torch.nn.Module.modules(v)) for n, v in modules.items()}
    return sorted(name for name, is_holder in holds_lost.items() if is_holder and not name.startswith("_"))


def _find_wrappers() -> list[torch.nn.Module]:
    loaded = [(sys.modules[module], name) for module, name in WRAPPERS.items() if module in sys.modules]
    kinds = tuple(getattr(module, name) for module, name in loaded if hasattr(module, name))
    return [thing for thing in all_objects() if issubclass(type(thing), kinds)]


def refuse_use(wrapper: torch.nn.Module, text: str) -> None:
    """Make `wrapper` raise a RuntimeError with `text` when it is used.

    ``{name}`` in the text is replaced by the wrapper's class.
    """
    _error_texts[wrapper] = text.format(name=type(wrapper).__name__)
    _retired[wrapper] = wrapper.register_forward_pre_hook(_raise_refusal, prepend=True)


def _raise_refusal(wrapper: torch.nn.Module, *_: Any) -> None:
    raise RuntimeError(_error_texts[wrapper])


def is_lost(module: torch.nn.Module) -> bool:
    """Return whether `module` is a wrapper that `refuse_use` has made unusable, such as one of a former group."""
    return module in _retired


def discard_wrapper(wrapper: torch.nn.Module) -> None:
    """Discard a wrapper that ddip has created, with its reducer and the reducer's hooks on the parameters."""
    _dropped.add(wrapper)
    _unreported.discard(wrapper)
    changes.stop_counting(wrapper)
    for name in ("reducer", "logger"):
        wrapper.__dict__.pop(name, None)


def _can_be_revived(wrapper: DistributedDataParallel) -> bool:
    """Return whether a new reducer can be given all settings that the constructor of `wrapper` got.

    That fails for a user's communication hook with state, which depends on the steps of its rank, for DDP's mixed
    precision, whose hooks are elsewhere, and for a device mesh, which belongs to the former group.
    """
    if not compat_torch.is_on(compat_torch.WRAPPERS):
        return False
    attributes = wrapper.__dict__
    hooks: list[tuple[Any, Any]] = attributes.get("_comm_hooks") or []
    data: Any = wrapper._get_ddp_logging_data() if attributes.get("logger") is not None else {}
    return (
        attributes.get("logger") is not None
        and _uses_default_group(wrapper)
        and (len(hooks) == 1 or bool(reducers.builtin_hook(wrapper)) if data.get("comm_hook") else not hooks)
        and all(reducers.uses_default_group(state) for _, state in hooks)
        and attributes.get("mixed_precision") is None
        and attributes.get("device_mesh") is None
        and not attributes.get("_use_python_reducer")
    )


# -- the next group


def begin_group() -> None:
    """Restart the numbering of wrappers for a group that this rank joins, unless some wait to be revived."""
    if not _revivable:
        _renumber_wrappers(())


def revive_wrappers() -> int:
    """Revive the DDP wrappers that all ranks have in the group they have just joined; return how many.

    All ranks must call this. If it fails, the wrappers stay unusable; after an interrupt, the next group retries.
    """
    try:
        revived = _revive_common()
        if revived and share_also is not None:
            share_also()
    except Exception:  # an interrupt is not caught: the next group retries
        _revivable.clear()
        _numbers.clear()  # a retry would fail before each cell
        raise
    _revivable.clear()
    _renumber_wrappers(revived)
    return len(revived)


def _revive_common() -> list[torch.nn.Module]:
    """Revive the wrappers that all ranks have; return them in the order of rank 0."""
    own_wrappers = {_numbers[wrapper]: wrapper for wrapper in list(_revivable)}
    fingerprints = {number: _structure_hash(wrapper) for number, wrapper in own_wrappers.items()}
    buckets = {number: _revivable[wrapper][1] for number, wrapper in own_wrappers.items()}
    of_all_ranks = from_all((fingerprints, buckets))
    wrappers = []
    for matched in match_fingerprints([fingerprints for fingerprints, _ in of_all_ranks]):
        # a rank may have failed just before torch filled its buckets
        packed = [buckets[number] for number, (_, buckets) in zip(matched, of_all_ranks, strict=True)]
        wrappers.append(own_wrappers[matched[dist.get_rank()]])
        _revive_wrapper(wrappers[-1], next(filter(None, packed), []))
    return wrappers


def match_fingerprints(described: Sequence[Mapping[int, str]]) -> list[tuple[int, ...]]:
    """Match wrappers across ranks by fingerprint; return tuples of each rank's number for one wrapper.

    `described` has, per rank, the fingerprints by number. Wrappers match if each rank has exactly one with this
    fingerprint, or if all ranks have the same numbers for it.

    >>> match_fingerprints([{0: "a", 1: "b", 2: "b"}, {4: "a", 1: "b", 2: "b"}])
    [(0, 4), (1, 1), (2, 2)]
    >>> match_fingerprints([{1: "b", 2: "b"}, {0: "b", 1: "b"}])
    []
    """
    found = []
    for kind in dict.fromkeys(described[0].values()):
        numbers = [sorted(number for number, other in of_rank.items() if other == kind) for of_rank in described]
        if all(len(of_rank) == 1 for of_rank in numbers) or all(of_rank == numbers[0] for of_rank in numbers):
            found += list(zip(*numbers, strict=True))
    return sorted(found)


def _structure_hash(wrapper: torch.nn.Module) -> str:
    """Return a hash of what must be equal on all ranks: settings, parameters, buffers and hooks."""
    parts = [*wrapper.named_parameters(), *wrapper.named_buffers()]
    text = repr(
        [
            type(wrapper).__qualname__,
            [getattr(wrapper, name, None) for name in SETTINGS],
            sorted(reducers.trained_by(wrapper)),
        ]
        + [(name, tuple(part.shape), part.dtype, part.device.type, _layout_of(part)) for name, part in parts]
        + [getattr(hook, "__qualname__", "") for hook, _ in getattr(wrapper, "_comm_hooks", [])]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _layout_of(tensor: torch.Tensor) -> Any:
    """Return the layout of a contiguous tensor, else its strides: DDP adds gradients in memory order."""
    is_plain = tensor.layout is not torch.strided or tensor.is_contiguous()
    return tensor.layout if is_plain else tensor.stride()


def _revive_wrapper(wrapper: Any, buckets: reducers.Buckets) -> None:
    attributes = wrapper.__dict__
    attributes["_comm_hooks"] = [
        (hook, reducers.with_default_group(state)) for hook, state in attributes.get("_comm_hooks") or []
    ]
    attributes["process_group"] = c10d.default_group()
    delayed_ids = {id(parameter) for parameter in attributes.get("_delay_all_reduce_params") or []}
    delayed_names = {name for name, parameter in wrapper.module.named_parameters() if id(parameter) in delayed_ids}
    c10d.share_state(wrapper.module, attributes["parameters_to_ignore"] - delayed_names, BUCKET_BYTES)
    reducers.replace_reducer(wrapper, _revivable[wrapper][0], buckets)
    _retired.pop(wrapper).remove()


# -- the same group


def reset_reducers(
    wrappers: Sequence[DistributedDataParallel], broken: bool, is_same_group: bool
) -> list[DistributedDataParallel]:
    """Make DDP wrappers ready for a forward pass after a failed cell; return the usable ones.

    All ranks must call this. In the same group, each wrapper gets a new reducer (otherwise `revive_wrappers` has
    replaced it); if that fails, the wrapper refuses its next use. `broken` says that the cell ended within an
    iteration.
    """
    usable = [
        wrapper for wrapper in wrappers if wrapper not in _dropped and wrapper.__dict__.get("reducer") is not None
    ]
    for wrapper in usable:
        reducers.restart_settings(wrapper, broken)
        if is_same_group:
            try:
                hook, buckets = reducers.builtin_hook(wrapper), reducers.buckets_of(wrapper)
                reducers.replace_reducer(wrapper, hook, buckets, is_in_step=not broken)
            except Exception as error:
                reducers.remove_reducer(wrapper)
                refuse_use(wrapper, BROKEN.replace("{why}", type(error).__name__))
    return [wrapper for wrapper in usable if not is_lost(wrapper)]


def averaged_parameters() -> dict[str, list[torch.nn.Parameter]]:
    """Return the parameters whose gradients are equal on all ranks after a backward pass.

    They are grouped by wrapper number. Only DDP wrappers over the default group with an averaging communication hook
    have such parameters.
    """
    found = {}
    for wrapper, number in list(_numbers.items()):
        attributes = wrapper.__dict__
        states = [state for _, state in attributes.get("_comm_hooks") or []]
        if (
            wrapper not in _retired
            and wrapper not in _dropped
            and all(reducers.is_averaging(state) for state in states)
        ):
            trained = reducers.trained_by(wrapper)
            parameters = attributes["_modules"]["module"].named_parameters()
            found[str(number)] = [parameter for name, parameter in parameters if name in trained]
    return found


def _renumber_wrappers(wrappers: Sequence[torch.nn.Module]) -> None:
    """Number only `wrappers`, starting from zero.

    All ranks do this, so that numbers agree even if one rank had begun to create another wrapper.
    """
    global _counter
    _counter = itertools.count()
    _numbers.clear()
    for wrapper in wrappers:
        _numbers[wrapper] = next(_counter)
