"""Pickle what a notebook holds; no torch is imported unless it already is.

All names of a line have one memo: objects that are shared here are shared where they arrive. Functions and classes of
``__main__`` get the receiver's variables as their globals; what it lacks of these is sent along.

The memory of arrays and tensors is not copied into the pickle, but stands beside it (protocol 5, PEP 574): it is copied
once, to where the other side reads it, and is the other side's array or tensor there.
"""

from __future__ import annotations

import ctypes
import dataclasses
import dis
import enum
import functools
import io
import itertools
import marshal
import os
import pickle
import sys
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import cloudpickle
from IPython.core.getipython import get_ipython

from ddip.protocol.objects import definitions
from ddip.protocol.rank_spec import STANDING_VARIABLES
from ddip.protocol.text import readable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INLINE = 1 << 14
"""Bytes of an array or tensor that is in the pickle itself: it is not worth the memory of its own."""
ALIGNED = 64
"""Bytes: each part begins at a multiple of it, as torch and NumPy have their memory."""
SHARDED_MODULES = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
"""Their tensors (DTensor, ShardedTensor) are one rank's part of a larger tensor."""
PART = (
    "it holds {kind}, which is divided among the ranks; gather it in a %%dip cell: `state = "
    "get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))`, of an optimizer "
    "get_optimizer_state_dict(model, optimizer, options=...), all of torch.distributed.checkpoint.state_dict, of a "
    "single tensor `whole = tensor.full_tensor()`; ddip.dist_state keeps such state for the ranks"
)
ZERO = (
    "it holds a ZeroRedundancyOptimizer, whose state is divided among the ranks; in a %%dip cell, "
    "`optimizer.consolidate_state_dict(0)`, then on rank 0 `state = optimizer.state_dict()`"
)
MESH = "it holds a DeviceMesh, which is of its rank's own groups: make one on each rank, with init_device_mesh"

find_parts: Callable[[], Collection[int]] = tuple
"""Returns the addresses (to torch) of plain storages that hold one rank's part only; ranks set their own."""
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Attributes of an optimizer that hold its hooks."""
MOST_BYTES = 1 << 16
"""Of data that came along: if it is longer, it is not compared, and stays."""
READS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")

_brought: dict[str, tuple[Any, bytes | None]] = {}
"""By name: the plain data, and weakly the code, that came along with a function, and the bytes of the data. A later
function brings new ones, unless a variable has been assigned or changed since. A model may have been trained: it stays.
"""


@dataclass(frozen=True)
class Pickled:
    """An object as bytes: its pickle, and what the pickle refers to, in order."""

    parts: Sequence[memoryview]

    @classmethod
    def of(cls, memory: ReadableBuffer, sizes: Iterable[int], begin: int = 0) -> Pickled:
        """What lies in `memory` from `begin` on, in parts of these sizes; what is loaded from there stays there."""
        whole, parts = memoryview(memory).cast("B"), []
        for size in sizes:
            parts.append(whole[begin : begin + size])
            begin += size + -size % ALIGNED
        return cls(parts)

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [part.nbytes for part in self.parts]

    @property
    def size(self) -> int:
        """Bytes of all of it."""
        return sum(self.sizes)

    @property
    def room(self) -> int:
        """Bytes of the memory that it needs, where it lies in one."""
        return room_of(self.sizes)

    def pieces(self) -> Iterator[memoryview]:
        """What such a memory holds, one after the other."""
        for part in self.parts:
            yield part
            if part.nbytes % ALIGNED:
                yield memoryview(bytes(-part.nbytes % ALIGNED))

    def joined(self) -> bytearray:
        """A copy, in one memory."""
        return bytearray().join(self.pieces())

    def load(self) -> Any:
        """The object; raises what its classes raise."""
        data, *buffers = self.parts
        return pickle.loads(data, buffers=buffers)


def room_of(sizes: Iterable[int]) -> int:
    """Bytes of the memory that parts of these `sizes` need."""
    return sum(size + -size % ALIGNED for size in sizes)


def _reduced_code(code: CodeType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return code_of_file, (make, args, code.co_filename)


def code_of_file(make: Callable[..., CodeType], args: tuple[Any, ...], file: str) -> CodeType:
    """Code that was written, with the file that tracebacks name; cloudpickle 3.1.3 leaves that out."""
    return make(*args).replace(co_filename=file)


def _reduced_cell(cell: CellType) -> tuple[Any, ...]:
    try:
        return CellType, (), (cell.cell_contents,), None, None, fill_cell
    except ValueError:
        return CellType, ()


def fill_cell(cell: CellType, state: tuple[Any]) -> None:
    """Set the contents of a cell, which may refer to the functions that have it."""
    (cell.cell_contents,) = state


def function(code: CodeType, variables: dict[str, Any] | None, closure: tuple[CellType, ...] | None) -> FunctionType:
    """Make a function without attributes; its globals are `variables`, or those of ``__main__``."""
    return FunctionType(code, main_variables() if variables is None else variables, closure=closure)


def fill_function(made: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Set a function's attributes; cloudpickle's own would copy the contents of the cells that functions share."""
    own, attributes = state
    vars(made).update(own)
    made.__globals__.update(attributes.pop("__globals__", {}))
    del attributes["_cloudpickle_submodules"]  # they are imported now
    for name, value in attributes.items():
        setattr(made, name, value)


def _name_of(name: str, obj: object) -> str:
    return name


def _reduced_cached(cached: Any) -> str | tuple[Any, ...]:
    if cached.__module__ != "__main__":
        return str(cached.__qualname__)
    return cached_function, (cached.__wrapped__, cached.cache_parameters())


def cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Make what ``functools.lru_cache`` makes of a function, with an empty cache."""
    return functools.lru_cache(**parameters)(function)


def _reduced_property(cached: functools.cached_property[Any]) -> tuple[Any, ...]:
    return cached_property, (cached.func, cached.attrname)


def cached_property(function: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    """Make a ``functools.cached_property``, which has a lock in Python 3.11."""
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _reduced_enum(cls: type[enum.Enum], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add what cloudpickle 3.1.3 leaves out: members that Python does not iterate over, and members' attributes."""
    make, (bases, name, qualname, _, *rest), (own, slots), *_, fill = reduced
    members = dict(cls.__members__)
    state = {key: value for key, value in own.items() if key not in members}, slots
    public = {
        key: {attribute: value for attribute, value in vars(member).items() if not attribute.startswith("_")}
        for key, member in members.items()
    }
    args = bases, name, qualname, {key: member.value for key, member in members.items()}, *rest
    return make, args, (fill, state, public), None, None, fill_enum


def fill_enum(cls: type[enum.Enum], state: tuple[Callable[..., Any], Any, dict[str, dict[str, Any]]]) -> None:
    """Set what an enum and its members have besides their values."""
    fill, of_class, of_members = state
    fill(cls, of_class)
    for name, attributes in of_members.items():
        cls.__members__[name].__dict__.update(attributes)


def _reduced_class(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Have the receiver take its own class of ``__main__``, if that is defined by the same lines."""
    if cls.__module__ != "__main__" or cls.__qualname__ != cls.__name__ or (digest := definitions.digest(cls)) is None:
        return reduced
    make, args, state, _, _, fill = reduced
    return find_class, (cls.__name__, digest, make, args), (digest, fill, state), None, None, fill_class


def find_class(name: str, digest: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """Return the receiver's class of that name if it is defined by the same lines, or a new one."""
    here = main_variables().get(name)
    is_same = isinstance(here, type) and here.__module__ == "__main__" and definitions.digest(here) == digest
    return here if is_same else make(*args)  # type: ignore[return-value]


def fill_class(cls: type, state: tuple[str, Callable[..., Any], Any]) -> None:
    """Set the attributes of a class, unless it is the receiver's own and has them."""
    digest, fill, attributes = state
    if main_variables().get(cls.__name__) is not cls or definitions.digest(cls) != digest:
        fill(cls, attributes)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensors of an accelerator written as tensors of the CPU, and code with the name of its file.

    Functions of the modules `homes` have the receiver's variables as their globals. The `buffers` of what is large are
    collected, if it is to stand beside the pickle.
    """

    dispatch_table = ChainMap(
        {
            CodeType: _reduced_code,
            CellType: _reduced_cell,
            functools.cached_property: _reduced_property,
            functools._lru_cache_wrapper: _reduced_cached,
            **{
                type(getattr(dataclasses, name)): functools.partial(_name_of, name)
                for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")  # which are compared by identity
                if hasattr(dataclasses, name)
            },
        },
        cloudpickle.Pickler.dispatch_table,
    )
    homes: Collection[str] = ("__main__",)

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer] | None = None) -> None:
        collect = None if buffers is None else functools.partial(_collect, buffers)
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=collect)
        self.moved = False
        self.globals: dict[str, Any] = {}
        """What the functions of `homes` read of their globals, by name."""
        self.readers: dict[str, str] = {}
        """Which function reads it."""
        self.has_hooks = False
        """Whether a tensor has hooks, which torch does not pickle."""
        self.optimizers: list[Any] = []
        self.models: list[Any] = []
        self.parameters: list[Any] = []
        self.owned: set[int] = set()
        """The ids of all parameters of modules."""
        self._storages: dict[int, Any] = {}
        """By address of what they are to torch: each is written once, however many tensors have it."""
        self._parts = find_parts()

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None:
            if type(obj) is torch.Tensor and _is_plain(obj):
                return self._reduced_tensor(obj)
            if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
                self.moved = self.moved or is_elsewhere(obj)
                return untyped_storage, (pickle.PickleBuffer(self.memory_of(self.on_cpu(obj))),)
            if (reduced := self._reduced_by_torch(obj, torch)) is not None:
                return reduced
        if isinstance(obj, enum.Flag) and type(obj).__reduce_ex__ is enum.Flag.__reduce_ex__:
            return type(obj), (obj._value_,)  # Python 3.11.0 to 3.11.3 take it apart into members that there may not be
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return reduced
        if isinstance(obj, FunctionType):
            return self._reduced_function(obj, reduced)
        if isinstance(obj, enum.EnumMeta):
            reduced = _reduced_enum(obj, reduced)  # type: ignore[arg-type]
        return _reduced_class(obj, reduced) if isinstance(obj, type) else reduced

    def find_globals(self, done: Collection[str]) -> list[str]:
        """Return the names that functions read, but those that are `done`, and those that each process has."""
        hidden = getattr(get_ipython(), "user_ns_hidden", {})
        return [
            name
            for name, value in self.globals.items()
            if name not in done and name not in STANDING_VARIABLES and hidden.get(name, self) is not value
        ]

    def _reduced_function(self, obj: FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        (code, variables, *_), (own, attributes) = reduced[1:3]
        del attributes["__closure__"]
        if home_of(obj) in self.homes:
            variables = None
            del attributes["__globals__"]
            for name in itertools.chain.from_iterable(map(reads, codes(code))):
                if name in obj.__globals__ and not name.startswith("__"):
                    self.globals.setdefault(name, obj.__globals__[name])
                    self.readers.setdefault(name, obj.__qualname__)
        return function, (code, variables, obj.__closure__), (own, attributes), None, None, fill_function

    def _reduced_by_torch(self, obj: Any, torch: Any) -> tuple[Any, ...] | None:
        _ensure_whole(obj, torch)
        if isinstance(obj, torch.Tensor):
            self.has_hooks |= bool(obj._backward_hooks or getattr(obj, "_post_accumulate_grad_hooks", None))
            self.parameters += [obj] * isinstance(obj, torch.nn.Parameter)
            if not is_elsewhere(obj):
                return None
            self.moved = True
            if isinstance(obj, torch.nn.Parameter):  # it reduces to its data, a tensor that comes here next
                return None
            there = self.on_cpu(obj.detach()).requires_grad_(obj.requires_grad)
            return tuple(there.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
        if isinstance(obj, torch.nn.Module):
            self.owned.update(map(id, obj._parameters.values()))
            self.models.append(obj)
            return None
        if isinstance(obj, torch.TypedStorage):
            storage = obj._untyped_storage  # its public twins warn of their age
            if storage.device.type == "cpu":
                return typed_storage, (self._once(storage), obj.dtype)
        if isinstance(obj, torch.Generator) and is_elsewhere(obj):
            where = f"a random generator of {obj.device}"
            raise pickle.PicklingError(
                f"{where} stays where its device is; send its get_state(), and set_state() it there"
            )
        if isinstance(obj, torch.optim.Optimizer):
            self.optimizers.append(obj)
            self.has_hooks |= any(map(vars(obj).get, OPTIMIZER_HOOKS))
        if isinstance(obj, torch.utils.data.DistributedSampler) and _is_this_rank(obj.rank, obj.num_replicas):
            return (*obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:3], None, None, fill_sampler)
        return None

    def on_cpu(self, obj: Any) -> Any:
        """A tensor or storage, on the CPU."""
        return obj.cpu()

    def memory_of(self, storage: Any) -> Any:
        """The bytes of an UntypedStorage of the CPU, which live as long as they are looked at."""
        return _memory_of(storage)

    def _once(self, storage: Any) -> Any:
        if storage._cdata in self._parts:
            raise pickle.PicklingError(PART.format(kind="state of an FSDP1 optimizer or model"))
        return self._storages.setdefault(storage._cdata, storage)

    def _reduced_tensor(self, tensor: Any) -> tuple[Any, ...]:
        """What torch's own writes of a plain tensor, in a sixth of the time."""
        place = tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
        return plain_tensor, (self._once(tensor.untyped_storage()), tensor.dtype, *place, tensor.requires_grad)


def _ensure_whole(obj: Any, torch: Any) -> None:
    """Raise PicklingError for a part of a sharded tensor: alone, it would pass for the whole one."""
    kind = type(obj)
    if kind is torch.nn.Parameter:
        if "_fsdp_flattened" in obj.__dict__:
            raise pickle.PicklingError(PART.format(kind="a parameter of FSDP1"))
    elif isinstance(obj, torch.Tensor):
        if any(base.__module__.startswith(SHARDED_MODULES) for base in kind.__mro__):
            raise pickle.PicklingError(PART.format(kind=f"a {kind.__name__}"))
    elif kind.__name__ == "ZeroRedundancyOptimizer":
        raise pickle.PicklingError(ZERO)
    elif kind.__name__ == "DeviceMesh" and kind.__module__ == "torch.distributed.device_mesh":
        raise pickle.PicklingError(MESH)


def _is_this_rank(rank: int, size: int) -> bool:
    """Return whether this process is `rank` in a group of `size`."""
    return (os.environ.get("RANK"), os.environ.get("WORLD_SIZE")) == (str(rank), str(size))


def fill_sampler(sampler: Any, state: dict[str, Any]) -> None:
    """Set a sampler's attributes; one of another rank of this group gets this rank's part of the data."""
    vars(sampler).update(state)
    if os.environ.get("WORLD_SIZE") == str(sampler.num_replicas):
        sampler.rank = int(os.environ["RANK"])


def _is_plain(tensor: Any) -> bool:
    """Is a tensor of torch's own class all that its storage, sizes and strides say?"""
    return (
        tensor.device.type != "meta"
        and tensor.layout is sys.modules["torch"].strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
        and not tensor._backward_hooks
    )


def _collect(buffers: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Put it to those that stand beside the pickle; returns whether it is written into the pickle instead."""
    if buffer.raw().nbytes < INLINE:
        return True
    buffers.append(buffer)
    return False


def _memory_of(storage: Any) -> Any:
    """The bytes of an UntypedStorage, which live as long as they are looked at; NumPy may not be there."""
    if not storage.nbytes():
        return b""
    memory: Any = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage
    return memory


def untyped_storage(memory: ReadableBuffer) -> Any:
    """The UntypedStorage that was written; what stood beside the pickle is its memory."""
    import torch

    view = memoryview(memory)
    if not view.nbytes:
        return torch.UntypedStorage(0)
    is_beside = isinstance(memory, memoryview) and not view.readonly
    ours = view if is_beside or isinstance(memory, bytearray) else bytearray(view)
    here = torch.frombuffer(ours, dtype=torch.uint8)
    return (here if is_beside else here.clone()).untyped_storage()  # a clone's can be resized, as any tensor


def plain_tensor(
    storage: Any, dtype: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> Any:
    """The tensor that was written, on the CPU."""
    import torch

    tensor = torch.empty(0, dtype=dtype, device="cpu").set_(storage, offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def typed_storage(storage: Any, dtype: Any) -> Any:
    """The TypedStorage that was written."""
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def is_elsewhere(obj: Any) -> bool:
    """Is a tensor, storage or generator of torch on an accelerator, which not every process has or counts alike?"""
    return obj.device.type not in ("cpu", "meta")


def codes(code: CodeType) -> Iterator[CodeType]:
    """`code` and those of the functions inside of it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def reads(code: CodeType) -> list[str]:
    """Return the global names that `code` reads."""
    return [step.argval for step in dis.get_instructions(code) if step.opname in READS]


def loading_order(value: Any) -> int:
    """Return how early a variable that functions read is loaded: the code of classes may run while others are."""
    return 0 if isinstance(value, ModuleType) else 1 if isinstance(value, FunctionType) else 2 + isinstance(value, type)


# -- several names, with one memo


@dataclass
class PickledNames:
    """Several objects, pickled with one memo."""

    pickled: dict[str, Pickled] = field(default_factory=dict)
    """By name, in the order in which they are to be loaded; empty if there are errors."""
    errors: dict[str, str] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    """Names whose tensors moved to the CPU."""
    along: list[str] = field(default_factory=list)
    """Names that nobody has asked for, and that functions read."""
    own: list[str] = field(default_factory=list)
    """Functions that read what ddip defines on each rank: ``f reads rank``."""
    shares: list[str] = field(default_factory=list)
    """What belongs to a variable that is not among these: ``opt holds parameters of net``."""


P = TypeVar("P", bound=Pickler)


class Graph(Generic[P]):
    """Several pickles that have one memo."""

    def __init__(self, make: Callable[[io.BytesIO, list[pickle.PickleBuffer]], P]) -> None:
        self._file, self._buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        self.pickler = make(self._file, self._buffers)
        self._ends: dict[str, tuple[int, int]] = {}
        self.optimizers: dict[int, tuple[str, Any]] = {}
        """By id: the name that holds it, and the optimizer."""
        self.models: dict[int, str] = {}
        """By id of each module: the name that holds it."""
        self.parameters: dict[int, str] = {}
        """By id of each parameter: the name that holds it."""
        self.with_hooks: list[str] = []
        """Names whose tensors or optimizers have hooks."""

    def add(self, name: str, value: Any) -> bool:
        """Pickle `value`; returns whether tensors of it moved to the CPU.

        Raises what its classes raise; then nothing more can be added.
        """
        self.pickler.moved = self.pickler.has_hooks = False
        self.pickler.dump(value)
        self._ends[name] = self._file.tell(), len(self._buffers)
        if self.pickler.has_hooks:
            self.with_hooks.append(name)
        for model in self.pickler.models:
            self.models.setdefault(id(model), name)
        self.pickler.models.clear()
        for parameter in self.pickler.parameters:
            self.parameters.setdefault(id(parameter), name)
        self.pickler.parameters.clear()
        for optimizer in self.pickler.optimizers:
            self.optimizers.setdefault(id(optimizer), (name, optimizer))
        return self.pickler.moved

    def pickled(self) -> dict[str, Pickled]:
        """All of it, by name; nothing can be added then."""
        whole, found, begin, first = self._file.getbuffer(), dict[str, Pickled](), 0, 0
        for name, (end, last) in self._ends.items():
            found[name] = Pickled([whole[begin:end], *(buffer.raw() for buffer in self._buffers[first:last])])
            begin, first = end, last
        return found


def dump(value: Any) -> tuple[Pickled, bool]:
    """Pickle `value`; with whether tensors of it have moved to the CPU. Raises what its classes raise."""
    graph = Graph(Pickler)
    moved = graph.add("", value)
    return graph.pickled()[""], moved


def dump_all(
    values: Mapping[str, Any],
    lacking: Callable[[list[str]], Collection[str]] = lambda names: (),
    variables: Mapping[str, Any] | None = None,
    make: Callable[[io.BytesIO, list[pickle.PickleBuffer]], Pickler] = Pickler,
) -> PickledNames:
    """Pickle `values` with one memo, and with them what their functions read and the receiver is `lacking`.

    `variables` are those of the sender, of which `values` are a part; `make` makes the pickler.
    """
    packed, graph = PickledNames(), Graph(make)
    reading = _add_all(packed, graph, values, lacking)
    if not packed.errors and reading != [*values, *packed.along]:  # once more, now that the order is known
        packed.moved, everything, graph = [], {**values, **graph.pickler.globals}, Graph(make)
        for name in reading:
            _add(packed, graph, name, everything[name])
    if not packed.errors:
        packed.pickled = graph.pickled()
        readers = graph.pickler.readers
        packed.own = [f"{readers[name]} reads {name}" for name in STANDING_VARIABLES if name in readers]
        along = (graph.pickler.globals[name] for name in packed.along)
        packed.shares = find_shares(graph, {*map(id, values.values()), *map(id, along)}, variables or {})
    return packed


def _add_all(
    packed: PickledNames,
    graph: Graph[Pickler],
    values: Mapping[str, Any],
    lacking: Callable[[list[str]], Collection[str]],
) -> list[str]:
    """Pickle `values`, and what their functions read; returns all names in the order in which they must be loaded.

    Classes may have code that runs while they or their instances are loaded: what functions read comes first.
    """
    todo, readers = dict(values), [*values]
    done, read = set(todo), graph.pickler.globals
    while todo:
        for name, value in todo.items():
            _add(packed, graph, name, value)
            readers = readers if read else readers[1:]
        new = graph.pickler.find_globals(done)
        done.update(new)
        todo = {name: read[name] for name in (lacking(new) if new and not packed.errors else ())}
        packed.along += todo
    early = [*packed.along, *(name for name in readers[1:] if name in read)]
    early.sort(key=lambda name: loading_order(read[name]))
    return [*(name for name in values if name not in readers), *early, *(name for name in readers if name not in early)]


def _add(packed: PickledNames, graph: Graph[Pickler], name: str, value: Any) -> None:
    """If one cannot be pickled, the others are tried by themselves: all that cannot be are named."""
    try:
        if (Graph(Pickler) if packed.errors else graph).add(name, value):
            packed.moved.append(name)
    except Exception as error:
        reader = graph.pickler.readers.get(name) if name in packed.along else None
        what = f"{name}, which {reader} reads," if reader else name
        packed.errors[what] = readable(f"{type(error).__name__}: {error}")


def find_shares(graph: Graph[Pickler], sent: Collection[int], variables: Mapping[str, Any]) -> list[str]:
    """Find what stays behind: models of holders and optimizers, optimizers of schedulers, hooks; `sent` are ids."""
    found = [f"{name} has a hook of a parameter or optimizer" for name in graph.with_hooks]
    left = {name: value for name, value in variables.items() if not name.startswith("_") and id(value) not in sent}
    found += [f"{graph.models[id(value)]} holds {name}" for name, value in left.items() if id(value) in graph.models]
    models = {name: value for name, value in left.items() if isinstance(value, _module_class())}
    for holder, optimizer in graph.optimizers.values():
        found += [f"{holder} holds {name}" for name, value in left.items() if value is optimizer]
    holders = {id_: holder for id_, holder in graph.parameters.items() if id_ not in graph.pickler.owned}
    its: dict[str, str] = {}
    for name, model in models.items() if holders else ():
        for holder in sorted({holders[id(p)] for p in model.parameters() if id(p) in holders} - its.keys()):
            its[holder] = name
    return found + [f"{holder} holds parameters of {name}" for holder, name in its.items()]


def home_of(function: FunctionType) -> str | None:
    """Return the module whose variables a function reads; after ``%run`` they have no ``__name__`` any more."""
    home: str | None = function.__globals__.get("__name__", function.__module__)
    return home


def _module_class() -> Any:
    """Return torch's class of modules; no class if torch is not imported."""
    torch = sys.modules.get("torch")
    return () if torch is None else torch.nn.Module


class Loader:
    """What `dump_all` has pickled, one name after the other."""

    def __init__(self, pickled: Mapping[str, Pickled]) -> None:
        self._pickled = pickled
        if len(pickled) > 1:
            data = b"".join(each.parts[0] for each in pickled.values())
            buffers = itertools.chain.from_iterable(each.parts[1:] for each in pickled.values())
            self._unpickler = pickle.Unpickler(io.BytesIO(data), buffers=buffers)

    def load(self, name: str) -> Any:
        """The next, which is `name`; raises what its classes raise, and then no other can be loaded."""
        return self._unpickler.load() if len(self._pickled) > 1 else self._pickled[name].load()


# -- variables of the receiver


def main_variables() -> dict[str, Any]:
    """Return the variables of the cells, or of the script: the globals of ``__main__``."""
    return vars(sys.modules["__main__"])


def lacks(variables: Mapping[str, Any], name: str) -> bool:
    """Is there no such variable, or only code or plain data that came along earlier, and that nothing has changed?"""
    if name in variables and name in _brought and not _is_as_it_came(name, variables[name]):
        del _brought[name]
    return name not in variables or name in _brought


def bring(variables: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set variables that functions read, and that came along: those that are lacking."""
    for name, value in values.items():
        if lacks(variables, name):
            variables[name] = value
            if isinstance(value, (FunctionType, type)):
                _brought[name] = weakref.ref(value), None
            elif data := _plain_data(value):
                _brought[name] = value, data


def _plain_data(value: Any) -> bytes | None:
    """Return the bytes of numbers, texts and containers of these; None for anything else, or if it is long."""
    try:
        data = marshal.dumps(value, 2)  # a format in which equal bytes mean equal values
    except ValueError:
        return None
    return data if len(data) <= MOST_BYTES else None


def _is_as_it_came(name: str, value: Any) -> bool:
    brought, data = _brought[name]
    known = brought() if isinstance(brought, weakref.ref) else brought
    return known is value and (data is None or data == _plain_data(value))
