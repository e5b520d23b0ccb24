"""Digest objects by their own pickle, without their bytes: for objects that a walk cannot look into.

Ranks without an equal digest may have equal objects, for instance sets in another order; the reverse is in practice
impossible. Tensors count by the fingerprint of their memory, functions and classes of the notebook by their code.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import pickle
import types
from typing import Any, TypeAlias, cast

import torch

from ddip.protocol.objects import definitions, pickling
from ddip.rank.inspection import kinds
from ddip.rank.saves.save_pickler import SavePickler
from ddip.sharded.copies import fingerprint_of

Fingerprint: TypeAlias = "tuple[int, bytes | tuple[int, int]]"
"""Size of a storage in bytes, and a hash of its contents."""
WALKED = (torch.nn.Module, torch.nn.Parameter, torch.Generator, torch.distributed.ProcessGroup)
"""Objects that hold more than their pickle tells, or whose attributes may differ between ranks."""


class Fingerprints:
    """Fingerprints of the contents of storages, each computed once."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.UntypedStorage, Fingerprint]] = {}
        """By the storage's ``_cdata``, with the storage, so that another one does not get the same."""

    def of(self, storage: torch.UntypedStorage) -> Fingerprint:
        """Return the size of a storage and the fingerprint of its bytes."""
        if storage._cdata not in self._known:
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            self._known[storage._cdata] = storage, (len(flat), fingerprint_of(flat))
        return self._known[storage._cdata][1]


def digest_of(value: Any, prints: Fingerprints) -> str | None:
    """Return a digest of any object; None if it cannot be pickled, so that no save has it."""
    if type(value) in (set, frozenset):
        is_plain = kinds.EXACT.issuperset(map(type, value))
        texts = [repr(item) if is_plain else digest_of(item, prints) for item in value]
        return None if None in texts else digest_of(sorted(cast("list[str]", texts)), prints)
    with contextlib.suppress(Exception):
        digest, size = _DigestPickler(prints).digest(value)  # it depends on which of equal objects are one
        with contextlib.suppress(Exception):  # such as cycles
            digest, _ = _DigestPickler(prints, most=_most_bytes(size)).digest(value)
        return digest
    return None


def digest_of_items(items: Any, prints: Fingerprints) -> str | None:
    """Return a digest of a long container of data; None if it has models, parameters or cycles."""
    with contextlib.suppress(Exception):
        _, size = _DigestPickler(prints, only_data=True).digest(items)
        return _DigestPickler(prints, only_data=True, most=_most_bytes(size)).digest(items)[0]
    return None


def _most_bytes(size: int) -> int:
    """Return the limit of a pickle without a memo, which repeats shared objects.

    `size`: size in bytes of the same pickle with a memo.
    """
    return 8 * size + (1 << 20)


def code_of(value: types.FunctionType | type) -> list[tuple[str, str | None]]:
    """Return digests of the code of a function, or of the methods of a notebook's class and its bases."""
    if isinstance(value, types.FunctionType):
        return [("", definitions.compute_digest(value.__code__))]
    return [(name, definitions.compute_digest(method.__code__)) for name, method in _methods_of(value)]


def _methods_of(kind: type) -> list[tuple[str, types.FunctionType]]:
    """Return the functions of a notebook's class and of its bases, with their names."""
    bases = kinds.mro_of(kind)
    return [(f"{base.__qualname__}.{name}", method) for base in bases for name, method in kinds.methods_of(base)]


def _stand_in(*facts: Any) -> None:
    """Stand in pickles for an object with these facts."""


class _Hash:
    """A file that keeps only a hash of what is written to it, and the size."""

    def __init__(self, most: int | None) -> None:
        self.hash, self.size, self._most = hashlib.blake2b(digest_size=16), 0, most

    def write(self, data: Any) -> int:
        """Add bytes to the hash; raise PicklingError above the limit."""
        size = memoryview(data).nbytes
        self.size += size
        if self._most is not None and self.size > self._most:
            raise pickle.PicklingError("it is too large")
        self.hash.update(data)
        return size


class _DigestPickler(SavePickler):
    """Pickles one value; without a memo if there is a limit of bytes, `most`."""

    def __init__(self, prints: Fingerprints, only_data: bool = False, most: int | None = None) -> None:
        self._hash = _Hash(most)
        super().__init__(cast(io.BytesIO, self._hash), None, {}, {})  # type: ignore[arg-type]
        self.fast = most is not None
        self._prints, self._only_data = prints, only_data
        self._classes = set[int]()
        """Ids of the classes that the pickle has."""

    def digest(self, value: Any) -> tuple[str, int]:
        """Pickle `value`; return the digest and the size of the pickle in bytes."""
        self.dump(value)
        return self._hash.hash.hexdigest(), self._hash.size

    def reducer_override(self, obj: Any) -> Any:
        if obj is _stand_in:
            return NotImplemented
        if type(obj) is torch.Tensor and not obj.requires_grad and pickling.is_plain_tensor(obj):
            return _stand_in, (str(obj.dtype), pickling.place_of(obj), self._prints.of(obj.untyped_storage()))
        is_walked = isinstance(obj, WALKED) or (isinstance(obj, torch.Tensor) and obj.requires_grad)
        if self._only_data and (is_walked or kinds.role_of(kinds.mro_of(type(obj)))):
            raise pickle.PicklingError("a walk compares it")
        if isinstance(obj, torch.TypedStorage):
            return _stand_in, (str(obj.dtype), self._prints.of(obj._untyped_storage))
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            return _stand_in, (self._prints.of(obj),)
        if isinstance(obj, (type, types.FunctionType)) and definitions.is_importable(obj):
            return _stand_in, (obj.__module__, obj.__qualname__)
        if isinstance(obj, types.FunctionType):  # without its globals, which are variables of their own
            parts = obj.__closure__, obj.__defaults__, obj.__kwdefaults__, vars(obj)
            return _stand_in, (obj.__qualname__, definitions.compute_digest(obj.__code__), *parts)
        if isinstance(obj, type):
            if id(obj) in self._classes:  # methods may refer to their class
                return _stand_in, (kinds.type_name(obj),)
            self._classes.add(id(obj))
            return _stand_in, (kinds.type_name(obj), definitions.compute_digest(obj) or _methods_of(obj))
        return super().reducer_override(obj)
