"""What the namespace of this rank holds at this moment, for the notebook, while a cell runs.

    a thread of its own    take  -->  pickle  -->  shared memory  -->  the answer; what is large stays
    control thread         part of what stays, for who cannot read that memory
                           drop  -->  what stays is let go of, and who still pickles gives up

The cell goes on meanwhile, and may change what is pickled. Of tensors and arrays the pickle has the address: the system
copies from there, which fails where a cell has given that memory back, and does no harm. A container that has changed
under the pickler is tried again.
"""

from __future__ import annotations

import collections
import copy
import ctypes
import errno
import io
import pickle
import re
import threading
from dataclasses import asdict
from typing import Any

from ddip.protocol import pickling, shared
from ddip.protocol.location import StackLocation
from ddip.protocol.pickling import Pickled
from ddip.protocol.reports import Peeked
from ddip.protocol.shared import SharedBytes
from ddip.protocol.text import readable
from ddip.rank import libraries, namespace, stacks, transfer
from ddip.rank.gpu import Gpu, gpu
from ddip.rank.housekeeping import cells

ATTEMPTS = 20
"""At an object that changes while it is pickled."""
MOST_AT_ONCE = 8
"""That may pickle: each that was given up, and does not end, has a thread for good."""
_CHANGED = re.compile("(changed size|changed|mutated) during iteration")
"""What Python's containers say to an iterator."""
_COPIED = (list, dict, set, collections.deque, collections.defaultdict, collections.OrderedDict, collections.Counter)
"""Copied before they are pickled: in one step of the interpreter, in which no other thread can change them."""

NO_MORE = StackLocation(state="finished")
"""Where a pickling is that has ended, or has not begun."""

_MISSING = object()
_lock = threading.Lock()
_peeks: dict[int, Peek] = {}
"""Those that pickle, or of which something stays, by the number that the notebook has given them."""
_pickling: set[Peek] = set()
"""Those that pickle, also when they were given up."""
_dropped: collections.deque[int] = collections.deque(maxlen=100)
"""Numbers of those that were dropped before their thread had begun."""


class GivenUp(BaseException):
    """Nobody waits any more."""


class Changed(Exception):
    """An object has changed while it was pickled."""


class Peek:
    """One, of some names."""

    def __init__(self) -> None:
        self.given_up = False
        self.stays: dict[str, SharedBytes | bytearray] = {}
        self.thread = threading.get_ident()
        self._in_pickle = False
        """Does code of the objects' own run? An exception may be raised in it."""

    def pickled(self, value: Any) -> tuple[Pickled, SharedBytes | bytearray, bool]:
        """`value` as it is now: the pickle, where all of it lies, and whether tensors of it have moved to the CPU."""
        for _ in range(ATTEMPTS):
            try:
                return self._pickled(value)
            except (RuntimeError, Changed) as error:
                if not isinstance(error, Changed) and not _CHANGED.search(str(error)):
                    raise
                last = str(error)  # and no traceback, whose frames have what was pickled
        raise Changed(
            f"{last} ({ATTEMPTS} times): the cell changes it all the time; keep a copy of it in the cell now and then"
        )

    def _pickled(self, value: Any) -> tuple[Pickled, SharedBytes | bytearray, bool]:
        buffers: list[pickle.PickleBuffer] = []
        pickler = _Pickler(self, file := io.BytesIO(), buffers)
        self._dump(pickler, copy.copy(value) if type(value) in _COPIED else value)
        pickled = Pickled([file.getbuffer(), *(buffer.raw() for buffer in buffers)])
        lies = self._laid(pickled)
        if pickler.is_stale():
            _close(lies)
            raise Changed("a tensor of it has changed size")
        return pickled, lies, pickler.moved

    def _dump(self, pickler: _Pickler, value: Any) -> None:
        with _lock:
            self.ensure_wanted()
            self._in_pickle = True
        try:
            pickler.dump(value)
        finally:
            with _lock:
                self._in_pickle = False
                _raise_in(self.thread, None)  # it may be under way

    def _laid(self, pickled: Pickled) -> SharedBytes | bytearray:
        try:
            there = SharedBytes()
        except OSError:  # not on Linux
            return pickled.joined()
        try:
            for portion in shared.portions(pickled.pieces(), transfer.AT_ONCE):
                self.ensure_wanted()
                there.write(portion)
        except OSError as error:
            there.close()
            if error.errno == errno.EFAULT:
                raise Changed("the memory of a tensor of it was given back") from None
            raise
        except BaseException:
            there.close()
            raise
        return there

    def ensure_wanted(self) -> None:
        """Raise GivenUp if nobody waits any more."""
        if self.given_up:
            raise GivenUp

    def keep(self, name: str, there: SharedBytes | bytearray) -> None:
        """Until it is dropped."""
        with _lock:
            if self.given_up:
                _close(there)
                raise GivenUp
            self.stays[name] = there

    def forget(self) -> None:
        """Let go of what stays."""
        for there in self.stays.values():
            _close(there)
        self.stays.clear()

    def give_up(self) -> StackLocation:
        """On the control thread: let go of what stays; returns where the pickling is, if it has not ended: nowhere in
        particular for what is only large. In Python code it ends now, if that is no library's import and the like."""
        self.given_up = True
        self.forget()
        if self not in _pickling:
            return NO_MORE
        frame, place = stacks.of_thread(self.thread)
        if self._in_pickle and not libraries.library_in(frame) and libraries.call_of_with(frame) is None:
            _raise_in(self.thread, GivenUp)
        if frame is not None and frame.f_code is Gpu.copied.__code__:
            return StackLocation(inner="a copy from the GPU")
        return StackLocation() if frame is None or frame.f_code.co_filename == __file__ else place


class _Pickler(pickling.Pickler):
    """That of a peek, which can be given up, and knows what it has the addresses of."""

    def __init__(self, peek: Peek, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, buffers)
        self._peek = peek
        self._addresses: list[tuple[Any, int, int]] = []

    def persistent_id(self, obj: Any) -> None:
        """Called with each object. As it is Python code, other threads get their turn: pickle holds the interpreter."""
        if self._peek.given_up:
            raise GivenUp

    def on_cpu(self, obj: Any) -> Any:
        """A tensor or storage, on the CPU."""
        return gpu.copied(obj) if pickling.is_elsewhere(obj) else obj

    def memory_of(self, storage: Any) -> Any:
        """The bytes of an UntypedStorage of the CPU."""
        self._addresses.append((storage, storage.data_ptr(), storage.nbytes()))
        return super().memory_of(storage)

    def is_stale(self) -> bool:
        """Is a storage not any more where it was?"""
        return any((its.data_ptr(), its.nbytes()) != (address, size) for its, address, size in self._addresses)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Have `thread` raise it before its next step in Python code; None: nothing any more."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )


def _close(there: SharedBytes | bytearray) -> None:
    if isinstance(there, SharedBytes):
        there.close()


def take(number: int, names: list[str], most: int) -> Peeked:
    """Pickle `names` as they are now, beside the cell that may run; with errors by name, and the missing names.

    What is longer than `most` bytes stays here until `drop`, in memory that processes of this host can read, or for
    `part`.
    """
    try:
        peek = _begin(number)
        try:
            return _take(peek, names, most)
        except BaseException:
            peek.given_up = True
            raise
        finally:
            _end(number, peek)
    except GivenUp:
        raise RuntimeError("nobody waits for this any more") from None


def _begin(number: int) -> Peek:
    peek = Peek()
    with _lock:
        if number in _dropped:
            raise GivenUp
        if len(_pickling) >= MOST_AT_ONCE:
            places = {str(stacks.of_thread(other.thread)[1]) for other in _pickling}
            raise RuntimeError(f"{MOST_AT_ONCE} former ones have not ended: {'; '.join(sorted(places))}")
        _peeks[number] = peek
        _pickling.add(peek)
    return peek


def _end(number: int, peek: Peek) -> None:
    with _lock:
        _pickling.discard(peek)
        if peek.given_up or not peek.stays:
            _peeks.pop(number, None)
            peek.forget()


def _take(peek: Peek, names: list[str], most: int) -> Peeked:
    here = namespace()
    found = {name: value for name in names if (value := here.get(name, _MISSING)) is not _MISSING}  # in one step each
    told: Peeked = {
        "values": {},
        "sizes": {},
        "paths": {},
        "errors": {},
        "missing": [name for name in names if name not in found],
        "moved": [],
        "wrappers": {name: kind for name, value in found.items() if (kind := transfer.wrapper_of(value))},
        "busy": cells.busy and not cells.doing,
    }
    for name, value in found.items() if not told["missing"] else ():
        try:
            pickled, lies, moved = peek.pickled(value)
        except Exception as error:
            told["errors"][name] = readable(f"{type(error).__name__}: {error}")
            continue
        told["sizes"][name] = pickled.sizes
        if moved:
            told["moved"].append(name)
        if pickled.size > most:
            peek.keep(name, lies)
            told["paths"].update({name: lies.path} if isinstance(lies, SharedBytes) else {})
        elif isinstance(lies, SharedBytes):
            with lies:
                told["values"][name] = bytearray(lies.view())
        else:
            told["values"][name] = lies
    if told["errors"]:  # nothing is taken
        peek.forget()
        told["values"], told["sizes"], told["paths"] = {}, {}, {}
    return told


def part(number: int, name: str, begin: int, end: int) -> bytes:
    """The bytes from `begin` to `end` of what stays."""
    there = _peeks[number].stays[name]
    return bytes((there.view() if isinstance(there, SharedBytes) else there)[begin:end])


def drop(number: int) -> dict[str, Any]:
    """The notebook wants no more of this one; returns the `StackLocation` of the pickling, as a dict."""
    with _lock:
        peek = _peeks.pop(number, None)
        if peek is None:
            _dropped.append(number)
        return asdict(NO_MORE if peek is None else peek.give_up())
