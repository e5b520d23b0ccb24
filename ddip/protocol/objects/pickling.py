"""Pickle variables of a notebook or a rank, without importing torch if the process has not imported it.

All names of one transfer share a memo, so that objects shared between variables are still shared after unpickling.
Functions and classes of ``__main__`` get the receiver's variables as their globals; the globals that the receiver lacks
are sent with them.

The memory of arrays and tensors is not copied into the pickle but kept in separate buffers (protocol 5, PEP 574). It is
copied once, to memory that the receiver reads, and the receiver's arrays and tensors use that memory.
"""

from __future__ import annotations

import contextlib
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
import pkgutil
import sys
import weakref
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CellType, CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import cloudpickle
from IPython.core.getipython import get_ipython

from ddip.protocol.objects import definitions, training_links
from ddip.protocol.rank_spec import STANDING_VARIABLES
from ddip.protocol.text import escape_surrogates

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

Place: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, size and stride of a tensor in its storage."""
INLINE = 1 << 14
"""Bytes below which the memory of an array or tensor is written into the pickle instead of a separate buffer."""
ALIGNED = 64
"""Alignment of each part in bytes, as torch and NumPy align their memory."""
SHARDED_MODULES = ("torch.distributed.tensor", "torch.distributed._tensor", "torch.distributed._shard")
"""Modules whose tensors (DTensor, ShardedTensor) are one rank's part of a larger tensor."""
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
MESH = "it holds a DeviceMesh, which belongs to the groups of its rank: create one on each rank, with init_device_mesh"

find_parts: Callable[[], Collection[int]] = tuple
"""Function that returns the ``_cdata`` of plain storages that hold only one rank's part; each rank replaces it."""
OPTIMIZER_HOOKS = (
    "_optimizer_step_pre_hooks",
    "_optimizer_step_post_hooks",
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
)
"""Attributes of an optimizer that hold its hooks."""
PART_OF_RANK = "_ddip_part"
"""Attribute of a sampler in the notebook: the rank that it is from, and the number of ranks, as texts."""
GENERATORS = (
    "random:_inst",
    "numpy.random.mtrand:_rand",
    "numpy.random.mtrand:_rand._bit_generator",
    "torch:default_generator",
)
"""Modules and names of the process-wide random generators of the CPU."""
HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
"""Ends of the names of a module's attributes that hold its hooks by number."""
MOST_BYTES = 1 << 16
"""Maximum size of plain data that was sent with a function and is compared with its original later."""
READING_OPCODES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")

_brought: dict[str, tuple[Any, bytes | str | None]] = {}
"""Variables that were sent with a function, by name: plain data with its bytes, or a weak reference to code with its
digest. A later function replaces them unless the user has assigned or changed them. Other objects are never replaced: a
model, for example, may have been trained.
"""


@dataclass(frozen=True)
class Pickled:
    """An object as bytes: its pickle, then the buffers that the pickle refers to, in order."""

    parts: Sequence[memoryview]

    @classmethod
    def of(cls, memory: ReadableBuffer, sizes: Iterable[int], begin: int = 0) -> Pickled:
        """Return the object whose parts, of these `sizes`, are in `memory` from `begin` on.

        The parts are not copied: arrays and tensors of the loaded object use `memory`.
        """
        whole, parts = memoryview(memory).cast("B"), []
        for size in sizes:
            parts.append(whole[begin : begin + size])
            begin += size + -size % ALIGNED
        return cls(parts)

    @property
    def sizes(self) -> list[int]:
        """Size of each part in bytes."""
        return [part.nbytes for part in self.parts]

    @property
    def size(self) -> int:
        """Total size of the parts in bytes, without padding."""
        return sum(self.sizes)

    @property
    def room(self) -> int:
        """Size of all parts in one block of memory, with padding, in bytes."""
        return room_of(self.sizes)

    def pieces(self) -> Iterator[memoryview]:
        """Yield the contents of such a block: each part and its padding."""
        for part in self.parts:
            yield part
            if part.nbytes % ALIGNED:
                yield memoryview(bytes(-part.nbytes % ALIGNED))

    def joined(self) -> bytearray:
        """Return a copy of all parts in one block, with padding."""
        return bytearray().join(self.pieces())

    def load(self) -> Any:
        """Return the unpickled object; raises what its classes raise."""
        data, *buffers = self.parts
        return pickle.loads(data, buffers=buffers)


def room_of(sizes: Iterable[int]) -> int:
    """Return the bytes that parts of these `sizes` need in one block, with padding."""
    return sum(size + -size % ALIGNED for size in sizes)


def _reduce_code(code: CodeType) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    make, args = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return code_of_file, (make, args, code.co_filename)


def code_of_file(make: Callable[..., CodeType], args: tuple[Any, ...], file: str) -> CodeType:
    """Rebuild a code object with its file name for tracebacks, which cloudpickle 3.1.3 leaves out."""
    return make(*args).replace(co_filename=file)


def _reduce_cell(cell: CellType) -> tuple[Any, ...]:
    try:
        return CellType, (), (cell.cell_contents,), None, None, fill_cell
    except ValueError:
        return CellType, ()


def fill_cell(cell: CellType, state: tuple[Any]) -> None:
    """Set the contents of a closure cell, which may refer to the functions that use the cell."""
    (cell.cell_contents,) = state


def make_function(
    code: CodeType, variables: dict[str, Any] | None, closure: tuple[CellType, ...] | None
) -> FunctionType:
    """Make a function without attributes; its globals are `variables`, or for None those of ``__main__``."""
    return FunctionType(code, main_variables() if variables is None else variables, closure=closure)


def fill_function(function: FunctionType, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Set a function's attributes, but not its closure: cloudpickle would copy cells that functions share."""
    own, attributes = state
    vars(function).update(own)
    function.__globals__.update(attributes.pop("__globals__", {}))
    del attributes["_cloudpickle_submodules"]  # unpickling has imported them
    for name, value in attributes.items():
        setattr(function, name, value)


def _find_generators() -> dict[int, str]:
    """Return the paths of this process's `GENERATORS` by id."""
    found: dict[int, str] = {}
    for path in GENERATORS:
        if path.partition(":")[0] in sys.modules:
            with contextlib.suppress(AttributeError):
                found[id(pkgutil.resolve_name(path))] = path
    return found


def _reduce_to_name(name: str, obj: object) -> str:
    return name


def _reduce_cached_function(cached: Any) -> str | tuple[Any, ...]:
    if cached.__module__ != "__main__":
        return str(cached.__qualname__)
    return cached_function, (cached.__wrapped__, cached.cache_parameters())


def cached_function(function: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    """Wrap `function` with ``functools.lru_cache``; its cache is empty."""
    return functools.lru_cache(**parameters)(function)


def _reduce_cached_property(cached: functools.cached_property[Any]) -> tuple[Any, ...]:
    return cached_property, (cached.func, cached.attrname)


def cached_property(function: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    """Make a ``functools.cached_property``; in Python 3.11 it holds a lock, which cannot be pickled."""
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _reduce_enum(cls: type[enum.Enum], reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Add aliases and the members' attributes, which cloudpickle 3.1.3 leaves out, to a reduced enum."""
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
    """Set the attributes of an enum class that unpickling has just created.

    `state`: a function that sets the state of a class, this state, and by name the attributes of the members.
    """
    fill, of_class, of_members = state
    fill(cls, of_class)
    for name, attributes in of_members.items():
        cls.__members__[name].__dict__.update(attributes)


def _reduce_class(cls: type, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
    """Reduce a class of ``__main__`` so that the receiver uses its own if that has the same definition."""
    if (
        cls.__module__ != "__main__"
        or cls.__qualname__ != cls.__name__
        or (digest := definitions.compute_digest(cls)) is None
    ):
        return reduced
    make, args, state, _, _, fill = reduced
    return find_class, (cls.__name__, digest, make, args), (digest, fill, state), None, None, fill_class


def find_class(name: str, digest: str, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    """Return the receiver's class `name` if it has the same definition, else a new one, ``make(*args)``.

    `digest`: that of the sender's definition.
    """
    own = main_variables().get(name)
    is_same = isinstance(own, type) and own.__module__ == "__main__" and definitions.compute_digest(own) == digest
    return own if is_same else make(*args)  # type: ignore[return-value]


def fill_class(cls: type, state: tuple[str, Callable[..., Any], Any]) -> None:
    """Set the attributes of a class, unless it is the receiver's own class, which already has them."""
    digest, fill, attributes = state
    if main_variables().get(cls.__name__) is not cls or definitions.compute_digest(cls) != digest:
        fill(cls, attributes)


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle that moves tensors from an accelerator to the CPU and keeps the file names of code.

    Functions of the modules `homes` get the receiver's variables as their globals. With a list `buffers`, the memory of
    large arrays and tensors is appended to it instead of being written into the pickle.
    """

    dispatch_table = ChainMap(
        {
            CodeType: _reduce_code,
            CellType: _reduce_cell,
            functools.cached_property: _reduce_cached_property,
            functools._lru_cache_wrapper: _reduce_cached_function,
            **{
                type(getattr(dataclasses, name)): functools.partial(_reduce_to_name, name)
                for name in ("MISSING", "KW_ONLY", "_HAS_DEFAULT_FACTORY")  # they are compared by identity
                if hasattr(dataclasses, name)
            },
        },
        cloudpickle.Pickler.dispatch_table,
    )
    homes: Collection[str] = ("__main__",)

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer] | None = None) -> None:
        collect = None if buffers is None else functools.partial(_collect_buffer, buffers)
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=collect)
        self.moved = False
        self.globals: dict[str, Any] = {}
        """Globals that functions of `homes` read, by name."""
        self.readers: dict[str, str] = {}
        """Function that reads each of these globals, by the name of the global."""
        self.has_hooks = False
        """True if a tensor or optimizer has hooks, which torch does not pickle."""
        self.name = ""
        """Name of the variable that is pickled, set by `Graph`."""
        self.parts = training_links.Parts()
        """Modules, optimizers and parameters that were pickled."""
        self._storages: dict[int, Any] = {}
        """Storages by ``_cdata``: each is written once, even if several tensors use it."""
        self._parts = find_parts()
        self._generators = _find_generators()

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._generators:  # the receiver has its own, which it seeds
            return pkgutil.resolve_name, (self._generators[id(obj)],)
        torch = sys.modules.get("torch")
        if torch is not None:
            if type(obj) is torch.Tensor and is_plain_tensor(obj):
                if obj.requires_grad and obj.is_leaf:
                    self.parts.leaves.setdefault(id(obj), self.name)
                return self._reduce_tensor(obj)
            if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
                self.moved = self.moved or is_elsewhere(obj)
                return untyped_storage, (pickle.PickleBuffer(self.memory_of(self.on_cpu(obj))),)
            if (reduced := self._reduce_torch_object(obj, torch)) is not None:
                return reduced
        if isinstance(obj, enum.Flag) and type(obj).__reduce_ex__ is enum.Flag.__reduce_ex__:
            return type(obj), (obj._value_,)  # Python 3.11.0 to 3.11.3 split it into members that may not exist
        reduced = super().reducer_override(obj)
        if reduced is NotImplemented:
            return reduced
        if isinstance(obj, FunctionType):
            return self._reduce_function(obj, reduced)
        if isinstance(obj, enum.EnumMeta):
            reduced = _reduce_enum(obj, reduced)  # type: ignore[arg-type]
        elif isinstance(obj, type) and "__slots__" in vars(obj):
            reduced[1][3]["__slots__"] = vars(obj)["__slots__"]  # cloudpickle 3.1.3 sets them too late
        return _reduce_class(obj, reduced) if isinstance(obj, type) else reduced

    def find_globals(self, done: Collection[str]) -> list[str]:
        """Return the globals that functions read, except those `done` and those that every process has."""
        hidden = getattr(get_ipython(), "user_ns_hidden", {})
        return [
            name
            for name, value in self.globals.items()
            if name not in done and name not in STANDING_VARIABLES and hidden.get(name, self) is not value
        ]

    def _reduce_function(self, obj: FunctionType, reduced: tuple[Any, ...]) -> tuple[Any, ...]:
        (code, variables, *_), (own, attributes) = reduced[1:3]
        del attributes["__closure__"]
        if home_of(obj) in self.homes:
            variables = None
            del attributes["__globals__"]
            for name in itertools.chain.from_iterable(map(global_names, nested_codes(code))):
                if name in obj.__globals__ and not name.startswith("__"):
                    self.globals.setdefault(name, obj.__globals__[name])
                    self.readers.setdefault(name, obj.__qualname__)
        return make_function, (code, variables, obj.__closure__), (own, attributes), None, None, fill_function

    def _reduce_torch_object(self, obj: Any, torch: Any) -> tuple[Any, ...] | None:
        ensure_whole(obj, torch)
        if isinstance(obj, torch.Tensor):
            self.has_hooks |= _has_hooks(obj)
            if isinstance(obj, torch.nn.Parameter) or (obj.requires_grad and obj.is_leaf):
                self.parts.leaves.setdefault(id(obj), self.name)
            self.moved = self.moved or is_elsewhere(obj)
            if isinstance(obj, torch.nn.Parameter):  # its data, a plain tensor, is reduced next
                return None
            if is_elsewhere(obj):
                return reduce_like_torch(self.on_cpu(obj.detach()).requires_grad_(obj.requires_grad))
            return reduce_like_torch(obj) if obj.layout is torch.sparse_coo else None
        if isinstance(obj, torch.nn.Module):
            self.parts.owned.update(map(id, obj._parameters.values()))
            self.parts.models.setdefault(id(obj), self.name)
            if any(hooks for name, hooks in vars(obj).items() if name.endswith(HOOKS)):
                make, args, state, *rest = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
                return (make, args, state, None, None, fill_module) if rest in ([], [None, None]) else None
            return None
        if isinstance(obj, torch.TypedStorage):
            storage = obj._untyped_storage  # the public names raise deprecation warnings
            if storage.device.type == "cpu":
                return typed_storage, (self._shared_storage(storage), obj.dtype)
        if isinstance(obj, torch.Generator) and is_elsewhere(obj):
            where = f"a random generator of {obj.device}"
            raise pickle.PicklingError(
                f"{where} stays where its device is; send its get_state(), and set_state() it there"
            )
        if isinstance(obj, torch.optim.Optimizer):
            self.parts.optimizers.setdefault(id(obj), self.name)
            self.has_hooks |= any(map(vars(obj).get, OPTIMIZER_HOOKS))
        if isinstance(obj, torch.utils.data.DistributedSampler) and _is_own_part(obj):
            return (*obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:3], None, None, fill_sampler)
        return None

    def on_cpu(self, obj: Any) -> Any:
        """Return a tensor or storage on the CPU; a copy if it is on another device."""
        return obj.cpu()

    def memory_of(self, storage: Any) -> Any:
        """Return the bytes of an UntypedStorage on the CPU; they keep the storage alive."""
        return _storage_bytes(storage)

    def _shared_storage(self, storage: Any) -> Any:
        if storage._cdata in self._parts:
            raise pickle.PicklingError(PART.format(kind="state of an FSDP1 optimizer or model"))
        return self._storages.setdefault(storage._cdata, storage)

    def _reduce_tensor(self, tensor: Any) -> tuple[Any, ...]:
        """Reduce a plain tensor as torch does, in a sixth of the time."""
        storage = self._shared_storage(tensor.untyped_storage())
        return plain_tensor, (storage, tensor.dtype, *place_of(tensor), tensor.requires_grad)


def ensure_whole(obj: Any, torch: Any) -> None:
    """Raise PicklingError for one rank's part of a sharded object: it would pass for the whole object."""
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


def _is_on_rank() -> bool:
    return getattr(get_ipython(), "is_rank", False)


def _is_own_part(sampler: Any) -> bool:
    """Return whether a sampler draws this rank's part of the data.

    In the notebook: that of the rank it is from.
    """
    of_rank = os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    part = of_rank if _is_on_rank() else vars(sampler).get(PART_OF_RANK)
    return bool(part == (str(sampler.rank), str(sampler.num_replicas)))


def fill_sampler(sampler: Any, state: dict[str, Any]) -> None:
    """Set a sampler's attributes. On a rank, it draws that rank's part of the data; the notebook notes its rank."""
    vars(sampler).update(state)
    vars(sampler).pop(PART_OF_RANK, None)
    if _is_on_rank():
        fit_sampler(sampler, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    else:
        vars(sampler)[PART_OF_RANK] = str(sampler.rank), str(sampler.num_replicas)


def fit_sampler(sampler: Any, rank: int, ranks: int) -> None:
    """Let a sampler draw the part of `rank` among `ranks`."""
    sampler.rank = rank
    if sampler.num_replicas != ranks:
        sampler.num_replicas, count = ranks, len(sampler.dataset)
        sampler.num_samples = count // ranks if sampler.drop_last else -(-count // ranks)
        sampler.total_size = sampler.num_samples * ranks


def fill_module(module: Any, state: dict[str, Any]) -> None:
    """Set a module's attributes, and see to it that its hooks keep their numbers.

    torch numbers hooks per process: the next hook of the module would otherwise replace one with the same number.
    """
    from torch.utils.hooks import RemovableHandle

    module.__setstate__(state)
    hooks = [hooks for name, hooks in vars(module).items() if name.endswith(HOOKS)]
    numbers = [number for group in hooks if isinstance(group, dict) for number in group if isinstance(number, int)]
    RemovableHandle.next_id = max([RemovableHandle.next_id, *(number + 1 for number in numbers)])


def place_of(tensor: Any) -> Place:
    """Return offset, size and stride of a tensor in its storage."""
    return int(tensor.storage_offset()), tuple(tensor.size()), tensor.stride()


def reduce_like_torch(tensor: Any) -> tuple[Any, ...]:
    """Reduce a tensor as torch does, and keep ``requires_grad`` of a sparse one, which torch 2.14 loses."""
    reduced = tuple(tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL))
    is_lost = tensor.requires_grad and tensor.layout is sys.modules["torch"].sparse_coo and len(reduced) == 2
    return (with_gradient, reduced) if is_lost else reduced


def with_gradient(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the tensor ``make(*args)``, which then requires a gradient."""
    return make(*args).requires_grad_()


def _has_hooks(tensor: Any) -> bool:
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def is_plain_tensor(tensor: Any) -> bool:
    """Return whether storage, sizes and strides describe a ``torch.Tensor`` completely."""
    return (
        tensor.device.type != "meta"
        and tensor.layout is sys.modules["torch"].strided
        and not (tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg())
        and not vars(tensor)
        and not _has_hooks(tensor)
    )


def _collect_buffer(buffers: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Append a large `buffer` to `buffers`; returns True for a small one, which goes into the pickle."""
    if buffer.raw().nbytes < INLINE:
        return True
    buffers.append(buffer)
    return False


def _storage_bytes(storage: Any) -> Any:
    """Return the bytes of an UntypedStorage; they keep the storage alive. Works without NumPy."""
    if not storage.nbytes():
        return b""
    memory: Any = (ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())
    memory.storage = storage
    return memory


def untyped_storage(memory: ReadableBuffer) -> Any:
    """Rebuild an UntypedStorage; a separate buffer becomes its memory without a copy."""
    import torch

    view = memoryview(memory)
    if not view.nbytes:
        return torch.UntypedStorage(0)
    is_beside = isinstance(memory, memoryview) and not view.readonly
    ours = view if is_beside or isinstance(memory, bytearray) else bytearray(view)
    here = torch.frombuffer(ours, dtype=torch.uint8)
    return (here if is_beside else here.clone()).untyped_storage()  # a clone can be resized, like any tensor


def plain_tensor(
    storage: Any, dtype: Any, offset: int, size: tuple[int, ...], stride: tuple[int, ...], requires_grad: bool
) -> Any:
    """Rebuild a tensor on the device of its storage."""
    import torch

    tensor = torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, size, stride)
    return tensor.requires_grad_() if requires_grad else tensor


def typed_storage(storage: Any, dtype: Any) -> Any:
    """Rebuild a TypedStorage."""
    import torch

    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)


def is_elsewhere(obj: Any) -> bool:
    """Return whether a tensor, storage or generator of torch is on an accelerator.

    Other processes may lack the device, or number it differently.
    """
    return obj.device.type not in ("cpu", "meta")


def nested_codes(code: CodeType) -> Iterator[CodeType]:
    """Yield `code` and the code objects nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from nested_codes(constant)


def global_names(code: CodeType) -> list[str]:
    """Return the global names that `code` reads."""
    return [step.argval for step in dis.get_instructions(code) if step.opname in READING_OPCODES]


def loading_order(value: Any) -> int:
    """Return the sort key for loading a global: modules, functions, data, classes.

    Code of a class may run while later objects are loaded, so modules and functions come first.
    """
    kind = type(value)  # isinstance() fails for a proxy of an object that has ended
    return 0 if issubclass(kind, ModuleType) else 1 if issubclass(kind, FunctionType) else 2 + issubclass(kind, type)


# -- several names, with one memo


@dataclass
class PickledNames:
    """Objects pickled with one memo, and notes on them for the user."""

    pickled: dict[str, Pickled] = field(default_factory=dict)
    """Pickled objects by name, in the order of loading; empty if there are errors."""
    errors: dict[str, str] = field(default_factory=dict)
    moved: list[str] = field(default_factory=list)
    """Names whose tensors were moved to the CPU."""
    along: list[str] = field(default_factory=list)
    """Names that were not requested, but that functions read."""
    own: list[str] = field(default_factory=list)
    """Functions that read a variable that ddip defines on each rank: ``f reads rank``."""
    shares: list[str] = field(default_factory=list)
    """Links to variables that are not pickled: ``opt holds parameters of net``."""


P = TypeVar("P", bound=Pickler)


class Graph(Generic[P]):
    """Several pickles with one memo."""

    def __init__(self, make: Callable[[io.BytesIO, list[pickle.PickleBuffer]], P]) -> None:
        self._file, self._buffers = io.BytesIO(), list[pickle.PickleBuffer]()
        self.make = make
        """Factory of the pickler."""
        self.pickler = make(self._file, self._buffers)
        self._ends: dict[str, tuple[int, int]] = {}
        self.with_hooks: list[str] = []
        """Names whose tensors or optimizers have hooks."""

    def add(self, name: str, value: Any) -> bool:
        """Pickle `value` under `name`; returns whether any of its tensors was moved to the CPU.

        Raises what its classes raise; nothing more can be added after that.
        """
        self.pickler.name, self.pickler.moved, self.pickler.has_hooks = name, False, False
        self.pickler.dump(value)
        self._ends[name] = self._file.tell(), len(self._buffers)
        if self.pickler.has_hooks:
            self.with_hooks.append(name)
        return self.pickler.moved

    def pickled(self) -> dict[str, Pickled]:
        """Return the pickled objects by name; nothing can be added after that.

        They refer to the file's bytes, which are not copied, rather than to its buffer: Python 3.12.1 crashes when it
        collects a file whose buffer is in use, and later versions report an error.
        """
        whole, found, begin, first = memoryview(self._file.getvalue()), dict[str, Pickled](), 0, 0
        for name, (end, last) in self._ends.items():
            found[name] = Pickled([whole[begin:end], *(buffer.raw() for buffer in self._buffers[first:last])])
            begin, first = end, last
        return found


def pickle_value(value: Any) -> tuple[Pickled, bool]:
    """Pickle `value`; returns it and whether any of its tensors was moved to the CPU.

    Raises what its classes raise.
    """
    graph = Graph(Pickler)
    moved = graph.add("", value)
    return graph.pickled()[""], moved


def dump_all(
    values: Mapping[str, Any],
    lacking: Callable[[list[str]], Collection[str]] = lambda names: (),
    variables: Mapping[str, Any] | None = None,
    make: Callable[[io.BytesIO, list[pickle.PickleBuffer]], Pickler] = Pickler,
) -> PickledNames:
    """Pickle variables as one object graph: objects that they share stay shared at the receiver.

    Parameters
    ----------
    values
        Variables to pickle, by name.
    lacking
        Function that returns which of the given globals the receiver lacks. Those that functions in `values` read are
        pickled as well. Default: none.
    variables
        All variables of the sender. The result's ``shares`` name each of them that `values` refer to and that is not
        sent, such as the model of an optimizer.
    make
        Factory of the pickler.
    """
    packed, graph = PickledNames(), Graph(make)
    reading = _add_all(packed, graph, values, lacking)
    if not packed.errors and reading != [*values, *packed.along]:  # pickle again in the order of loading
        packed.moved, everything, graph = [], {**graph.pickler.globals, **values}, Graph(make)
        for name in reading:
            _add_name(packed, graph, name, everything[name])
    if not packed.errors:
        packed.pickled = graph.pickled()
        readers = graph.pickler.readers
        packed.own = [f"{readers[name]} reads {name}" for name in STANDING_VARIABLES if name in readers]
        along = {name: graph.pickler.globals[name] for name in packed.along}
        packed.shares = find_shares(graph, {**values, **along}, variables or {})
    return packed


def _add_all(
    packed: PickledNames,
    graph: Graph[Pickler],
    values: Mapping[str, Any],
    lacking: Callable[[list[str]], Collection[str]],
) -> list[str]:
    """Add `values`, and the globals that their functions read, to `graph`, and return the names in loading order.

    `lacking`: returns those of the given names that the receiver lacks; other globals are not added. Errors and notes
    are added to `packed`; after an error, each name is only tried. Globals that functions read come first, since code
    of a class may run while the class or an instance is loaded.
    """
    pending, readers = dict(values), [*values]
    done, read = set(pending), graph.pickler.globals
    while pending:
        for name, value in pending.items():
            _add_name(packed, graph, name, value)
            readers = readers if read else readers[1:]
        new = graph.pickler.find_globals(done)
        done.update(new)
        pending = {name: read[name] for name in (lacking(new) if new and not packed.errors else ())}
        packed.along += pending
    early = [*packed.along, *(name for name in readers[1:] if name in read)]
    early.sort(key=lambda name: loading_order(read[name]))
    return [*(name for name in values if name not in readers), *early, *(name for name in readers if name not in early)]


def _add_name(packed: PickledNames, graph: Graph[Pickler], name: str, value: Any) -> None:
    """Add one name to the graph; after an error, only try it separately, to report each name that fails."""
    try:
        if (Graph(graph.make) if packed.errors else graph).add(name, value):
            packed.moved.append(name)
    except Exception as error:
        reader = graph.pickler.readers.get(name) if name in packed.along else None
        what = f"{name}, which {reader} reads," if reader else name
        packed.errors[what] = escape_surrogates(f"{type(error).__name__}: {error}")


def find_shares(graph: Graph[Pickler], sent: Mapping[str, Any], variables: Mapping[str, Any]) -> list[str]:
    """Describe the links to variables that are not sent, and hooks, which are never sent.

    `graph`: the pickles; `sent`: the objects in them, by name; `variables`: all variables of the sender.
    """
    found = [f"{name} has a hook of a parameter or optimizer" for name in graph.with_hooks]
    return found + training_links.find_links(graph.pickler.parts, sent, variables)


def home_of(function: FunctionType) -> str | None:
    """Return the name of the module whose globals `function` reads.

    ``%run`` removes ``__name__`` from these globals; then it is the function's ``__module__``.
    """
    home: str | None = function.__globals__.get("__name__", function.__module__)
    return home


class Loader:
    """Unpickle the result of `dump_all`, one name after the other."""

    def __init__(self, pickled: Mapping[str, Pickled]) -> None:
        self._pickled = pickled
        if len(pickled) > 1:
            data = b"".join(each.parts[0] for each in pickled.values())
            buffers = itertools.chain.from_iterable(each.parts[1:] for each in pickled.values())
            self._unpickler = pickle.Unpickler(io.BytesIO(data), buffers=buffers)

    def load(self, name: str) -> Any:
        """Return the object `name`; call it once per name, in the order of the names.

        Raises what its classes raise; no other object can be loaded after that.
        """
        return self._unpickler.load() if len(self._pickled) > 1 else self._pickled[name].load()


# -- variables of the receiver


def main_variables() -> dict[str, Any]:
    """Return the variables of the notebook or script: the globals of ``__main__``."""
    return vars(sys.modules["__main__"])


def lacks_variable(variables: Mapping[str, Any], name: str) -> bool:
    """Return whether `name` is missing, or is a variable that was sent with a function and is unchanged."""
    if name in variables and name in _brought and not _is_unchanged(name, variables[name]):
        del _brought[name]
    return name not in variables or name in _brought


def set_missing_variables(variables: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set the variables that were sent with functions, except those that the receiver has of its own."""
    for name, value in values.items():
        if lacks_variable(variables, name):
            variables[name] = value
            if isinstance(value, (FunctionType, type)):
                _brought[name] = weakref.ref(value), definitions.compute_digest(value)
            elif data := _plain_data(value):
                _brought[name] = value, data


def _plain_data(value: Any) -> bytes | None:
    """Return plain data as bytes; None for other objects, and for more than `MOST_BYTES`."""
    try:
        data = marshal.dumps(value, 2)  # equal bytes mean equal values in this format
    except ValueError:
        return None
    return data if len(data) <= MOST_BYTES else None


def _is_unchanged(name: str, value: Any) -> bool:
    brought, known = _brought[name]
    if isinstance(brought, weakref.ref):
        return brought() is value is not None and definitions.compute_digest(value) == known
    return brought is value and _plain_data(value) == known
