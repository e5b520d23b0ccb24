"""Walk the objects that a namespace reaches, and record one small value per path, without running user code.

    {"net": model,      -->  {"net.0.weight": ("sum", 81...), "net.0.weight#version": 4,
     "opt": optimizer}        "opt.param_groups[0]['lr']": "0.1", "opt.state[net.0.weight]['step']": "4.0"}

The walk is breadth first, so an object is named by its shortest path. A module's parameters, buffers and parts come
before anything else, and dictionaries keyed by objects come last, when their keys have names. Attributes are read from
the instance's dictionary and slots, never through the object: properties, ``__getattr__`` and ``__class__`` are user
code. Values compare across processes: numbers, short texts, checksums.

A suffix after ``#`` tells a fact about the object at a path: ``#version`` counts a tensor's in-place writes,
``#length`` and ``#keys`` a container's items, ``#left`` an iterator's. Fused optimizers, ``broadcast``, ``all_reduce``
and ``.data`` write to tensors without a new version, so a version is evidence of progress, and only a checksum compares
values.
"""

from __future__ import annotations

import collections
import functools
import gc
import itertools
import operator
import re
import sys
import types
import weakref
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from ddip.rank.inspection import kinds
from ddip.rank.inspection.kinds import instance_dict, mro_of, slots_of
from ddip.rank.objects import wrappers
from ddip.rank.objects.checksum import FREED, PART_BYTES, BytesSum, Checksum, ItemsSum, ObjectsSum
from ddip.rank.runtime import libraries
from ddip.rank.runtime.gpu import gpu

Path: TypeAlias = str
_gradient_of: Any = torch._C.TensorBase.grad.__get__  # type: ignore[union-attr]
MAX_NODES, MAX_DEPTH = 50_000, 30
WHOLE_NODES, WHOLE_DEPTH = 200_000, 1000
"""Limits of a whole walk, which reports them."""
WHOLE_ITEMS, EDGE_ITEMS = 256, 32
"""Length up to which all items of a list or dictionary are visited, and items visited at each end of a longer one."""
MOST_MEMBERS = 1024
"""Limit above which a set is compared by its length only, and an array of objects only together with tensors."""
EDGE_BYTES = 1 << 20
"""Bytes of a ``bytearray`` that are compared at each end."""
SLICE_NODES = 32
"""Objects between two points at which a walk may pause."""
PRIVATE_NAMES = {"In", "Out", "exit", "quit", "get_ipython", "open", "rank", "world_size", "device"}
"""Variables that IPython and ddip set."""
UNIQUE_ID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|0x[0-9a-f]{6,}")
PLAIN_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter, types.MappingProxyType)


def variables_of(namespace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's variables, without modules, names with a leading underscore and `PRIVATE_NAMES`."""
    found = {k: v for k, v in list(namespace.items()) if type(k) is str and not k.startswith("_")}
    return {k: v for k, v in found.items() if k not in PRIVATE_NAMES and type(v) is not types.ModuleType}


class Walk:
    """One walk over `variables`; iterate over `steps` to the end, then read `values`.

    Names in `first`, then those in `known`, are walked before the others, so that a variable that only one rank has
    created cannot give another path to an object that all ranks have. With `checksums`, the values of tensors are
    recorded. With `keep`, `objects`, `links` and `aliases` are filled, so that callers can change the objects and find
    all their holders.

    With `summarize`, which returns a digest of a long container or None, the walk is whole: it records the digests, or
    visits all items; `unseen` has the paths of objects whose contents it could not visit.
    """

    def __init__(
        self,
        variables: Mapping[str, Any],
        known: Collection[str] = (),
        *,
        first: Collection[str] = (),
        checksums: bool = False,
        process_wide: bool = True,
        keep: bool = False,
        summarize: Callable[[Any], Any] | None = None,
    ) -> None:
        self.names = frozenset(variables)
        self.values: dict[Path, Any] = {}
        self.modules: list[Path] = []
        """Paths of the outermost modules."""
        self.roles: dict[Path, str] = {}
        """Roles of objects in a training: ``optimizer``, ``scheduler``, ``sampler``, ``loader`` and so on."""
        self.sharded: set[Path] = set()
        """Paths of tensors of which this rank has a part."""
        self.objects: dict[Path, Any] = {}
        self.links: dict[Path, tuple[Path, str, Any]] = {}
        """Link to the object at a path: path of its holder, kind of link such as ``item`` or ``attribute``, key."""
        self.aliases: dict[Path, Path] = {}
        """Path in `objects` of the object at a path, if the walk has met it there before."""
        self.nodes = 0
        self.is_cut = False
        """True if the walk has left out objects beyond `MAX_NODES`, or a whole one beyond its limits."""
        self._checksums, self._keep, self._summarize = checksums, keep, summarize
        self.unseen: set[Path] = set()
        """Paths of objects in `objects` with contents that a whole walk has not visited."""
        self._limits = (WHOLE_NODES, WHOLE_DEPTH) if summarize else (MAX_NODES, MAX_DEPTH)
        self._names: dict[int, Path] = {}
        self._alive: list[Any] = []
        """Visited objects, kept alive so that the id of a temporary one is not reused during the walk."""
        self._inner: set[Path] = set()
        self._lost: list[Path] = []
        """Paths of wrappers of a former group, which refuse to be used."""
        self._first: collections.deque[tuple[Path, Any, int]] = collections.deque()
        self._queue: collections.deque[tuple[Path, Any, int]] = collections.deque()
        self._last: collections.deque[tuple[Path, list[tuple[Any, Any]], int]] = collections.deque()
        early, rest = variables.keys() & first, variables.keys() - first
        self._roots = [
            [(name, variables[name]) for name in sorted(names)] for names in (early, rest & {*known}, rest - {*known})
        ]
        self._process_wide = process_wide

    @property
    def optimizers(self) -> list[Path]:
        """The paths of all optimizers."""
        return [path for path, role in self.roles.items() if role == "optimizer"]

    @property
    def steps(self) -> Iterator[None]:
        """The steps of the walk, between which it may pause or be abandoned."""
        *early, last = self._roots
        for roots in early:
            self._queue.extend((name, value, 0) for name, value in roots)
            yield from self._drain()
        self._queue.extend((name, value, 0) for name, value in last)
        if self._process_wide:
            self._queue.extend((name, value, 0) for name, value in kinds.process_wide())
            for name, module in kinds.user_modules():
                self._visit_module(name, module)
        yield from self._drain()
        del early, last
        for kept in (*self._roots, self._alive, self._names):  # the walk must not keep objects alive
            kept.clear()  # type: ignore[attr-defined]

    def finish(self) -> Walk:
        """Complete the walk without a pause, and return it."""
        for _ in self.steps:
            pass
        return self

    def _drain(self) -> Iterator[None]:
        while self._first or self._queue or self._last:
            if not self._first and not self._queue:
                path, items, depth = self._last.popleft()
                try:
                    self._visit_keyed(path, items, depth)
                except Exception as error:
                    self.values[path] = f"<{type(error).__name__}>"
                continue
            path, value, depth = (self._first or self._queue).popleft()
            self.nodes += 1
            if self.nodes > self._limits[0]:
                self.is_cut = True
                for queue in (self._first, self._queue, self._last):
                    queue.clear()  # type: ignore[attr-defined]
                return
            self.is_cut |= depth > WHOLE_DEPTH
            if depth <= self._limits[1]:
                try:
                    with torch._C.DisableTorchFunctionSubclass():
                        work = self._visit(path, value, depth)
                    if work is not None:
                        yield from self._add_checksum(path, work)
                except Exception as error:  # a nested tensor has no sizes: only its version is recorded
                    self.unseen.add(path)
                    if f"{path}#version" not in self.values:
                        self.values[path] = f"<{type(error).__name__}>"
            if self.nodes % SLICE_NODES == 0:
                yield

    def _add_checksum(self, path: Path, work: Checksum | BytesSum | ItemsSum) -> Iterator[None]:
        for _ in work.parts:
            yield
        if work.total is not None:
            self.values[f"{path}#items" if type(work) is ItemsSum else path] = ("sum", work.total)

    def _enqueue(self, path: Path, value: Any, depth: int, holder: Path, how: str, key: Any) -> None:
        if self._keep:
            self.links.setdefault(path, (holder, how, key))
        self._queue.append((path, value, depth + 1))

    # -- one object

    def _visit(self, path: Path, value: Any, depth: int) -> Checksum | BytesSum | ItemsSum | None:
        """Record `value`; return a checksum that is still to be computed, or None."""
        kind = type(value)
        leaf = kinds.leaf_value(value)
        if leaf is not kinds.NO_LEAF:
            self.values[path] = leaf
            if self._summarize and kind not in kinds.EXACT:  # a subclass of text, or an enum
                self._alive.append(value)
                self.objects[path] = value
                self.unseen.add(path)
            return None
        if id(value) in self._names:
            if self._keep:
                self.aliases[path] = self._names[id(value)]
            return None
        self._names[id(value)] = path
        self._alive.append(value)
        if self._keep:
            self.objects[path] = value
        mro = mro_of(kind)
        if torch.Tensor in mro:
            return self._visit_tensor(path, value, depth)
        array = kinds.array_of(value, mro)
        if array is not None:
            return self._visit_array(path, value, array)
        if bytearray in mro:
            self.unseen.add(path)
            self._visit_bytearray(path, value, depth)
            return None
        state = kinds.generator_state(value, mro)
        if state is not None:
            if not state:
                self.unseen.add(path)
            self.values[path] = ("generator", zlib.crc32(state))
            self.values[f"{path}#type"] = kinds.type_name(kind)
        elif dict in mro or kind is types.MappingProxyType:
            return self._visit_mapping(path, value, depth)
        elif list in mro or tuple in mro or kind is collections.deque:
            return self._visit_sequence(path, value, depth)
        elif set in mro or frozenset in mro:
            self._visit_set(path, value, set if set in mro else frozenset)
        elif kind is types.FunctionType:
            self._visit_function(path, value, depth)
        elif kind is types.MethodType:
            self._enqueue(f"{path}.__self__", value.__self__, depth, path, "attribute", "__self__")
            self._enqueue(f"{path}.__func__", value.__func__, depth, path, "attribute", "__func__")
        elif functools.partial in mro:
            for name in ("func", "args", "keywords"):
                part = getattr(functools.partial, name).__get__(value)
                self._enqueue(f"{path}.{name}", part, depth, path, "attribute", name)
        elif type in mro:
            self._visit_class(path, value, depth)
        elif kind is types.GeneratorType:
            self._visit_generator(path, value, depth)
        elif not self._visit_iterator(path, value, depth):
            self._visit_object(path, value, depth)
        return None

    def _visit_array(self, path: Path, value: Any, array: Any) -> BytesSum | ObjectsSum | None:
        kind = type(value)
        if array.dtype.hasobject or not kinds.is_plain_array(kind):
            self.unseen.add(path)
        self.values[f"{path}#type"] = kinds.type_name(kind), str(array.dtype), array.shape
        is_small = array.size <= MOST_MEMBERS if array.dtype.hasobject else array.nbytes <= PART_BYTES // 8
        if kinds.is_of_file(array) or not (is_small or self._checksums):
            return None
        work = ObjectsSum(array) if array.dtype.hasobject else BytesSum(array)
        if not is_small:
            return work
        total = work.finish()
        if total is not None:
            self.values[path] = "array", str(array.dtype), array.shape, total
        return None

    def _visit_bytearray(self, path: Path, value: bytearray, depth: int) -> None:
        """Record the length, and a checksum of the first and last `EDGE_BYTES`."""
        edges = bytearray.__getitem__(value, slice(EDGE_BYTES)), bytearray.__getitem__(value, slice(-EDGE_BYTES, None))
        self.values[f"{path}#type"] = kinds.type_name(type(value))
        self.values[path] = "bytes", bytearray.__len__(value), zlib.crc32(edges[1], zlib.crc32(edges[0]))
        if type(value) is not bytearray:
            self._visit_attributes(path, value, depth)

    def _visit_tensor(self, path: Path, tensor: Any, depth: int) -> Checksum | None:
        work = None
        local = kinds.local_part(tensor)
        self.values[f"{path}#version"] = "inference" if tensor.is_inference() else tensor._version
        if local is not None:  # a DTensor: ranks have different parts, so only its version compares
            self.sharded.add(path)
            self.values[f"{path}#type"] = type(tensor).__name__
        else:
            device = tensor.device.type if tensor.device == gpu.device else str(tensor.device)  # rank 1 has cuda:1
            facts = str(tensor.dtype), tuple(tensor.shape), device, tensor.requires_grad
            self.values[f"{path}#type"] = facts
            if kinds.is_readable_number(tensor):
                number = tensor.detach().item()
                self.values[path] = number if type(number) is int else repr(number)
            elif self._checksums and kinds.is_plain(tensor):
                work = Checksum(tensor)
        if local is None:
            for name, attribute in sorted((instance_dict(tensor) or {}).items()):
                if not name.startswith("_"):
                    self._enqueue(f"{path}.{name}", attribute, depth, path, "attribute", name)
        if tensor.is_leaf and tensor.requires_grad:
            gradient = _gradient_of(tensor)
            self._enqueue(f"{path}.grad", gradient, depth, path, "gradient", "grad")
        if work is not None and work.is_freed:
            self.values[path] = FREED
            return None
        return work

    def _visit_mapping(self, path: Path, mapping: Any, depth: int) -> ItemsSum | None:
        proxy = type(mapping) is types.MappingProxyType
        length = len(mapping) if proxy else dict.__len__(mapping)
        view: Any = mapping.items() if proxy else kinds.container_base(type(mapping)).items(mapping)
        self.values[f"{path}#keys"] = length
        first = next(iter(view), (None, None))[0]
        is_summed = torch.Tensor not in mro_of(type(first)) and self._add_summary(path, mapping, length)
        if is_summed:
            items, work = [], None
        elif self._summarize or length <= WHOLE_ITEMS or torch.Tensor in mro_of(type(first)):  # an optimizer's state
            items, work = list(view), None
        else:
            items = [*itertools.islice(view, EDGE_ITEMS), *itertools.islice(reversed(view), EDGE_ITEMS)]
            work = self._sum_items(path, list(view), is_ordered=False)
        if all(kinds.is_plain_key(key) for key, _ in items):
            if self._summarize or self._keep:
                ordered = (key for key, _ in (items if self._summarize else view) if kinds.is_plain_key(key))
                self.values[f"{path}#order"] = zlib.crc32(repr([*map(kinds.key_text, ordered)]).encode())
            for text, key, value in sorted(((kinds.key_text(k), k, v) for k, v in items), key=operator.itemgetter(0)):
                self._enqueue(f"{path}[{text}]", value, depth, path, "item", key)
        else:
            self._last.append((path, items, depth))
        if self._summarize and type(mapping) is collections.defaultdict:
            factory = mapping.default_factory
            self._enqueue(f"{path}.default_factory", factory, depth, path, "attribute", "default_factory")
        if type(mapping) not in PLAIN_DICTS:
            self._visit_attributes(path, mapping, depth)
        return work

    def _visit_keyed(self, path: Path, items: list[tuple[Any, Any]], depth: int) -> None:
        """Visit a dictionary whose keys are objects or their ids, after the objects have got names."""
        for number, (key, value) in enumerate(items):
            name = self._names.get(key if type(key) is int else id(key))
            if name is None and (kinds.is_plain_key(key) or _is_plain_tuple(key)):
                name = repr(key) if type(key) is tuple else kinds.key_text(key)
            is_id = type(key) is int and self.roles.get(path.rpartition(".")[0]) == "scaler"  # of an optimizer
            if name is None and self._summarize and not is_id and not isinstance(key, kinds.CODE):
                self.values[f"{path}#key{number}"] = self._summarize(key)
            name = name or f"<{type(key).__name__} {number}>"
            self._enqueue(f"{path}[{name}]", value, depth, path, "item", key)

    def _visit_sequence(self, path: Path, sequence: Any, depth: int) -> ItemsSum | None:
        mro = mro_of(type(sequence))
        base: Any = list if list in mro else tuple if tuple in mro else collections.deque
        length = base.__len__(sequence)
        fields = vars(type(sequence)).get("_fields") if base is tuple else None
        if base is not tuple:
            refers = (
                length > 0 and type(base.__getitem__(sequence, 0)) is weakref.ref
            )  # garbage collection changes its length
            self.values[f"{path}#length"] = 0 if refers else length
        if self._summarize and base is collections.deque:
            self.values[f"{path}#length"] = length, sequence.maxlen
        edges = [*range(EDGE_ITEMS), *range(length - EDGE_ITEMS, length)]
        is_summed = self._add_summary(path, sequence, length)
        work = None if length <= WHOLE_ITEMS else self._sum_items(path, list(base.__iter__(sequence)))
        for number in () if is_summed else range(length) if self._summarize or length <= WHOLE_ITEMS else edges:
            name = f"{path}.{fields[number]}" if fields else f"{path}[{number}]"
            self._enqueue(name, base.__getitem__(sequence, number), depth, path, "item", number)
        if type(sequence) is not base:
            self._visit_attributes(path, sequence, depth)
        return work

    def _sum_items(self, path: Path, items: list[Any], is_ordered: bool = True) -> ItemsSum | None:
        """Return a checksum over all items of a long container; the walk visits only the items at its ends."""
        return ItemsSum(items, is_ordered) if self._checksums else None

    def _add_summary(self, path: Path, container: Any, length: int) -> bool:
        """Record a digest of the items of a long container in a whole walk; return whether there is one."""
        summary = self._summarize(container) if self._summarize and length > WHOLE_ITEMS else None
        if summary is not None:
            self.values[f"{path}#items"] = summary
        return summary is not None

    def _visit_set(self, path: Path, items: Any, base: Any) -> None:
        self.values[f"{path}#members"] = base.__len__(items)
        self.unseen.add(path)
        if base.__len__(items) > MOST_MEMBERS:
            return
        members = list(base.__iter__(items))
        if all(kinds.is_plain_key(member) for member in members):
            self.values[path] = zlib.crc32(repr(sorted(map(kinds.key_text, members))).encode())
            if type(items) is base:
                self.unseen.discard(path)

    def _visit_module(self, name: str, module: Any) -> None:
        """Visit the global variables of a module that the user wrote."""
        path = f"<{name}>"
        self.values[f"{path}#type"] = "module"
        if self._keep:
            self.objects[path] = module
        for key, value in sorted(vars(module).copy().items()):
            foreign = type(value) in (types.FunctionType, type) and value.__module__ != name
            if not key.startswith("__") and type(value) is not types.ModuleType and not foreign:
                self._enqueue(f"{path}.{key}", value, 0, path, "attribute", key)

    def _visit_function(self, path: Path, function: Any, depth: int) -> None:
        self.values[f"{path}#type"] = function.__qualname__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                self._enqueue(f"{path}.<{name}>", cell.cell_contents, depth, path, "cell", name)
            except ValueError:  # an empty cell
                continue
        if not libraries.is_librarys(function.__code__.co_filename):
            for name in ("__defaults__", "__kwdefaults__"):
                if (defaults := getattr(function, name)) is not None:
                    self._enqueue(f"{path}.{name}", defaults, depth, path, "defaults", name)
        for name, value in sorted(vars(function).items()):
            self._enqueue(f"{path}.{name}", value, depth, path, "attribute", name)

    def _visit_class(self, path: Path, kind: Any, depth: int) -> None:
        """Visit the data attributes of a class, if the user wrote it."""
        self.values[f"{path}#type"] = kinds.type_name(kind)
        attributes = type.__dict__["__dict__"].__get__(kind)
        if kinds.is_user_module(attributes.get("__module__")):
            for name in sorted(attributes):
                value = attributes[name]
                holds_state = type(value) is types.FunctionType and (value.__closure__ or value.__defaults__)
                if not name.startswith("__") and (holds_state or type(value) not in kinds.CODE):
                    self._enqueue(f"{path}.{name}", attributes[name], depth, path, "attribute", name)
        if self._summarize:
            for number, (name, function) in enumerate(kinds.methods_of(kind)):
                self._enqueue(f"{path}.<{name} {number}>", function, depth, path, "attribute", name)
            for number, base in enumerate(kind.__bases__):
                self._enqueue(f"{path}.__bases__[{number}]", base, depth, path, "attribute", "__bases__")

    def _visit_generator(self, path: Path, generator: Any, depth: int) -> None:
        """Visit the local variables of a suspended generator."""
        frame = generator.gi_frame
        self.values[f"{path}#line"] = None if frame is None else frame.f_lineno
        if frame is None or libraries.is_librarys(frame.f_code.co_filename) and depth > MAX_DEPTH // 2:
            return
        names = frame.f_locals
        for name, value in sorted(names.items()):
            self._enqueue(f"{path}.<{name}>", value, depth, path, "local", name)
        self._visit_held_iterators(path, generator, depth)
        if sys.version_info < (3, 13):
            names.clear()  # the frame keeps this copy, and with it the last batch

    def _visit_held_iterators(self, path: Path, holder: Any, depth: int) -> None:
        """Visit iterators that only the state of another one holds, such as that of a loop in a generator."""
        held = gc.get_referents(holder)
        held += [part for parts in held if type(parts) is tuple for part in parts]
        for number, part in enumerate(part for part in held if kinds.is_iterator(type(part))):
            self._enqueue(f"{path}.<iterator {number}>", part, depth, path, "local", number)

    def _visit_iterator(self, path: Path, iterator: Any, depth: int) -> bool:
        kind = type(iterator)
        if kind is itertools.count:
            self.values[path] = itertools.count.__repr__(iterator)
        elif kind in (enumerate, zip):
            for number, part in enumerate(kind.__reduce__(iterator)[1]):  # type: ignore[call-arg]
                self._enqueue(f"{path}.<{number}>", part, depth, path, "local", number)
        elif kind in (map, filter) or getattr(itertools, kind.__name__, None) is kind:
            self._visit_held_iterators(path, iterator, depth)
        elif not kinds.is_heap_type(kind) and kind.__name__.endswith("iterator"):
            self.values[f"{path}#left"] = operator.length_hint(iterator, -1)
            self.unseen.add(path)
        else:
            return False
        return True

    def _visit_object(self, path: Path, value: Any, depth: int) -> None:
        kind = type(value)
        mro = mro_of(kind)
        if int in mro or float in mro:
            number = int.__int__(value) if int in mro else float.__float__(value)
            self.values[path] = kinds.leaf_value(number)
        is_opaque = kinds.is_opaque(kind, mro)
        if self._summarize and (kinds.may_hold_state(kind, mro) if is_opaque else kinds.has_hidden_state(kind, mro)):
            self.unseen.add(path)
        if is_opaque and torch.nn.Module not in mro:
            return
        self.values[f"{path}#type"] = kinds.type_name(kind)
        role = kinds.role_of(mro)
        if role:
            self.roles[path] = role
        self._visit_attributes(path, value, depth, only_parts=is_opaque)
        if kinds.is_user_module(kinds.module_name(kind)):
            self._enqueue(f"{path}.__class__", kind, depth, path, "class", "__class__")

    def _visit_attributes(self, path: Path, value: Any, depth: int, only_parts: bool = False) -> None:
        """Visit the contents of the object's dictionary and slots.

        With `only_parts`, visit only the tensors and submodules of a module.
        """
        attributes = instance_dict(value) or {}
        mro = mro_of(type(value))
        module = torch.nn.Module in mro
        if module and wrappers.is_lost(value):
            self._lost.append(path)
        is_lost = module and any(path == root or path.startswith(f"{root}.") for root in self._lost)
        wrapper, optimizer = torch.nn.parallel.DistributedDataParallel in mro, torch.optim.Optimizer in mro
        if module and path not in self._inner:
            self.modules.append(path)
        for name in sorted((name for name in list(attributes) if type(name) is str), key=str):
            if module and name in ("_parameters", "_buffers", "_modules"):  # net.weight, not net._parameters['weight']
                for part, child in sorted(dict.items(attributes[name])):
                    self._inner.add(f"{path}.{part}")
                    if self._keep:
                        self.links.setdefault(f"{path}.{part}", (path, name, part))
                    self._first.append((f"{path}.{part}", child, depth + 1))
            elif only_parts:
                continue  # how torch.compile or FX runs the module
            elif (
                wrapper and name.startswith("_") or optimizer and name == "defaults" or is_lost and name.startswith("_")
            ):
                continue  # reducer internals, copies of param_groups, or a wrapper of a former group
            elif self._summarize and module and name.startswith("__composable_api"):
                continue  # state of fully_shard
            elif self._summarize and module and "_hooks" in name and isinstance(attributes[name], dict):
                self.values[f"{path}.{name}#keys"] = len(attributes[name])  # hooks of fully_shard reach its state
            elif name not in kinds.SKIPPED_ATTRIBUTES and not (module and "_hooks" in name and not attributes[name]):
                shown = UNIQUE_ID.sub("<id>", name) if len(name) > 20 else name
                self._enqueue(f"{path}.{shown}", attributes[name], depth, path, "attribute", name)
        for name, child in slots_of(value):
            if name not in kinds.SKIPPED_ATTRIBUTES:
                self._enqueue(f"{path}.{name}", child, depth, path, "attribute", name)


def _is_plain_tuple(key: Any) -> bool:
    return type(key) is tuple and all(kinds.is_plain_key(part) for part in key)
