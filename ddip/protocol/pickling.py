"""Pickle what a notebook holds; no torch is imported unless it already is.

The memory of arrays and tensors is not copied into the pickle, but stands beside it (protocol 5, PEP 574): it is copied
once, to where the other side reads it, and is the other side's array or tensor there.
"""

from __future__ import annotations

import ctypes
import functools
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import TYPE_CHECKING, Any

import cloudpickle

from ddip.protocol.text import readable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

INLINE = 1 << 14
"""Bytes of an array or tensor that is in the pickle itself: it is not worth the memory of its own."""
ALIGNED = 64
"""Bytes: each part begins at a multiple of it, as torch and NumPy have their memory."""


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


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle, with tensors of an accelerator written as tensors of the CPU, and code with the name of its file.

    The `buffers` of what is large are collected, if it is to stand beside the pickle.
    """

    dispatch_table = ChainMap({CodeType: _reduced_code}, cloudpickle.Pickler.dispatch_table)

    def __init__(self, file: io.BytesIO, buffers: list[pickle.PickleBuffer] | None = None) -> None:
        collect = None if buffers is None else functools.partial(_collect, buffers)
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL, buffer_callback=collect)
        self.moved = False
        self._storages: dict[int, Any] = {}
        """By address of what they are to torch: each is written once, however many tensors have it."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None:
            return super().reducer_override(obj)
        if type(obj) is torch.Tensor and _is_plain(obj):
            return self._reduced(obj)
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            self.moved = self.moved or is_elsewhere(obj)
            return untyped_storage, (pickle.PickleBuffer(self.memory_of(self.on_cpu(obj))),)
        if isinstance(obj, torch.Tensor) and is_elsewhere(obj):
            self.moved = True
            if not isinstance(obj, torch.nn.Parameter):  # it reduces to its data, a tensor that comes here next
                there = self.on_cpu(obj.detach()).requires_grad_(obj.requires_grad)
                return self._reduced(there) if _is_plain(there) else there.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if isinstance(obj, torch.TypedStorage):
            storage = obj._untyped_storage  # its public twins warn of their age
            if storage.device.type == "cpu":
                return typed_storage, (self._once(storage), obj.dtype)
        if isinstance(obj, torch.Generator) and is_elsewhere(obj):
            where = f"a random generator of {obj.device}"
            raise pickle.PicklingError(
                f"{where} stays where its device is; send its get_state(), and set_state() it there"
            )
        return super().reducer_override(obj)

    def on_cpu(self, obj: Any) -> Any:
        """A tensor or storage, on the CPU."""
        return obj.cpu()

    def memory_of(self, storage: Any) -> Any:
        """The bytes of an UntypedStorage of the CPU, which live as long as they are looked at."""
        return _memory_of(storage)

    def _once(self, storage: Any) -> Any:
        return self._storages.setdefault(storage._cdata, storage)

    def _reduced(self, tensor: Any) -> Any:
        """What torch's own writes of a plain tensor, in a sixth of the time."""
        place = tensor.storage_offset(), tuple(tensor.size()), tensor.stride()
        return plain_tensor, (self._once(tensor.untyped_storage()), tensor.dtype, *place, tensor.requires_grad)


def _is_plain(tensor: Any) -> bool:
    """Is a tensor of torch's own class all that its storage, sizes and strides say?"""
    return (
        tensor.device.type == "cpu"
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


def dump(value: Any) -> tuple[Pickled, bool]:
    """Pickle `value`; with whether tensors of it have moved to the CPU. Raises what its classes raise."""
    file, buffers = io.BytesIO(), list[pickle.PickleBuffer]()
    pickler = Pickler(file, buffers)
    pickler.dump(value)
    return Pickled([file.getbuffer(), *(buffer.raw() for buffer in buffers)]), pickler.moved


def dump_all(values: dict[str, Any]) -> tuple[dict[str, Pickled], dict[str, str], list[str]]:
    """Pickle each of `values`; returns what they are, the errors, and the names whose tensors moved to the CPU."""
    packed, errors, moved = {}, {}, []
    for name, value in values.items():
        try:
            packed[name], has_moved = dump(value)
        except Exception as error:
            errors[name] = readable(f"{type(error).__name__}: {error}")
            continue
        if has_moved:
            moved.append(name)
    return packed, errors, moved
