"""Pipes that collect output not written by this process' own Python code.

    forked processes            -- records ------>  one pipe
    C code, other programs      -- bytes -------->  one pipe in place of descriptor 1, and one in place of 2
                                                      |
    the output thread reads them when data arrives, and before it sends the rank's own output

A forked process has no output thread, and it may have been forked while another thread held some lock. So it takes no
locks: it writes one record per write, in one system call, which is atomic even if others write at the same time or the
process is killed.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import select
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

HEAD = struct.Struct("=HBIB")
"""Head of a record: its size in bytes, stream, process id, size of the request id; request id and text follow."""
CHARACTER_BYTES = 6
"""Maximum size of an encoded character: a lone surrogate is written as ``\\udc80``."""
READ_BYTES = 65_536
"""Size of a read: the capacity of a pipe, so that one read returns everything that was written before it."""
LINE_CHARACTERS = 1_000
"""Length from which an incomplete line is passed on without waiting for its end."""
LOG_BYTES = 1_000_000
"""Size from which a rank's log of descriptor output is truncated and begun again."""


class ProcessText(NamedTuple):
    """Text that a process has written to a stream."""

    writer: int
    """PID of the process; 0 if unknown, since it wrote to the descriptor."""
    stream: int
    """Descriptor of the stream, 1 or 2."""
    request: str | None
    """Request id of the cell that forked the process; None if unknown."""
    text: str


@dataclass
class Lines:
    """A buffer that joins the writes of each process to lines, since ``print`` writes a line in parts."""

    _incomplete: dict[int, ProcessText] = field(default_factory=dict)
    """Incomplete lines, by PID, or by the negative number of the descriptor."""

    def add(self, new: ProcessText) -> Iterator[ProcessText]:
        """Add `new`; yield the text that can be shown now, and keep an incomplete line for the next call.

        An incomplete line is yielded if it exceeds LINE_CHARACTERS, or if its process continues on another stream or
        for another cell. `new` is added only once the caller iterates.
        """
        key = new.writer or -new.stream
        before = self._incomplete.pop(key, None)
        text = new.text
        if before is not None and (before.stream, before.request) == (new.stream, new.request):
            text = before.text + text
        elif before is not None:
            yield before
        end = max(text.rfind("\n"), text.rfind("\r")) + 1
        if len(text) - end > LINE_CHARACTERS:
            end = len(text)
        if end:
            yield ProcessText(new.writer, new.stream, new.request, text[:end])
        if end < len(text):
            self._incomplete[key] = ProcessText(new.writer, new.stream, new.request, text[end:])

    def __bool__(self) -> bool:
        """Return whether the buffer holds an incomplete line."""
        return bool(self._incomplete)

    def rest(self) -> list[ProcessText]:
        """Remove and return all incomplete lines."""
        incomplete, self._incomplete = self._incomplete, {}
        return list(incomplete.values())


class Pipe:
    """A pipe that this process reads without blocking."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        self.was_full = False
        """True if the last read returned so much that more is probably available at once."""
        os.set_blocking(self.reads, False)

    def read(self) -> bytes:
        """Return the bytes that are available now; never an end of file, since this process can also write."""
        try:
            data = os.read(self.reads, READ_BYTES)
        except OSError:  # empty, or closed by the output thread at its end
            data = b""
        self.was_full = len(data) > READ_BYTES // 2
        return data


class Records(Pipe):
    """A pipe that carries the output of forked processes as records."""

    def __init__(self) -> None:
        super().__init__()
        self._unread = b""

    def write(self, stream: int, writer: int, request: str, text: str) -> None:
        """Write `text` as records, in a forked process; the text is lost if the rank has ended."""
        name = request.encode()[:255]
        size = HEAD.size + len(name)
        step = (select.PIPE_BUF - size) // CHARACTER_BYTES
        with contextlib.suppress(BrokenPipeError):
            for begin in range(0, len(text), step):
                data = text[begin : begin + step].encode("utf-8", "backslashreplace")
                os.write(self.writes, HEAD.pack(size + len(data), stream, writer, len(name)) + name + data)

    def take(self) -> list[ProcessText]:
        """Read the records that have arrived; join consecutive ones of the same process, stream and request."""
        data, begin, found, row, texts = self._unread + self.read(), 0, [], None, list[bytes]()
        while begin + HEAD.size <= len(data):
            size, stream, writer, length = HEAD.unpack_from(data, begin)
            if size < HEAD.size + length or stream not in (1, 2):  # foreign data: the next record cannot be found
                begin = len(data)
                break
            if begin + size > len(data):
                break
            text = begin + HEAD.size + length
            key = writer, stream, data[begin + HEAD.size : text]
            if key != row and row is not None:
                found.append(_join_texts(row, texts))
                texts = []
            row = key
            texts.append(data[text : begin + size])
            begin += size
        self._unread = data[begin:]
        return found if row is None else [*found, _join_texts(row, texts)]


def _join_texts(row: tuple[int, int, bytes], texts: list[bytes]) -> ProcessText:
    writer, stream, request = row
    return ProcessText(writer, stream, request.decode(errors="replace"), b"".join(texts).decode(errors="replace"))


class Descriptor(Pipe):
    """A pipe in place of descriptor 1 or 2 for C code and other programs; its data also goes to the log."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self.log = os.dup(number)
        self._logged = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may be split between two reads
        os.dup2(self.writes, number)

    def take(self) -> list[ProcessText]:
        """Read the text that has arrived, and append it to the log."""
        data = self.read()
        self.append_to_log(data)
        text = self._decoder.decode(data)
        return [ProcessText(0, self._number, None, text)] if text else []

    def append_to_log(self, data: bytes) -> None:
        """Append `data` to the log, truncating it first if it has grown too large."""
        self._logged += len(data)
        with contextlib.suppress(OSError):  # the disk may be full
            if self._logged > LOG_BYTES:
                self._logged = len(data)
                os.ftruncate(self.log, 0)
                os.lseek(self.log, 0, os.SEEK_SET)
            while data:
                data = data[os.write(self.log, data) :]


class Pipes:
    """All pipes of a rank; only its output thread may call `take` and `rest`."""

    def __init__(self) -> None:
        self.records = Records()
        self._pipes: list[Records | Descriptor] = [self.records]
        self._lines = Lines()
        self._poll = select.poll()
        """A poll object for the output thread only, since two threads cannot use one at the same time."""
        self._poll.register(self.records.reads, select.POLLIN)
        os.register_at_fork(after_in_child=self._close_in_child)

    def _close_in_child(self) -> None:
        """Close the read ends in a forked process, which otherwise could block writing after its rank ended."""
        for pipe in self._pipes:
            os.close(pipe.reads)
        self._pipes = []

    def watch(self, number: int) -> Descriptor:
        """Put a pipe in place of descriptor `number`."""
        descriptor = Descriptor(number)
        self._pipes.append(descriptor)
        self._poll.register(descriptor.reads, select.POLLIN)
        return descriptor

    def has_data(self) -> bool:
        """Return whether a pipe has unread data; any thread may call this."""
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe.reads, select.POLLIN)
        return bool(poll.poll(0))

    def has_incomplete(self) -> bool:
        """Return whether an incomplete line has been read."""
        return bool(self._lines)

    def take(self) -> Iterator[ProcessText]:
        """Read all pipes and yield what can be shown now."""
        if not self._poll.poll(0):  # usually; reading each empty pipe takes longer
            return
        for pipe in self._pipes:
            for written in pipe.take():
                yield from self._lines.add(written)

    def rest(self) -> list[ProcessText]:
        """Remove and return all incomplete lines."""
        return self._lines.rest()
