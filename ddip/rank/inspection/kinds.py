"""Classify objects and represent them by small values, without running user code."""

from __future__ import annotations

import concurrent.futures
import datetime
import enum
import functools
import itertools
import mmap
import os
import pathlib
import random
import re
import struct
import sys
import threading
import types
import weakref
import zlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.utils.data
import torch.utils.hooks

from ddip.rank.runtime import libraries

HEAP_TYPE = 1 << 9
"""Flag of types that a ``class`` statement created."""
SHORT_TEXT = 64
NUMBERS = (complex, bool, type(None))
LONG_BITS = 1024
"""Limit above which an int is represented by a checksum, as Python may refuse to convert it to text."""
BY_REPR = (
    range,
    slice,
    type(Ellipsis),
    type(NotImplemented),
    torch.dtype,
    torch.device,
    torch.Size,
    torch.layout,
    torch.memory_format,
    datetime.datetime,
    datetime.date,
    datetime.timedelta,
    pathlib.PosixPath,
    pathlib.PurePosixPath,
)
EXACT = {int, float, str, bytes, *NUMBERS, *BY_REPR}
"""Types whose `leaf_value` describes an object completely."""
CODE = (types.FunctionType, types.MemberDescriptorType, types.GetSetDescriptorType, property, classmethod, staticmethod)
WRAPPERS = (staticmethod, classmethod, property, functools.cached_property)
WRAPPED = ("__func__", "fget", "fset", "fdel", "func")
"""Attributes of these wrappers with their functions."""
OPAQUE = (
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.TracebackType,
    types.CoroutineType,
    types.AsyncGeneratorType,
    weakref.ref,
    weakref.ProxyType,
    weakref.CallableProxyType,
    weakref.WeakKeyDictionary,
    weakref.WeakValueDictionary,
    weakref.WeakSet,
    threading.Thread,
    type(threading.Lock()),
    type(threading.RLock()),
    threading.Event,
    threading.Condition,
    concurrent.futures.Future,
    torch.utils.hooks.RemovableHandle,
    property,
    classmethod,
    staticmethod,
    re.Pattern,
)
OPAQUE_MODULES = (
    "IPython",
    "_io",
    "_queue",
    "asyncio",
    "concurrent",
    "ctypes",
    "datasets.table",
    "ddip",
    "inspect",
    "ipykernel",
    "ipywidgets",
    "logging",
    "matplotlib",
    "multiprocessing",
    "pyarrow",
    "queue",
    "select",
    "selectors",
    "socket",
    "ssl",
    "subprocess",
    "threading",
    "torch._C",
    "torch._dynamo",
    "torch._inductor",
    "torch._ops",
    "torch.distributed.device_mesh",
    "torch.distributed.distributed_c10d",
    "torch.fx",
    "tqdm",
    "typing",
    "zmq",
)
"""Modules whose objects hold no training state or differ per process: sockets, pages, progress bars."""
WITH_STATE = (types.ModuleType, types.BuiltinFunctionType, types.CodeType, re.Pattern)
MODULES_WITH_STATE = (
    "_io",
    "_queue",
    "ctypes",
    "_ctypes",
    "datasets",
    "inspect",
    "matplotlib",
    "pyarrow",
    "queue",
    "torch",
    "typing",
)
"""Opaque types, and packages of opaque ones, whose objects may nevertheless hold data of the user's."""
SKIPPED_ATTRIBUTES = {
    "__weakref__",
    "__dict__",
    "__annotations__",
    "__doc__",
    "__module__",
    "__qualname__",
    "__orig_class__",
    "_orig_param_uid",
}


ROLES: tuple[tuple[str, type], ...] = (
    ("optimizer", torch.optim.Optimizer),
    ("scheduler", torch.optim.lr_scheduler.LRScheduler),
    ("scaler", torch.amp.GradScaler),
    ("loader", torch.utils.data.DataLoader),
    ("sampler", torch.utils.data.Sampler),
    ("subset", torch.utils.data.Subset),
)
"""Roles of objects in a training, each with the base class that identifies it."""


class _NoLeaf:
    """The type of `NO_LEAF`, which `leaf_value` returns for an object with parts."""


NO_LEAF = _NoLeaf()
mro_of: Any = type.__dict__["__mro__"].__get__  # type: ignore[attr-defined]
_flags_of: Any = type.__dict__["__flags__"].__get__  # type: ignore[attr-defined]
_dict_of: Any = type.__dict__["__dict__"].__get__  # type: ignore[attr-defined]
_size_of: Any = type.__dict__["__basicsize__"].__get__  # type: ignore[attr-defined]
_item_size_of: Any = type.__dict__["__itemsize__"].__get__  # type: ignore[attr-defined]
_dict_offset_of: Any = type.__dict__["__dictoffset__"].__get__  # type: ignore[attr-defined]
_weak_offset_of: Any = type.__dict__["__weakrefoffset__"].__get__  # type: ignore[attr-defined]
POINTER_BYTES = struct.calcsize("P")


def is_heap_type(kind: type) -> bool:
    """Return whether a ``class`` statement made `kind`."""
    return bool(_flags_of(kind) & HEAP_TYPE)


def instance_dict(value: Any) -> dict[Any, Any] | None:
    """Return the instance dictionary of `value` without running user code; None if it has none.

    A property ``__dict__`` is user code, and counts as no dictionary.
    """
    for kind in mro_of(type(value)):
        found = _dict_of(kind).get("__dict__")
        if found is not None:
            is_real = type(found) in (types.GetSetDescriptorType, types.MemberDescriptorType)
            return found.__get__(value) if is_real else None  # type: ignore[no-any-return]
    return None


def slots_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each slot that has a value."""
    for kind in mro_of(type(value)):
        if is_heap_type(kind):
            for name, found in list(_dict_of(kind).items()):
                if type(found) is types.MemberDescriptorType:
                    try:
                        yield name, found.__get__(value)
                    except AttributeError:
                        continue


def module_name(kind: type) -> str:
    """Return the name of the module that defines `kind`; ``builtins`` if its class does not record one."""
    found = _dict_of(kind).get("__module__")
    return found if type(found) is str else "builtins"


def type_name(kind: type) -> str:
    """Return module and name of `kind`."""
    return f"{module_name(kind)}.{type.__dict__['__qualname__'].__get__(kind)}"  # type: ignore[attr-defined]


def is_user_module(name: Any) -> bool:
    """Return whether the user wrote the module `name`, and it is not part of a library."""
    if name == "__main__":
        return True
    module = sys.modules.get(name) if type(name) is str else None
    path = getattr(module, "__file__", None) if type(module) is types.ModuleType else None
    return isinstance(path, str) and not libraries.is_librarys(path)


def methods_of(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield names and functions of a class that the notebook defines, without those of its bases."""
    if module_name(kind) == "__main__":
        for name, attribute in sorted(_dict_of(kind).items()):
            is_wrapper = isinstance(attribute, WRAPPERS)
            parts = [getattr(attribute, part, None) for part in WRAPPED] if is_wrapper else [attribute]
            yield from ((name, part) for part in parts if isinstance(part, types.FunctionType))


def is_opaque(kind: type, mro: tuple[type, ...]) -> bool:
    """Return whether a walk skips the contents of objects of `kind`."""
    module = module_name(kind)
    return any(base in mro for base in OPAQUE) or any(
        module == name or module.startswith(f"{name}.") for name in OPAQUE_MODULES
    )


def is_iterator(kind: type) -> bool:
    """Return whether objects of `kind` are iterators."""
    return any("__next__" in _dict_of(base) for base in mro_of(kind))


def may_hold_state(kind: type, mro: tuple[type, ...]) -> bool:
    """Return whether objects of an opaque `kind` may hold state that belongs to no process."""
    module = module_name(kind)
    return any(base in mro for base in WITH_STATE) or (
        not any(base in mro for base in OPAQUE) and module.partition(".")[0] in MODULES_WITH_STATE
    )


def has_hidden_state(kind: type, mro: tuple[type, ...]) -> bool:
    """Return whether objects of `kind` have memory besides their dictionary and slots, as types in C have."""
    slots = sum(
        type(found) is types.MemberDescriptorType
        for base in mro
        if "__slots__" in _dict_of(base)
        for found in _dict_of(base).values()
    )
    pointers = slots + (_dict_offset_of(kind) > 0) + (_weak_offset_of(kind) > 0)
    return bool(_item_size_of(kind) or _size_of(kind) > object.__basicsize__ + pointers * POINTER_BYTES)


def role_of(mro: tuple[type, ...]) -> str:
    """Return the role in a training of objects of a type with this `mro`; "" if they have none."""
    return next((role for role, kind in ROLES if kind in mro), "")


def container_base(kind: type) -> Any:
    """Return the class of ``builtins`` or ``collections`` that a class of containers derives from."""
    return next(base for base in mro_of(kind) if base.__module__ in ("builtins", "collections"))


def is_plain_key(key: Any) -> bool:
    """Return whether `key` is equal in all processes: a number, text or enum, but not an ``id()``."""
    kind = type(key)
    if kind is int:
        return bool(abs(key) < 1 << 32)
    return kind in (float, complex, bool, type(None), str, bytes) or enum.Enum in mro_of(kind)


def key_text(key: Any) -> str:
    """Return the text that stands for a plain key in paths, and by which keys are sorted."""
    kind = type(key)
    return f"{kind.__name__}.{(instance_dict(key) or {}).get('_name_')}" if enum.Enum in mro_of(kind) else repr(key)


def leaf_value(value: Any) -> Any:
    """Return a small value for a number, text or constant; `NO_LEAF` for an object with parts."""
    kind = type(value)
    if kind is int:
        return value if value.bit_length() <= LONG_BITS else _checksum_of_int(value)
    if kind in NUMBERS:
        return value
    if kind is float:
        return repr(value)
    mro = mro_of(kind)
    if enum.Enum in mro:
        return f"{kind.__name__}.{(instance_dict(value) or {}).get('_name_')}"
    if str in mro or bytes in mro:
        data = str.encode(value, "utf8", "surrogatepass") if str in mro else bytes(value)
        if len(data) < SHORT_TEXT and str in mro:
            return str.__str__(value)
        return "text", len(data), zlib.crc32(data)
    if kind in BY_REPR:
        return repr(value)
    return NO_LEAF


def _checksum_of_int(value: int) -> tuple[str, int, int]:
    length = value.bit_length()
    return "int", length, zlib.crc32(value.to_bytes(length // 8 + 1, "little", signed=True))


def array_of(value: Any, mro: tuple[type, ...]) -> Any:
    """Return a NumPy array as a plain one without a copy, a NumPy scalar as an array, otherwise None."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if numpy.generic in mro:
        return numpy.array(value)
    return numpy.ndarray.view(value, numpy.ndarray) if numpy.ndarray in mro else None


def is_plain_array(kind: type) -> bool:
    """Return whether type and elements describe a NumPy array of `kind`, or a scalar, completely."""
    numpy = sys.modules["numpy"]
    return kind in (numpy.ndarray, numpy.memmap) or numpy.generic in mro_of(kind)


def is_of_file(array: Any) -> bool:
    """Return whether an array is a memory-mapped file, which may be larger than the memory."""
    numpy = sys.modules["numpy"]
    while numpy.ndarray in mro_of(type(array)):
        array = numpy.ndarray.base.__get__(array)
    return type(array) is mmap.mmap


def generator_state(value: Any, mro: tuple[type, ...]) -> bytes | None:
    """Return the state of a random number generator as bytes, and None for any other object.

    A subclass of ``random.Random``, whose state is unknown, gives b"". Subclasses of NumPy's generators give None.
    """
    if torch.Generator in mro:
        return bytes(value.get_state().tolist())
    if random.Random in mro:
        return repr(random.Random.getstate(value)).encode() if type(value) is random.Random else b""
    numpy = sys.modules.get("numpy.random")
    if numpy is not None and type(value) is numpy.Generator:
        return repr(_without_arrays(value.bit_generator.state)).encode()
    if numpy is not None and type(value) is numpy.RandomState:
        return repr(_without_arrays(value.get_state(legacy=False))).encode()
    return None


def _without_arrays(state: Any) -> Any:
    """Return the state of a NumPy generator with bytes for arrays, whose text may be abbreviated."""
    if isinstance(state, dict):
        return {name: _without_arrays(part) for name, part in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def process_wide() -> list[tuple[str, Any]]:
    """Return the process-wide random number generators, each with its path."""
    found: list[tuple[str, Any]] = [
        ("<random>", random._inst),  # type: ignore[attr-defined]
        ("<torch.random>", torch.default_generator),
    ]
    if "numpy.random" in sys.modules:
        found.append(("<numpy.random>", sys.modules["numpy.random"].mtrand._rand))
    if torch.cuda.is_initialized():
        found += [(f"<torch.cuda.random {n}>", gpu) for n, gpu in enumerate(torch.cuda.default_generators)]
    return found


_user_modules: set[str] = set()
"""Names of the modules that the user wrote, among those that `_judge_new_modules` has looked at."""
_newest_judged = ""
"""Name of the newest module that it has looked at."""


def _judge_new_modules() -> None:
    """Find the user's modules among those imported since the last call.

    ``sys.modules`` is in the order of imports. Called before each fork: then a new rank does not look at the thousands
    of modules of the preload process, which would copy the pages that they are on.
    """
    global _newest_judged
    names, count = list[str](), 8
    while len(names) < len(sys.modules) and _newest_judged not in names:
        names = list(itertools.islice(reversed(sys.modules), count))  # in one step, while no other thread imports
        count *= 8
    new = names[: names.index(_newest_judged)] if _newest_judged in names else names
    _user_modules.update(n for n in new if n not in ("__main__", "__mp_main__") and is_user_module(n))
    _newest_judged = names[0]


os.register_at_fork(before=_judge_new_modules)


def user_modules() -> list[tuple[str, types.ModuleType]]:
    """Return the imported modules that the user wrote, as pairs of name and module, sorted by name."""
    _judge_new_modules()
    return [(name, sys.modules[name]) for name in sorted(_user_modules) if name in sys.modules]


def local_part(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of a DTensor; None for any other tensor."""
    if not module_name(type(tensor)).startswith("torch.distributed"):
        return None
    for name, value in slots_of(tensor):
        if name == "_local_tensor":
            return value  # type: ignore[no-any-return]
    found: torch.Tensor | None = (instance_dict(tensor) or {}).get("_local_tensor")
    return found


PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))  # Buffer: torch 2.5


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory can be read; False for subclasses with ``__torch_dispatch__``."""
    kind = type(tensor)
    return kind in PLAIN_TENSORS or "__torch_dispatch__" not in {
        name for base in mro_of(kind)[:-2] for name in _dict_of(base) if base not in (torch.Tensor, torch._C.TensorBase)
    }


def is_strided(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's memory can be read, and has one stride per dimension."""
    return is_plain(tensor) and tensor.layout is torch.strided and not tensor.is_nested and tensor.device.type != "meta"


def is_readable_number(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a single number on the CPU, such as a step count."""
    return bool(
        tensor.numel() == 1
        and tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and is_plain(tensor)
        and tensor.untyped_storage().nbytes()
    )
