"""Copy one rank's state into the existing objects of the other ranks: tensors and wrappers keep their identity.

    walk, on every rank     find the paths that differ from those of the source
    plan, on the source     list tensors by path; pickle numbers and structure, with references by path to objects that
                            every rank has
    try, on the others      unpickle the plan; if that fails on any rank, nothing changes
    apply                   broadcast the tensors, set everything else, clear the gradients

It runs on all ranks at the same time, in a healthy group without pending collectives.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import random
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data.dataloader import _BaseDataLoaderIter

from ddip.protocol.objects import pickling
from ddip.protocol.objects.pickling import PickledNames
from ddip.protocol.reports import Synced
from ddip.rank import user_namespace
from ddip.rank.inspection import kinds
from ddip.rank.inspection.state_history import history
from ddip.rank.inspection.state_report import LENGTHS, VERSION, hash_of, variable_of
from ddip.rank.inspection.walk import Path, Walk, variables_of
from ddip.rank.runtime.gpu import gpu

BUCKET_BYTES = 64 << 20
FIXED = ("local", "class", "gradient")
"""Kinds of links whose target is not replaced: a local of a suspended generator, the class of an instance."""
CONTENT = ("length", "keys", "order", "members", "items")
CONTAINERS = (dict, list, collections.deque, set)
"""Containers whose items are replaced in place."""
UNCHANGEABLE = (tuple, types.MappingProxyType, types.MethodType, functools.partial)
"""Classes of holders that are replaced, as their parts cannot be."""
ITEMS = "#content"
"""End of the names of entries that have the items of a container."""
Table = dict[int, int]
"""Hashes of values by the hashes of their paths."""


@dataclass
class _Id:
    """A dictionary key that is the ``id()`` of the object at `path`."""

    path: Path


@dataclass
class _Plan:
    """Changes to apply on the other ranks, made by the source."""

    tensors: list[Path]
    states: dict[Path, Any]
    """States of random number generators and arrays, by path."""
    gradients: list[Path]
    """Gradients that differ, which all ranks clear."""
    refused: dict[Path, str]
    """Paths that are not copied, with the reason."""
    names: list[str]
    """Names of the pickled entries, in the order of loading.

    A container's name is its path and `ITEMS`; its entry has the path, whether all items are replaced or only missing
    ones added, and the items. The name of another value is its path; its entry has the path of the holder, the kind of
    link, the key and the value.
    """
    along: list[str]
    """Those of the names that are variables which copied functions read, and which some rank lacks."""
    pickled: bytes
    """The entries, with one memo."""

    @property
    def copied(self) -> list[Path]:
        """The sorted paths that are copied, with cleared gradients."""
        entries = (name.removesuffix(ITEMS) for name in self.names)
        return sorted({*self.tensors, *self.states, *self.gradients, *entries})


def sync_state(names: list[str], paths: list[int], source: int, cells: list[str]) -> Synced:
    """Copy differing values in `names` or at `paths` from rank `source` to the others. A collective.

    `paths` has hashes of paths. Values that differed after the good cell ``cells[0]`` differ by design and are not
    copied, except for parameters and buffers of modules in `names`. Returns the copied paths, and the reason for each
    refused path or name. Raises RuntimeError if a rank cannot unpickle a value; then nothing has changed on any rank.
    """
    last = history.after(cells[0]) if cells else None
    variables = user_namespace()
    known = {name for name in list(variables) if not pickling.lacks_variable(variables, name)}
    found = _gather_values((set(variables_of(variables)), known))
    common = set.intersection(*(names for names, _ in found))
    if names:
        walk = history.walk_now(keep=True, first=common.intersection(names), known=common)
    else:
        walk = history.walk_now(keep=True, known=() if last is None else last.names)
    table = {hash_of(path): hash_of(repr(value)) for path, value in walk.values.items()}
    good = {} if last is None else _hash_values(last.values, set(walk.values))
    gathered = _gather_values((table, good, list(walk.sharded)))
    tables, goods = [table for table, *_ in gathered], [good for _, good, _ in gathered]
    sharded = sorted({variable_of(path) for _, _, sharded_paths in gathered for path in sharded_paths})
    refused = {name: f"rank {source} has no such variable" for name in names if name not in found[source][0]}
    refused |= dict.fromkeys(set(sharded).intersection(names), "each rank has another part of its parameters")
    if refused:
        return {"copied": [], "refused": refused}
    plans: list[Any] = [None]
    if dist.get_rank() == source:
        selection = _Selection(set(names), set(paths), set(sharded), walk, tables, goods)
        known = set.intersection(*(known for _, known in found))
        plans = [_make_plan(walk, selection, tables, set(names) - common, known)]
    dist.broadcast_object_list(plans, src=source)
    plan: _Plan = plans[0]
    _apply_plan(walk, plan, source)
    _clear_gradients(walk, names, plan)
    history.replace_snapshots()
    return {"copied": plan.copied, "refused": plan.refused}


def _gather_values(value: Any) -> list[Any]:
    """Return the `value` of each rank. A collective."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _hash_values(values: Mapping[Path, Any], paths: Collection[Path]) -> Table:
    return {hash_of(path): hash_of(repr(value)) for path, value in values.items() if path in paths}


def _is_setting(path: Path) -> bool:
    """Return whether `path` is an optimizer setting, which each rank has whole even if states are sharded."""
    return ".param_groups[" in path


def _is_gradient(path: Path) -> bool:
    return path.partition("#")[0].endswith(".grad")


class _Selection:
    """The set of the source's paths to copy: ``path in selection``."""

    def __init__(
        self, names: set[str], paths: set[int], left_out: set[str], walk: Walk, tables: list[Table], goods: list[Table]
    ) -> None:
        self._names, self._paths, self._left_out, self._modules = names, paths, left_out, walk.modules
        self._walk = walk
        self._tables, self._goods = tables, goods
        self._ranks = [hash_of(repr(rank)) for rank in range(len(tables))]

    @property
    def left_out(self) -> dict[Path, str]:
        """Sharded variables that differ, with the reason why they are not copied."""
        paths = [path for path in self._walk.values if self._differs(path) and not _is_setting(path)]
        named_variables = {variable_of(path) for path in paths if self._is_named(path)}
        return dict.fromkeys(sorted(named_variables & self._left_out), "each rank has another part of its parameters")

    @property
    def gradients(self) -> list[Path]:
        """The paths of gradients that differ."""
        paths = dict.fromkeys(path.partition("#")[0] for path in self._walk.values if _is_gradient(path))
        facts = ("", "#type", VERSION)
        return [p for p in paths if any(self._differs(f"{p}{f}") and self._is_named(f"{p}{f}") for f in facts)]

    def _differs(self, path: Path) -> bool:
        return len({table.get(hash_of(path)) for table in self._tables}) > 1

    def _is_named(self, path: Path) -> bool:
        return hash_of(path.removesuffix(VERSION)) in self._paths or variable_of(path) in self._names

    def __contains__(self, path: Path) -> bool:
        number, base = hash_of(path), path.partition("#")[0]
        is_left_out = variable_of(path) in self._left_out and not _is_setting(path)
        if is_left_out or not self._differs(path) or _is_gradient(path):
            return False
        if hash_of(path.removesuffix(VERSION)) in self._paths:
            return True
        values = [table.get(number) for table in self._tables]
        if variable_of(path) not in self._names or values == self._ranks:
            return False
        if base not in self._walk.links or path.endswith(LENGTHS):  # a variable, or the items of a container
            return True
        good = {table.get(number) for table in self._goods if table}
        return len(good) < 2 or f"{base}{VERSION}" == path or any(base.startswith(f"{m}.") for m in self._modules)


def _make_plan(
    walk: Walk, selection: _Selection, tables: list[Table], lacked: Collection[str], known: Collection[str]
) -> _Plan:
    """Return the changes that copy the paths in `selection`, and the variables `lacked`.

    `lacked`: named variables that some rank lacks; `known`: variables that functions can read on every rank.
    """
    common = _CommonObjects(walk, tables)
    plan = _Plan([], {}, selection.gradients, selection.left_out, [], [], b"")
    contents: dict[Path, bool] = {}
    leaves: dict[Path, tuple[Path, str, Any, Any]] = {}
    iterators = [path for path, value in walk.objects.items() if isinstance(value, _BaseDataLoaderIter)]
    for path in [path for path in walk.values if path in selection]:
        base, _, fact = path.partition("#")
        held_by = next((root for root in iterators if base.startswith(f"{root}.")), "")
        if held_by:  # its position is partly on a generator's stack
            plan.refused[held_by] = "the iterator of a loader cannot be copied: recreate it on all ranks"
            continue
        value = walk.objects.get(base)
        if isinstance(value, torch.Tensor) and common.has(base):
            if value.layout is not torch.strided or value.is_quantized:
                plan.refused[base] = "it is sparse or quantized"
            elif any(size > 1 and stride == 0 for size, stride in zip(value.shape, value.stride(), strict=True)):
                plan.refused[base] = (
                    "several of its elements share memory (expand); copy the tensor that it is a view of"
                )
            elif base not in plan.tensors and fact != "type":
                plan.tensors.append(base)
        elif isinstance(value, CONTAINERS) and (fact in CONTENT or isinstance(value, set)) and common.has(base):
            contents[base] = fact == "items" or contents.get(base, False)
        elif fact in ("left", "line", "version"):
            plan.refused[base] = "an iterator or a suspended generator cannot be set" if fact != "version" else ""
        elif common.has(base) and (state := _state_of(value)) is not None:
            plan.states[base] = state
        else:
            _add_leaf(base, walk, leaves, plan)
    leaves |= {name: ("", "variable", name, user_namespace()[name]) for name in lacked & walk.aliases.keys()}
    for path in [p for p, (holder, *_) in leaves.items() if holder and not common.has(holder)]:
        del leaves[path]  # it comes with its container, which some rank lacks
    plan.refused = {path: why for path, why in plan.refused.items() if why}
    common.replaced = set(leaves)  # pickle these by value: a reference would mean the receiver's own object
    entries: dict[str, tuple[Any, ...]] = {
        f"{path}{ITEMS}": (path, takes_all, _content_of(walk.objects[path]))
        for path, takes_all in sorted(contents.items())
    }
    packed = _dump_entries(entries | leaves, common, lambda names: [name for name in names if name not in known], plan)
    plan.names, plan.along = list(packed.pickled), packed.along
    plan.pickled = b"".join(pickled.parts[0] for pickled in packed.pickled.values())
    return plan


def _add_leaf(base: Path, walk: Walk, leaves: dict[Path, tuple[Path, str, Any, Any]], plan: _Plan) -> None:
    """Add to `leaves` the assignment that copies the value at `base`, or the whole object that contains it if that
    cannot change, such as a tuple.

    A value held by a suspended generator is added to ``plan.refused`` instead, and so is a gradient.
    """
    while base in walk.links:
        holder, how, key = walk.links[base]
        if how in FIXED:
            plan.refused[base] = "it is held by a suspended generator" if how == "local" else ""
            return
        owner = walk.objects.get(holder)
        if isinstance(owner, UNCHANGEABLE):
            base = holder
            continue
        value = walk.objects[base] if base in walk.objects else _leaf_at(owner, how, key)
        ids = {id(item): path for path, item in walk.objects.items()} if how == "item" and type(key) is int else {}
        leaves[base] = holder, how, _Id(ids[key]) if key in ids else key, value
        return
    if base in user_namespace():
        leaves[base] = "", "variable", base, user_namespace()[base]


def _leaf_at(owner: Any, how: str, key: Any) -> Any:
    """Return the value at `key` in `owner`, linked as `how` says, without running user code."""
    match how:
        case "item":
            return kinds.container_base(type(owner)).__getitem__(owner, key)
        case "cell":
            return owner.__closure__[owner.__code__.co_freevars.index(key)].cell_contents
        case "defaults":
            return getattr(owner, key)
        case "_parameters" | "_buffers" | "_modules":
            return kinds.instance_dict(owner)[how][key]  # type: ignore[index]
    attributes = kinds.instance_dict(owner) or {}
    if isinstance(owner, type):
        attributes = type.__dict__["__dict__"].__get__(owner)  # type: ignore[attr-defined]
    return attributes[key] if key in attributes else dict(kinds.slots_of(owner))[key]


def _content_of(container: Any) -> Any:
    """Return the items of a dictionary, list, deque or set, without the container."""
    base = kinds.container_base(type(container))
    return list((base.items if dict in base.__mro__ else base.__iter__)(container))


def _state_of(value: Any) -> Any:
    """Return the state of a random number generator, a writable array or a bytearray; None for any other object."""
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, torch.Generator):
        return value.get_state()
    if type(value) is random.Random:
        return value.getstate()
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and type(value) is numpy.Generator:
        return value.bit_generator.state
    if numpy is not None and type(value) is numpy.RandomState:
        return value.get_state()
    array = None if isinstance(value, torch.Tensor) else kinds.array_of(value, kinds.mro_of(type(value)))
    return array.copy() if array is not None and array.ndim and array.flags.writeable else None


def _set_state(value: Any, state: Any) -> None:
    if isinstance(value, bytearray):
        bytearray.__setitem__(value, slice(None), state)
    elif isinstance(value, torch.Generator):
        value.set_state(state)
    elif type(value) is random.Random:
        value.setstate(state)
    elif (array := kinds.array_of(value, kinds.mro_of(type(value)))) is not None:
        array[...] = state
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value.set_state(state)


class _CommonObjects:
    """Objects that every rank has at the same path and with the same type."""

    def __init__(self, walk: Walk, tables: list[Table]) -> None:
        self._walk, self._tables = walk, tables
        self._paths = {id(value): path for path, value in walk.objects.items()}
        self.replaced: set[Path] = set()
        """Paths of objects that are pickled by value, not by reference."""

    def has(self, path: Path) -> bool:
        """Return whether every rank has an object of the same type at `path`."""
        kind = hash_of(f"{path}#type")
        if f"{path}#type" in self._walk.values:
            return len({table.get(kind) for table in self._tables}) == 1
        facts = [hash_of(f"{path}{fact}") for fact in (*LENGTHS, "#line", "#left")]
        return any(all(fact in table for table in self._tables) for fact in facts)

    def path_of(self, value: Any) -> Path | None:
        """Return the path of `value` if every rank has it there and it is not to be replaced; otherwise None."""
        path = self._paths.get(id(value))
        return path if path is not None and path not in self.replaced and self.has(path) else None


class _Pickler(pickling.Pickler):
    """A pickler that writes objects that every rank has as references to their paths.

    Tensors on the GPU of this rank are restored on the receiver's.
    """

    def __init__(self, file: io.BytesIO, common: _CommonObjects) -> None:
        super().__init__(file)
        self._common = common

    def persistent_id(self, value: Any) -> Path | None:
        """Return the path to write instead of `value`; None to pickle it by value."""
        return self._common.path_of(value)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.TypedStorage):
            return pickling.typed_storage, (self._shared_storage(obj._untyped_storage), obj.dtype)
        if isinstance(obj, torch.UntypedStorage) and pickling.is_elsewhere(obj):
            return _storage_on, (obj.cpu(), None if obj.device == gpu.device else obj.device)
        return NotImplemented if isinstance(obj, torch.Generator) else super().reducer_override(obj)

    def on_cpu(self, obj: Any) -> Any:
        """Return `obj` itself."""
        return obj


def _storage_on(storage: torch.UntypedStorage, device: torch.device | None) -> torch.UntypedStorage:
    """Return a copy of `storage` on `device`, or for None on this rank's."""
    whole = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
    return whole.to(device or gpu.device).untyped_storage()  # type: ignore[no-any-return]


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, walk: Walk) -> None:
        super().__init__(file)
        self._walk = walk

    def persistent_load(self, path: Path) -> Any:
        """Return this rank's object at `path`."""
        return self._walk.objects[path]


def _dump_entries(
    entries: Mapping[str, Any], common: _CommonObjects, lacking: Callable[[list[str]], list[str]], plan: _Plan
) -> PickledNames:
    """Pickle the entries together, so that they share objects as here, such as an optimizer and its model.

    Variables that functions in them read, and that `lacking` returns, are pickled as well. Entries and variables that
    cannot be pickled are added to ``plan.refused`` instead.
    """
    packed = pickling.dump_all(entries, lacking, make=lambda file, _: _Pickler(file, common))
    if not packed.errors:
        return packed
    plan.refused |= {name.removesuffix(ITEMS): f"it cannot be pickled: {why}" for name, why in packed.errors.items()}
    failed = {*packed.errors, *(what.partition(",")[0] for what in packed.errors)}  # "lock, which f reads,"
    rest = {name: entry for name, entry in entries.items() if name not in packed.errors}
    return _dump_entries(rest, common, lambda names: [name for name in lacking(names) if name not in failed], plan)


def _load_entries(plan: _Plan, walk: Walk) -> list[tuple[Any, ...]]:
    """Unpickle the plan and set its variables; returns the other entries.

    Code of an object may read variables that were loaded before it.
    """
    unpickler, variables, entries = _Unpickler(io.BytesIO(plan.pickled), walk), user_namespace(), []
    for name in plan.names:
        entry = unpickler.load()
        if name in plan.along:
            pickling.set_missing_variables(variables, {name: entry})
        elif entry[:2] == ("", "variable"):
            variables[name] = entry[-1]
        else:
            entries.append(entry)
    return entries


def _apply_plan(walk: Walk, plan: _Plan, source: int) -> None:
    variables, entries, error = user_namespace(), list[tuple[Any, ...]](), ""
    former = {name: variables[name] for name in plan.names if name in variables}
    try:
        if dist.get_rank() != source:
            entries = _load_entries(plan, walk)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    failed = {rank: text for rank, text in enumerate(_gather_values(error)) if text}
    if failed:
        for name in plan.names:
            variables.pop(name, None)
        variables.update(former)
        rank, text = next(iter(failed.items()))
        raise RuntimeError(f"rank {rank} cannot take the state: {text}; nothing has changed")
    for entry in entries:
        _apply_entry(walk, *entry)
    if dist.get_rank() != source:
        for path, state in plan.states.items():
            _set_state(walk.objects[path], state)
    _broadcast_tensors([walk.objects[path] for path in plan.tensors], source)


def _replace_content(container: Any, items: list[Any], takes_all: bool) -> None:
    """Give `container` the same keys, in the same order, or the same length as `items`.

    It keeps its own items at common keys and positions, unless `takes_all` is set. Sets are always replaced.
    """
    base = kinds.container_base(type(container))
    if dict in base.__mro__:
        own = {} if takes_all else dict(base.items(container))
        base.clear(container)
        for key, value in items:
            base.__setitem__(container, key, own.get(key, value))
    elif base is set:
        set.clear(container)
        set.update(container, items)
    else:
        while base.__len__(container) > (0 if takes_all else len(items)):
            base.pop(container)
        base.extend(container, items[base.__len__(container) :])


def _apply_entry(walk: Walk, *entry: Any) -> None:
    """Give a container its items, or a holder its value; `entry` as in ``_Plan.names``."""
    if len(entry) == 3:
        path, takes_all, items = entry
        _replace_content(walk.objects[path], items, takes_all)
    else:
        holder, how, key, value = entry
        key = id(walk.objects[key.path]) if isinstance(key, _Id) else key
        _set_value(walk.objects.get(holder), how, key, value)


def _set_value(owner: Any, how: str, key: Any, value: Any) -> None:
    match how:
        case "variable":
            user_namespace()[key] = value
        case "item":
            kinds.container_base(type(owner)).__setitem__(owner, key, value)
        case "cell":
            owner.__closure__[owner.__code__.co_freevars.index(key)].cell_contents = value
        case "defaults":
            setattr(owner, key, value)
        case "_parameters" | "_buffers" | "_modules":
            kinds.instance_dict(owner)[how][key] = value  # type: ignore[index]
        case _:
            attributes = kinds.instance_dict(owner)
            if isinstance(owner, type):
                type.__setattr__(owner, key, value)
            elif attributes is not None:
                attributes[key] = value
            else:
                object.__setattr__(owner, key, value)


def _broadcast_tensors(tensors: list[torch.Tensor], source: int) -> None:
    """Broadcast `tensors` from rank `source` in place, as bytes in buckets of about `BUCKET_BYTES`."""
    buckets: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        bucket = buckets.setdefault(tensor.device, [])
        bucket.append(tensor)
        if sum(part.numel() * part.element_size() for part in bucket) > BUCKET_BYTES:
            _send_bucket(buckets.pop(tensor.device), source)
    for bucket in buckets.values():
        _send_bucket(bucket, source)


def _send_bucket(bucket: list[torch.Tensor], source: int) -> None:
    with torch.no_grad():
        values = [tensor.detach().resolve_conj().resolve_neg() for tensor in bucket]
        flat = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in values]
        data = torch.cat(flat)
        dist.broadcast(data, src=source)
        if dist.get_rank() != source:
            for tensor, part in zip(bucket, data.split([tensor.numel() for tensor in flat]), strict=True):
                tensor.detach().copy_(part.clone().view(tensor.dtype).view(tensor.shape))


def _clear_gradients(walk: Walk, names: list[str], plan: _Plan) -> None:
    """Clear the gradients of the models in `names` and of those whose state was copied."""
    copied = {variable_of(path) for path in [*plan.tensors, *plan.states, *plan.gradients]}.union(names)
    for path, value in walk.objects.items():
        if isinstance(value, torch.nn.Parameter) and variable_of(path) in copied:
            value.grad = None
