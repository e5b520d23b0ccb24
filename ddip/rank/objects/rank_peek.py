"""What the namespace of this rank holds at this moment, for the notebook, while a cell runs.

    a thread of its own    take  -->  pickle  -->  shared memory  -->  the answer; what is large stays
    control thread         part of what stays, for who cannot read that memory
                           drop  -->  what stays is let go of, and who still pickles gives up

The cell waits meanwhile, between two of its steps: no operator writes to a tensor while it is copied. If the main
thread is inside a long operation, such as a collective, no one waits for its end: the memory is copied until two
copies are equal, and the notebook says that the operation may have written a part of it.

Of tensors and arrays the pickle has the address: the system copies from there, which fails where a cell has given that
memory back, and does no harm. A container that has changed under the pickler is tried again.
"""

from __future__ import annotations

import collections
import copy
import errno
import io
import mmap
import pickle
import re
import threading
import time
from collections.abc import Collection
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed

from ddip.protocol.location import StackLocation
from ddip.protocol.objects import pickling, shared
from ddip.protocol.objects.pickling import Graph, Pickled
from ddip.protocol.objects.shared import SharedBytes
from ddip.protocol.reports import Peeked
from ddip.protocol.text import readable
from ddip.rank import namespace
from ddip.rank.native.pending_calls import Pause
from ddip.rank.native.thread_exceptions import raise_in
from ddip.rank.objects import rank_transfer
from ddip.rank.runtime import libraries, stacks
from ddip.rank.runtime.gpu import Gpu, gpu
from ddip.rank.runtime.housekeeping import cells

ATTEMPTS = 20
"""At an object that changes while it is pickled."""
MOVE_SECONDS = 0.01
"""Between the two copies: a thread that this one has taken the core of gets on with what it writes."""
PICKLE_SECONDS = 1.0
"""For which the cell waits until objects are pickled, whose code may hang; for memory it waits until that is copied."""
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
        self.along: list[str] = []
        """What functions read, and the notebook does not know."""
        self.shares: list[str] = []
        """What belongs to a variable that stays."""
        self.name = ""
        """Of the variable that is pickled now."""
        self.inside = ""
        """The operation of the main thread that may have written to memory while that was copied."""
        self._in_pickle = False
        """Does code of the objects' own run? An exception may be raised in it."""

    def pickled(
        self, found: dict[str, Any], known: Collection[str]
    ) -> tuple[dict[str, Pickled], dict[str, SharedBytes | bytearray], list[str]]:
        """The variables as they are now: the pickles, where they lie, and names whose tensors have moved to the CPU."""
        for _ in range(ATTEMPTS):
            pause = Pause(lambda: self.given_up, PICKLE_SECONDS)
            try:
                return self._pickled(found, known, pause)
            except (RuntimeError, Changed) as error:
                if not isinstance(error, Changed) and not _CHANGED.search(str(error)):
                    raise
                last = str(error)  # and no traceback, whose frames have what was pickled
            finally:
                pause.end()
        raise Changed(
            f"{last} ({ATTEMPTS} times): the cell changes it all the time; keep a copy of it in the cell now and then"
        )

    def _pickled(
        self, found: dict[str, Any], known: Collection[str], pause: Pause
    ) -> tuple[dict[str, Pickled], dict[str, SharedBytes | bytearray], list[str]]:
        runs = cells.busy and not cells.doing
        if runs:
            pause.begin()
        graph = Graph(lambda file, buffers: _Pickler(self, file, buffers))
        copies = {id(value): copy.copy(value) for value in found.values() if type(value) in _COPIED}
        moved = [name for name, value in found.items() if self._add(graph, name, copies.get(id(value), value))]
        self.along, done = [], {*found, *known}
        while new := graph.pickler.find_globals(done):
            done.update(new)
            self.along += new
            moved += [name for name in new if self._add(graph, name, graph.pickler.globals[name])]
        pickled, lies = graph.pickled(), dict[str, SharedBytes | bytearray]()
        try:
            is_safe = not runs or pause.prolong()
            for self.name in pickled:
                lies[self.name] = self._laid(pickled[self.name])
            if graph.pickler.is_stale():
                raise Changed("a tensor of it has changed size")
            if runs and graph.pickler.has_memory:
                time.sleep(MOVE_SECONDS)
            for self.name in pickled:
                if not self._is_still(pickled[self.name], lies[self.name]) or graph.pickler.has_changed():
                    if not runs or pause.prolong():
                        raise RuntimeError(
                            "another thread writes to a tensor of it; keep a copy of it there now and then"
                        )
                    raise Changed("a tensor of it was written to while it was copied")
            sent = {*map(id, found.values()), *(id(graph.pickler.globals[name]) for name in self.along)}
            self.shares = pickling.find_shares(graph, sent, dict(namespace()))
            self.inside = "" if is_safe or not graph.pickler.has_memory else str(StackLocation(**stacks.here()))
        except BaseException:
            for there in lies.values():
                _close(there)
            raise
        return pickled, lies, moved

    def _add(self, graph: Graph[_Pickler], name: str, value: Any) -> bool:
        with _lock:
            self.ensure_wanted()
            self.name, self._in_pickle = name, True
        try:
            return graph.add(name, value)
        finally:
            with _lock:
                self._in_pickle = False
                raise_in(self.thread, None)  # it may be under way

    def _laid(self, pickled: Pickled) -> SharedBytes | bytearray:
        try:
            there = SharedBytes()
        except OSError:  # not on Linux
            return pickled.joined()
        try:
            for portion in shared.portions(pickled.pieces(), rank_transfer.AT_ONCE):
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

    def _is_still(self, pickled: Pickled, there: SharedBytes | bytearray) -> bool:
        """Copy the memory once more, in parts; return whether it is what lies `there`."""
        if isinstance(there, bytearray):
            return there == pickled.joined()
        begin, laid, second = 0, there.view(), None
        with SharedBytes() as again:
            for portion in shared.portions(pickled.pieces(), rank_transfer.AT_ONCE):
                self.ensure_wanted()
                again.rewind()
                again.write(portion)
                second = second or again.view()  # the first portion is the longest
                size = sum(piece.nbytes for piece in portion)
                if not _are_equal(laid, begin, second, size):
                    return False
                begin += size
        return True

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
            raise_in(self.thread, GivenUp)
        if frame is not None and frame.f_code is Gpu.copied.__code__:
            return StackLocation(inner="a copy from the GPU")
        return StackLocation() if frame is None or frame.f_code.co_filename == __file__ else place


class _Pickler(pickling.Pickler):
    """That of a peek, which can be given up, and knows what it has the addresses of."""

    def __init__(self, peek: Peek, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, buffers)
        self._peek = peek
        self._addresses: list[tuple[Any, int, int]] = []
        self._small: list[tuple[Any, bytearray]] = []
        """Memory that is in the pickle itself, and what it was."""

    @property
    def has_memory(self) -> bool:
        """Whether the memory of a tensor was pickled."""
        return bool(self._addresses)

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
        memory = super().memory_of(storage)
        if not 0 < storage.nbytes() < pickling.INLINE:
            return memory
        self._small.append((memory, bytearray(memory)))
        return self._small[-1][1]

    def has_changed(self) -> bool:
        """Return whether memory that is in the pickle itself has been written to since."""
        return any(copied != memory for memory, copied in self._small)

    def is_stale(self) -> bool:
        """Is a storage not any more where it was?"""
        return any((its.data_ptr(), its.nbytes()) != (address, size) for its, address, size in self._addresses)


def _are_equal(laid: mmap.mmap, begin: int, second: mmap.mmap, size: int) -> bool:
    """Compare without the interpreter, and without a copy."""
    first = torch.frombuffer(laid, dtype=torch.uint8, count=size, offset=begin)
    return torch.equal(first, torch.frombuffer(second, dtype=torch.uint8, count=size))


def _close(there: SharedBytes | bytearray) -> None:
    if isinstance(there, SharedBytes):
        there.close()


def take(number: int, names: list[str], most: int, known: list[str]) -> Peeked:
    """Pickle `names` as they are now, beside the cell that may run; with errors by name, and the missing names.

    What is longer than `most` bytes stays here until `drop`, in memory that processes of this host can read, or for
    `part`.
    """
    try:
        peek = _begin(number)
        try:
            return _take(peek, names, most, known)
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


def _take(peek: Peek, names: list[str], most: int, known: list[str]) -> Peeked:
    here = namespace()
    found = {name: value for name in names if (value := here.get(name, _MISSING)) is not _MISSING}  # in one step each
    told: Peeked = {
        "values": {},
        "sizes": [],
        "paths": {},
        "errors": {},
        "missing": [name for name in names if name not in found],
        "moved": [],
        "along": [],
        "shares": [],
        "wrappers": {name: kind for name, value in found.items() if (kind := rank_transfer.wrapper_of(value))},
        "busy": cells.busy and not cells.doing,
        "inside": "",
    }
    if told["missing"]:
        return told
    try:
        pickled, lies, told["moved"] = peek.pickled(found, known)
        told["inside"] = peek.inside
    except Exception as error:
        told["errors"][peek.name] = readable(f"{type(error).__name__}: {error}")
        return told
    told["along"], told["shares"] = peek.along, peek.shares
    try:
        for name, there in lies.items():
            told["sizes"].append((name, pickled[name].sizes))
            if pickled[name].size > most:
                peek.keep(name, there)
                told["paths"].update({name: there.path} if isinstance(there, SharedBytes) else {})
            elif isinstance(there, SharedBytes):
                with there:
                    told["values"][name] = bytearray(there.view())
            else:
                told["values"][name] = there
    except BaseException:
        for there in lies.values():
            _close(there)
        raise
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
