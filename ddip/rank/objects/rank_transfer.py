"""Push objects into this rank's namespace, and pull objects from it.

Large objects travel in parts, so that the user sees progress and nothing copies the whole object on the way. If several
ranks of one host get the same push, it is in memory once: each rank maps it privately, and the system copies a page
before a rank changes it (``protocol/objects/shared.py``). A pull to a notebook on the same host also needs memory once.

A push is all-or-nothing. A rank that could unpickle all names sets them at once, and keeps the replaced values until
the notebook has heard from all ranks. If any rank failed, the others restore the replaced values.
"""

from __future__ import annotations

import mmap
import sys
from collections import Counter
from typing import Any, TypeAlias

import torch

from ddip.protocol.objects import pickling, shared
from ddip.protocol.objects.pickling import Loader, Pickled
from ddip.protocol.objects.shared import SharedBytes
from ddip.protocol.reports import PackedObjects, Paths, Place, PushResult
from ddip.protocol.text import escape_surrogates
from ddip.rank import user_namespace
from ddip.rank.objects import changes
from ddip.rank.objects.wrappers import WRAPPERS
from ddip.rank.runtime.housekeeping import cells

Memory: TypeAlias = "SharedBytes | bytearray | mmap.mmap"
AT_ONCE = 1 << 24
"""Limit of bytes per system call, as a stop takes effect only between calls."""

LIGHT = (type(None), bool, int, float, complex, str, bytes)
"""Types whose short values cost nothing to keep after they were replaced."""

_push = 0
"""Number of the latest push."""
_replaced: dict[str, Any] = {}
"""Values that the latest push replaced, kept until all ranks have it; `_nothing` for names that did not exist."""
_nothing = object()
pickling.find_parts = changes.find_flat_storages
_incoming: dict[int, Memory] = {}
"""Pushed bytes by load number, in private memory or in memory shared with other ranks of this host."""
_outgoing: dict[str, SharedBytes | bytearray] = {}
"""Pickled objects that the notebook fetches in parts, or reads from shared memory."""


def replaced_values() -> dict[str, Any]:
    """Return the values that the latest push has replaced, by name."""
    return {name: value for name, value in _replaced.items() if value is not _nothing}


def append_part(load: int, part: bytes, first: bool, share: bool) -> str:
    """Append `part` to an incoming load of pickled objects.

    The `first` part allocates the load; that of load 0 also drops all former transfers. Returns the path under which
    other ranks of this host can `attach_load` the load; "" if it is not shared.
    """
    if first:
        if not load:
            drop_transfers()
        _incoming[load] = _allocate_memory() if share else bytearray()
    memory = _incoming[load]
    if isinstance(memory, SharedBytes):
        memory.write([part])
        return memory.path
    assert isinstance(memory, bytearray)
    memory += part
    return ""


def _allocate_memory() -> SharedBytes | bytearray:
    try:
        return SharedBytes()
    except OSError:
        return bytearray()


def attach_load(load: int, path: str, size: int) -> bool:
    """Map a load of `size` bytes that another process of this host has; return False if it cannot be read.

    Load 0 also drops all former transfers.
    """
    if not load:
        drop_transfers()
    try:
        memory = shared.map_file(path)
    except (OSError, ValueError):
        return False
    if len(memory) != size:  # this host has another file at the path
        return False
    _incoming[load] = memory
    return True


def lacking_names(names: list[str]) -> list[str]:
    """Return those of `names` that the notebook should send along with the functions that read them."""
    variables = user_namespace()
    return [name for name in names if pickling.lacks_variable(variables, name)]


def apply_push(
    push: int, places: list[Place], along: list[str], small: bytes | bytearray = b"", paths: Paths | None = None
) -> PushResult:
    """Unpickle a push and set its variables, or restore all of them if one cannot be unpickled.

    `places` locate the pickles in the loads, in loading order. Names that only came `along` replace nothing. `small`
    has the bytes of load 0 if they came with this message; `paths` locate loads of another process of this host.
    Returns the error of a name that failed, whether `paths` could not be read, whether large values were replaced, and
    the names of replaced models, optimizers and parameters that other objects may still hold. Replaced values are kept
    until `settle_push` or the next transfer, and ``drop_transfers(push)`` restores them.
    """
    global _push
    settle_push()
    _push = push
    if small:
        _incoming[0] = bytearray(small)
    if not all(attach_load(load, path, size) for load, (path, size) in (paths or {}).items()):
        drop_transfers()
        return {"errors": {}, "unread": True, "replaces": False, "trained": []}
    loads, errors = _take_incoming(), dict[str, str]()
    pickled = {name: _pickled_at(loads[load], begin, sizes) for name, load, begin, sizes in places}
    loader = Loader(pickled)
    variables = user_namespace()
    for name in pickled:
        try:
            value = loader.load(name)
        except KeyboardInterrupt:
            drop_transfers(push)
            raise
        except BaseException as error:  # raised by a user's class; the answer reports it
            errors[name] = escape_surrogates(f"{type(error).__name__}: {error}")
            drop_transfers(push)
            break
        _replaced[name] = variables.get(name, _nothing)
        if name in along:
            pickling.set_missing_variables(variables, {name: value})
        else:
            variables[name] = value  # code of the next object may read it
    return {
        "errors": errors,
        "unread": False,
        "replaces": any(_is_heavy(value) for value in _replaced.values()),
        "trained": [name for name in _replaced if variables.get(name) is not _replaced[name] and _is_held(name)],
    }


def _pickled_at(memory: bytearray | mmap.mmap, begin: int, sizes: list[int]) -> Pickled:
    """Return the pickle whose parts, of these `sizes`, are in `memory` from `begin` on.

    It is a copy if `memory` is too small to be worth a mapping.
    """
    pickled = Pickled.of(memory, sizes, begin)
    return Pickled.of(pickled.joined(), sizes) if len(memory) <= shared.COPIED else pickled


def _is_heavy(value: object) -> bool:
    """Return whether `value` may be large, or may hold resources that should be freed soon."""
    return value is not _nothing and (type(value) not in LIGHT or sys.getsizeof(value) > pickling.INLINE)


def _takes_part_in_training(value: Any) -> bool:
    """Return whether `value` is a module, an optimizer or a leaf tensor that requires a gradient."""
    kinds = type(value).__mro__  # isinstance() would read a proxy's __class__
    if torch.Tensor in kinds:
        with torch._C.DisableTorchFunctionSubclass():
            return bool(value.requires_grad and value.is_leaf)
    return torch.nn.Module in kinds or torch.optim.Optimizer in kinds


def _is_held(name: str) -> bool:
    """Return whether objects other than `_replaced` hold the replaced value of `name`, or a part of it.

    This counts references, which takes microseconds, while a search for the holders walks over all variables. Returns
    False for a value that takes no part in training.
    """
    if not _takes_part_in_training(_replaced[name]):
        return False
    parts, links = _list_parts(_replaced[name])
    unheld = [object()]
    own = [sys.getrefcount(part) for part in unheld][0]  # Python 3.14 counts fewer references of local variables
    return any(sys.getrefcount(part) != own + links[id(part)] for part in parts)


def _list_parts(value: Any) -> tuple[list[Any], Counter[int]]:
    """Return `value` and its modules, parameters and buffers, and the number of links to each.

    Links are counted by id: one from each module that holds a part, and one to `value` itself.
    """
    parts, links = [value], Counter([id(value)])
    for part in parts:
        if torch.nn.Module in type(part).__mro__:
            for kind in ("_modules", "_parameters", "_buffers"):
                for child in vars(part).get(kind, {}).values():
                    if child is not None and id(child) not in links:
                        parts.append(child)
                    links[id(child)] += 1
    return parts, links


def settle_push() -> None:
    """Free the values that the latest push replaced; all ranks have it. A stop ends finalizers that hang."""
    if _replaced:
        with cells.letting_go():
            _replaced.clear()


def _take_incoming() -> dict[int, bytearray | mmap.mmap]:
    """Return the memory of all incoming loads by number; it is freed once no object uses it."""
    loads = {load: memory.view() if isinstance(memory, SharedBytes) else memory for load, memory in _incoming.items()}
    _free_incoming()
    return loads


def _free_incoming() -> None:
    """Free the incoming loads."""
    for memory in _incoming.values():
        if isinstance(memory, SharedBytes):
            memory.close()
    _incoming.clear()


def drop_transfers(push: int = 0) -> None:
    """Free all transfers, and restore the values that `push` replaced if it is the latest push."""
    if push and push == _push:
        variables = user_namespace()
        for name, value in _replaced.items():
            if value is _nothing:
                variables.pop(name, None)
            else:
                variables[name] = value
    settle_push()
    for memory in _outgoing.values():
        if isinstance(memory, SharedBytes):
            memory.close()
    _outgoing.clear()
    _free_incoming()


def pack_variables(names: list[str], most: int, share: bool, known: str) -> PackedObjects:
    """Drop all former transfers, and pickle the variables `names` for a pull.

    Variables that their functions read come along. Variables in `known`, separated by spaces, do not come along,
    because the receiver has them. Pickles longer than `most` bytes stay on the rank until `drop_transfers`: in memory
    that the notebook reads at the returned ``paths`` if `share` is set, otherwise for `pull_part`. If a name is
    missing, the reply has its name in ``missing``, and no values.
    """
    drop_transfers()
    variables = user_namespace()
    missing = [name for name in names if name not in variables]
    found = {name: variables[name] for name in names if name in variables}
    known_names = frozenset(known.split())
    dump = pickling.dump_all(found, lambda read: [name for name in read if name not in known_names], variables)
    packed = {} if missing else dump.pickled
    large = [name for name, pickled in packed.items() if pickled.size > most]
    for name in large:
        _outgoing[name] = _store_pickle(packed[name], share)
    return {
        "values": {name: pickled.joined() for name, pickled in packed.items() if name not in large},
        "sizes": [(name, pickled.sizes) for name, pickled in packed.items()],
        "paths": {name: memory.path for name, memory in _outgoing.items() if isinstance(memory, SharedBytes)},
        "errors": dump.errors,
        "missing": missing,
        "moved": dump.moved,
        "along": dump.along,
        "shares": dump.shares,
        "wrappers": {name: kind for name, value in found.items() if (kind := wrapper_of(value))},
    }


def _store_pickle(pickled: Pickled, share: bool) -> SharedBytes | bytearray:
    """Copy a pickle into memory for the notebook to fetch; shared memory if `share` is set and it fits."""
    memory = _allocate_memory() if share else bytearray()
    if isinstance(memory, bytearray):
        return pickled.joined()
    try:
        for portion in shared.split_portions(pickled.pieces(), AT_ONCE):
            memory.write(portion)
    except OSError:  # no room in shared memory
        memory.close()
        return pickled.joined()
    except BaseException:
        memory.close()
        raise
    return memory


def wrapper_of(value: object) -> str:
    """Return the class name of the DDP or FSDP wrapper that `value` is; "" for any other object."""
    kinds = (kind.__name__ for kind in type(value).__mro__ if kind.__module__.startswith("torch."))
    return next((kind for kind in kinds if kind in WRAPPERS.values()), "")


def pull_part(name: str, begin: int, end: int) -> bytes:
    """Return the bytes from `begin` to `end` of the pickle of `name` that `pack_variables` has stored."""
    memory = _outgoing[name]
    return bytes(memoryview(memory.view() if isinstance(memory, SharedBytes) else memory)[begin:end])
