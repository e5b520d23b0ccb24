"""Compare definitions of functions and classes between processes, regardless of file and line."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import sys
import types
import typing
from typing import Any, cast

LEFT_OUT = (
    "__dict__",
    "__weakref__",
    "__slotnames__",
    "__module__",
    "__firstlineno__",
    "__static_attributes__",
    "__annotate_func__",
    "__annotations_cache__",
    "__match_args__",
    "__dataclass_params__",
    "_abc_impl",
)
"""Attributes of a class that Python sets and that do not depend on its definition."""
PLAIN = (type(None), bool, int, float, complex, str, bytes, type(...), type(NotImplemented))
IN_C = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)
WRITTEN = (types.GenericAlias, types.UnionType, type(typing.List[int]), type(typing.Any), typing.TypeVar)  # noqa: UP006


class _Unknown(Exception):
    """A part of a definition cannot be compared."""


def compute_digest(obj: types.FunctionType | types.CodeType | type) -> str | None:
    """Return a digest of a definition, the same in every process; None if a part cannot be compared."""
    try:
        return hashlib.sha256(_object_text(obj, ()).encode(errors="surrogatepass")).hexdigest()
    except (_Unknown, RecursionError):
        return None


def is_importable(obj: type | types.FunctionType) -> bool:
    """Return whether a class or function is found under its name in a module other than ``__main__``."""
    with contextlib.suppress(Exception):
        found = functools.reduce(getattr, obj.__qualname__.split("."), cast(Any, sys.modules[obj.__module__]))
        return obj.__module__ != "__main__" and found is obj
    return False


def _object_text(obj: Any, inside: tuple[Any, ...]) -> str:
    """Return `obj` as text; `inside` are the functions and classes that contain it."""
    if isinstance(obj, PLAIN) and type(obj) in PLAIN:
        return f"{type(obj).__name__} {obj!r}"
    if any(obj is outer for outer in inside):
        return f"again {obj.__qualname__}"
    inside = (*inside, obj) if isinstance(obj, (types.FunctionType, type)) else inside
    return " ".join([type(obj).__name__, *(_object_text(part, inside) for part in _defining_parts(obj))])


def _defining_parts(obj: Any) -> list[Any]:
    """Return the parts that define `obj`; raises _Unknown for a type that cannot be compared."""
    if isinstance(obj, (types.FunctionType, type)):
        if is_importable(obj):
            return [f"{obj.__module__}.{obj.__qualname__}"]
        return _parts_of_class(obj) if isinstance(obj, type) else _parts_of_function(obj)
    if type(obj) in (tuple, list):
        return [len(obj), *obj]
    if type(obj) in (dict, types.MappingProxyType):
        return [len(obj), *(part for item in obj.items() for part in item)]
    if type(obj) in (set, frozenset):
        return [len(obj), *sorted(_object_text(part, ()) for part in obj)]
    if isinstance(obj, enum.Enum):
        return [type(obj).__qualname__, obj.name, obj.value]
    if isinstance(obj, types.CodeType):
        names = obj.co_name, obj.co_names, obj.co_varnames, obj.co_freevars, obj.co_cellvars
        counts = obj.co_argcount, obj.co_posonlyargcount, obj.co_kwonlyargcount, obj.co_flags
        return [names, counts, obj.co_code, obj.co_exceptiontable, obj.co_consts]
    if isinstance(obj, property):
        return [obj.fget, obj.fset, obj.fdel]
    if isinstance(obj, (staticmethod, classmethod)):
        return [obj.__func__]
    if isinstance(obj, functools.cached_property):
        return [obj.func]
    if isinstance(obj, dataclasses.Field):
        return [obj.name, obj.type, obj.default, obj.default_factory, obj.init, obj.kw_only]
    if type(obj).__module__ == dataclasses.__name__:  # MISSING and the like
        return [type(obj).__name__]
    if isinstance(obj, types.ModuleType):
        return [obj.__name__]
    if isinstance(obj, types.BuiltinFunctionType):
        return [obj.__module__, obj.__qualname__, obj.__self__]
    if isinstance(obj, IN_C):
        return [obj.__qualname__]
    if isinstance(obj, WRITTEN):
        return [repr(obj)]
    raise _Unknown


def _parts_of_function(function: types.FunctionType) -> list[Any]:
    try:
        contents = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise _Unknown from None
    return [function.__code__, function.__defaults__, function.__kwdefaults__, contents, vars(function)]


def _parts_of_class(cls: type) -> list[Any]:
    own = {name: value for name, value in vars(cls).items() if name not in LEFT_OUT}
    if isinstance(cls, enum.EnumMeta):  # Python derives the rest from these
        own = {name: value for name, value in own.items() if isinstance(value, types.FunctionType)}
        own["__members__"] = {member.name: member.value for member in cls.__members__.values()}  # type: ignore
        own["_boundary_"] = getattr(cls, "_boundary_", None)
    return [cls.__qualname__, type(cls), cls.__bases__, dict(sorted(own.items()))]
