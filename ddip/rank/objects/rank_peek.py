"""Copy variables of this rank for the notebook while a cell runs (``%dipull --now``).

    own thread        take_peek     -->  pickle  -->  shared memory  -->  answer; large pickles stay on the rank
    control thread    part_of_peek  -->  a part of a stored pickle, for a notebook that cannot read the shared memory
                      drop_peek     -->  free stored pickles, and abandon a running pickling

The main thread pauses between two bytecodes of the cell, so no operator writes to a tensor while it is copied. If it is
inside a long operation, such as a collective, the peek does not wait for the operation to end: it copies the memory
until two copies are equal, and the notebook says that the operation may have written a part of it.

The pickle refers to the memory of tensors and arrays by address, and the kernel copies from there. That copy fails
without harm if the cell has freed the memory. If a container changes while it is pickled, the peek tries again.
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
from ddip.protocol.text import escape_surrogates
from ddip.rank import current_variables
from ddip.rank.native.pending_calls import Pause
from ddip.rank.native.thread_exceptions import raise_in
from ddip.rank.objects import rank_transfer
from ddip.rank.runtime import libraries, stacks
from ddip.rank.runtime.gpu import Gpu, gpu
from ddip.rank.runtime.housekeeping import cells

ATTEMPTS = 20
"""Tries at pickling an object that changes meanwhile."""
MOVE_SECONDS = 0.01
"""Pause between the two copies, so that a thread whose core this one took can continue its write."""
PICKLE_SECONDS = 1.0
"""Limit of the cell's pause for pickling, as objects' code may hang; the copying of memory has no limit."""
MOST_AT_ONCE = 8
"""Limit of concurrent peeks: one that was abandoned and never returns occupies its thread indefinitely."""
_CHANGED = re.compile("(changed size|changed|mutated) during iteration")
"""Errors of Python's containers that change during an iteration."""
_COPIED = (list, dict, set, collections.deque, collections.defaultdict, collections.OrderedDict, collections.Counter)
"""Containers to copy if they have changed while they were pickled. The copy is one step of the interpreter, which other
threads cannot interrupt, but other containers would hold the original."""

NO_MORE = StackLocation(state="finished")
"""Location of a pickling that has ended or has not begun."""

_lock = threading.Lock()
_peeks: dict[int, Peek] = {}
"""Peeks that are pickling or have stored pickles, by the notebook's number for them."""
_pickling: set[Peek] = set()
"""Peeks that are still pickling, including abandoned ones."""
_dropped: collections.deque[int] = collections.deque(maxlen=100)
"""Numbers of peeks that were dropped before their thread began."""


class PeekAbandoned(BaseException):
    """The request timed out, so its pickling must end."""


class ObjectChanged(Exception):
    """An object changed while it was pickled."""


class Peek:
    """One request for the current values of some variables."""

    def __init__(self) -> None:
        self.given_up = False
        self.stored: dict[str, SharedBytes | bytearray] = {}
        self.thread = threading.get_ident()
        self.along: list[str] = []
        """Names that pickled functions read and the notebook does not have."""
        self.shares: list[str] = []
        """Relations to variables that are not sent: ``opt holds parameters of net``."""
        self.name = ""
        """Variable that is being pickled."""
        self.inside = ""
        """Operation of the main thread that may have written to tensors while they were copied; usually empty."""
        self._in_pickle = False
        """True while the pickled objects' own code may run, which an exception may end."""

    def pickled(
        self, found: dict[str, Any], known: Collection[str]
    ) -> tuple[dict[str, Pickled], dict[str, SharedBytes | bytearray], list[str]]:
        """Pickle the current values of `found` and copy them into memory that the caller must close.

        Globals that functions read come along unless in `known`. Returns the pickles and memories by name, and the
        names whose tensors were copied to the CPU; sets `along`, `shares`, `inside`. Raises ObjectChanged after
        `ATTEMPTS` changed tries, PeekAbandoned if the request timed out, and any other error of pickling.
        """
        for attempt in range(ATTEMPTS):
            pause = Pause(lambda: self.given_up, PICKLE_SECONDS)
            try:
                return self._pickle_once(found, known, pause, uses_copies=attempt > 0)
            except (RuntimeError, ObjectChanged) as error:
                if not isinstance(error, ObjectChanged) and not _CHANGED.search(str(error)):
                    raise
                last = str(error)  # not the error: its traceback's frames hold the pickled objects
            finally:
                pause.end()
        raise ObjectChanged(
            f"{last} ({ATTEMPTS} times): the cell changes it all the time; keep a copy of it in the cell now and then"
        )

    def _pickle_once(
        self, found: dict[str, Any], known: Collection[str], pause: Pause, uses_copies: bool
    ) -> tuple[dict[str, Pickled], dict[str, SharedBytes | bytearray], list[str]]:
        is_cell_running = cells.busy and not cells.doing
        if is_cell_running:
            pause.begin()
        graph = Graph(lambda file, buffers: _Pickler(self, file, buffers))
        containers = [value for value in found.values() if type(value) in _COPIED]
        before = [_ids_of_items(container) for container in containers]
        copies = {id(container): copy.copy(container) for container in containers if uses_copies}
        moved = [name for name, value in found.items() if self._add_to_graph(graph, name, copies.get(id(value), value))]
        if not uses_copies and before != [_ids_of_items(container) for container in containers]:
            raise ObjectChanged("a container changed")
        self.along, known_names = [], {*found, *known}
        while new_names := graph.pickler.find_globals(known_names):
            known_names.update(new_names)
            self.along += new_names
            moved += [name for name in new_names if self._add_to_graph(graph, name, graph.pickler.globals[name])]
        pickled, memory = graph.pickled(), dict[str, SharedBytes | bytearray]()
        try:
            is_safe = not is_cell_running or pause.prolong()
            for self.name in pickled:
                memory[self.name] = self._store_pickle(pickled[self.name])
            if graph.pickler.is_stale():
                raise ObjectChanged("a tensor in it has changed size")
            if is_cell_running and graph.pickler.has_memory:
                time.sleep(MOVE_SECONDS)
            for self.name in pickled:
                if not self._is_unchanged(pickled[self.name], memory[self.name]) or graph.pickler.has_changed():
                    if not is_cell_running or pause.prolong():
                        raise RuntimeError(
                            "another thread writes to a tensor in it; keep a copy of it there now and then"
                        )
                    raise ObjectChanged("a tensor in it was written to during the copy")
            sent = {**found, **{name: graph.pickler.globals[name] for name in self.along}}
            self.shares = pickling.find_shares(graph, sent, current_variables())
            self.inside = (
                "" if is_safe or not graph.pickler.has_memory else str(StackLocation(**stacks.main_thread_location()))
            )
        except BaseException:
            for stored in memory.values():
                _close_memory(stored)
            raise
        return pickled, memory, moved

    def _add_to_graph(self, graph: Graph[_Pickler], name: str, value: Any) -> bool:
        with _lock:
            self.ensure_wanted()
            self.name, self._in_pickle = name, True
        try:
            return graph.add(name, value)
        finally:
            with _lock:
                self._in_pickle = False
                raise_in(self.thread, None)  # drop an exception that is already on its way

    def _store_pickle(self, pickled: Pickled) -> SharedBytes | bytearray:
        try:
            memory = SharedBytes()
        except OSError:  # not on Linux
            return pickled.joined()
        try:
            for portion in shared.split_portions(pickled.pieces(), rank_transfer.AT_ONCE):
                self.ensure_wanted()
                memory.write(portion)
        except OSError as error:
            memory.close()
            if error.errno == errno.EFAULT:
                raise ObjectChanged("the memory of a tensor in it was freed") from None
            raise
        except BaseException:
            memory.close()
            raise
        return memory

    def _is_unchanged(self, pickled: Pickled, memory: SharedBytes | bytearray) -> bool:
        """Copy the pickled memory again, in parts; return whether it equals the first copy in `memory`."""
        if isinstance(memory, bytearray):
            return memory == pickled.joined()
        begin, first_copy, second_copy = 0, memory.view(), None
        with SharedBytes() as buffer:
            for portion in shared.split_portions(pickled.pieces(), rank_transfer.AT_ONCE):
                self.ensure_wanted()
                buffer.rewind()
                buffer.write(portion)
                second_copy = second_copy or buffer.view()  # the first portion is the longest
                size = sum(piece.nbytes for piece in portion)
                if not _are_equal(first_copy, begin, second_copy, size):
                    return False
                begin += size
        return True

    def ensure_wanted(self) -> None:
        """Raise PeekAbandoned if the notebook has dropped this peek."""
        if self.given_up:
            raise PeekAbandoned

    def keep(self, name: str, memory: SharedBytes | bytearray) -> None:
        """Store the pickle of `name` until the peek is dropped; raise PeekAbandoned if it has been."""
        with _lock:
            if self.given_up:
                _close_memory(memory)
                raise PeekAbandoned
            self.stored[name] = memory

    def forget(self) -> None:
        """Free all stored pickles."""
        for memory in self.stored.values():
            _close_memory(memory)
        self.stored.clear()

    def give_up(self) -> StackLocation:
        """Free stored pickles and end a running pickling; call this on the control thread.

        Raises PeekAbandoned in the pickling thread if that runs objects' code, outside of libraries and `with`
        statements. Returns the location of the pickling: `NO_MORE` if it has ended, an empty one inside this module.
        """
        self.given_up = True
        self.forget()
        if self not in _pickling:
            return NO_MORE
        frame, location = stacks.of_thread(self.thread)
        if self._in_pickle and not libraries.library_in(frame) and libraries.call_of_with(frame) is None:
            raise_in(self.thread, PeekAbandoned)
        if frame is not None and frame.f_code is Gpu.copied.__code__:
            return StackLocation(inner="a copy from the GPU")
        return StackLocation() if frame is None or frame.f_code.co_filename == __file__ else location


class _Pickler(pickling.Pickler):
    """A pickler that can be abandoned, and that records which memory the pickle refers to."""

    def __init__(self, peek: Peek, file: io.BytesIO, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(file, buffers)
        self._peek = peek
        self._addresses: list[tuple[Any, int, int]] = []
        self._small: list[tuple[Any, bytearray]] = []
        """Small memory that is in the pickle itself, each with the copy that was pickled."""

    @property
    def has_memory(self) -> bool:
        """True if the pickle has the memory of a tensor."""
        return bool(self._addresses)

    def persistent_id(self, obj: Any) -> None:
        """Raise PeekAbandoned if the peek was abandoned; pickle calls this for each object.

        As this is Python code, other threads get their turn; pickle otherwise keeps the interpreter lock.
        """
        if self._peek.given_up:
            raise PeekAbandoned

    def on_cpu(self, obj: Any) -> Any:
        """Return a tensor or storage, copied from the GPU if it is there."""
        return gpu.copied(obj) if pickling.is_elsewhere(obj) else obj

    def memory_of(self, storage: Any) -> Any:
        """Return the bytes of an UntypedStorage on the CPU, and record its address; small ones are copied now."""
        self._addresses.append((storage, storage.data_ptr(), storage.nbytes()))
        memory = super().memory_of(storage)
        if not 0 < storage.nbytes() < pickling.INLINE:
            return memory
        self._small.append((memory, bytearray(memory)))
        return self._small[-1][1]

    def has_changed(self) -> bool:
        """Return whether a small storage was written to after its bytes were pickled."""
        return any(copied != memory for memory, copied in self._small)

    def is_stale(self) -> bool:
        """Return whether a storage has moved or changed its size since it was pickled."""
        return any(
            (storage.data_ptr(), storage.nbytes()) != (address, size) for storage, address, size in self._addresses
        )


def _ids_of_items(container: Any) -> list[int]:
    """Return the ids of the items of a container, and of the values of a dictionary."""
    return [*map(id, container), *map(id, container.values() if isinstance(container, dict) else ())]


def _are_equal(first_copy: mmap.mmap, begin: int, second_copy: mmap.mmap, size: int) -> bool:
    """Compare memory without a copy and without holding the interpreter lock."""
    first = torch.frombuffer(first_copy, dtype=torch.uint8, count=size, offset=begin)
    return torch.equal(first, torch.frombuffer(second_copy, dtype=torch.uint8, count=size))


def _close_memory(memory: SharedBytes | bytearray) -> None:
    if isinstance(memory, SharedBytes):
        memory.close()


def take_peek(number: int, names: list[str], most: int, known: str) -> Peeked:
    """Pickle the current values of `names`, even while a cell runs; return the pickles, or what failed.

    If a name is missing, or a value cannot be pickled, there are no values. `number` identifies the request for
    `part_of_peek` and `drop_peek`: until then, pickles longer than `most` bytes stay on the rank, in shared memory of
    this host or for `part_of_peek`. The names in `known`, separated by spaces, are not sent along with functions that
    read them. Raises RuntimeError if the request timed out.
    """
    try:
        peek = _begin_peek(number)
        try:
            return _pickle_names(peek, names, most, known)
        except BaseException:
            peek.given_up = True
            raise
        finally:
            _end_peek(number, peek)
    except PeekAbandoned:
        raise RuntimeError("the request timed out") from None


def _begin_peek(number: int) -> Peek:
    peek = Peek()
    with _lock:
        if number in _dropped:
            raise PeekAbandoned
        if len(_pickling) >= MOST_AT_ONCE:
            locations = {str(stacks.of_thread(running.thread)[1]) for running in _pickling}
            raise RuntimeError(f"{MOST_AT_ONCE} former ones have not ended: {'; '.join(sorted(locations))}")
        _peeks[number] = peek
        _pickling.add(peek)
    return peek


def _end_peek(number: int, peek: Peek) -> None:
    with _lock:
        _pickling.discard(peek)
        if peek.given_up or not peek.stored:
            _peeks.pop(number, None)
            peek.forget()


def _pickle_names(peek: Peek, names: list[str], most: int, known: str) -> Peeked:
    variables = current_variables()
    found = {name: variables[name] for name in names if name in variables}
    answer: Peeked = {
        "values": {},
        "sizes": [],
        "paths": {},
        "errors": {},
        "missing": [name for name in names if name not in found],
        "moved": [],
        "along": [],
        "shares": [],
        "wrappers": {name: kind for name, value in found.items() if (kind := rank_transfer.wrapper_of(value))},
        "inside": "",
    }
    if answer["missing"]:
        return answer
    try:
        pickled, stored, answer["moved"] = peek.pickled(found, known.split())
        answer["inside"] = peek.inside
    except Exception as error:
        answer["errors"][peek.name] = escape_surrogates(f"{type(error).__name__}: {error}")
        return answer
    answer["along"], answer["shares"] = peek.along, peek.shares
    try:
        for name, memory in stored.items():
            answer["sizes"].append((name, pickled[name].sizes))
            if pickled[name].size > most:
                peek.keep(name, memory)
                answer["paths"].update({name: memory.path} if isinstance(memory, SharedBytes) else {})
            elif isinstance(memory, SharedBytes):
                with memory:
                    answer["values"][name] = bytearray(memory.view())
            else:
                answer["values"][name] = memory
    except BaseException:
        for memory in stored.values():
            _close_memory(memory)
        raise
    return answer


def part_of_peek(number: int, name: str, begin: int, end: int) -> bytes:
    """Return the bytes from `begin` to `end` of the pickle of `name` that the peek `number` stores.

    Raises KeyError if the peek was dropped.
    """
    memory = _peeks[number].stored[name]
    return bytes((memory.view() if isinstance(memory, SharedBytes) else memory)[begin:end])


def drop_peek(number: int) -> dict[str, Any]:
    """End and free the peek with this `number`; return the `StackLocation` of its pickling as a dict."""
    with _lock:
        peek = _peeks.pop(number, None)
        if peek is None:
            _dropped.append(number)
        return asdict(NO_MORE if peek is None else peek.give_up())
