"""What other writers than this process' own Python code write for a rank: all of it arrives in pipes.

    a forked process            -- records ------>  one pipe
    C code, other programs      -- bytes -------->  a pipe in place of descriptor 1, and one in place of 2
                                                      |
    the output thread reads them, when something comes and before it sends what the rank itself has written

A forked process has no output thread, and may have been forked while another thread held any lock. It takes none: it
writes a record for each write, in one system call that the system does whole or not at all, whoever else writes or
ends it meanwhile.
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
"""Of a record: its bytes, which stream, whose process, bytes of the id of the request; id and text follow."""
A_CHARACTER = 6
"""Bytes that a character takes at most: a lone surrogate is written as ``\\udc80``."""
AT_ONCE = 65_536
"""Bytes read at once: what a pipe holds, so that one read takes all that was written before it."""
LINE = 1_000
"""Characters of a line that is not waited for any longer."""
LOG_BYTES = 1_000_000
"""To which a rank's log may grow by what is written to its descriptors; then it begins anew."""


class Written(NamedTuple):
    """Text that a process has written to a stream."""

    writer: int
    """Its pid; 0: unknown, something wrote to the descriptor."""
    stream: int
    """1 or 2."""
    request: str | None
    """Id of the request for which the cell runs that forked it; None: unknown."""
    text: str


@dataclass
class Lines:
    """Puts the writes of several processes together, line by line: ``print`` writes a line in parts."""

    _begun: dict[int, Written] = field(default_factory=dict)
    """Of each process the line that it writes; of the descriptors, one each."""

    def add(self, new: Written) -> Iterator[Written]:
        """What can be shown now that `new` has come: whole lines, and what the same process began elsewhere."""
        key = new.writer or -new.stream
        before = self._begun.pop(key, None)
        text = new.text
        if before is not None and (before.stream, before.request) == (new.stream, new.request):
            text = before.text + text
        elif before is not None:
            yield before
        end = max(text.rfind("\n"), text.rfind("\r")) + 1
        if len(text) - end > LINE:
            end = len(text)
        if end:
            yield Written(new.writer, new.stream, new.request, text[:end])
        if end < len(text):
            self._begun[key] = Written(new.writer, new.stream, new.request, text[end:])

    def __bool__(self) -> bool:
        """Has a line been begun?"""
        return bool(self._begun)

    def rest(self) -> list[Written]:
        """What has been begun, whole or not."""
        begun, self._begun = self._begun, {}
        return list(begun.values())


class Pipe:
    """The end that this process reads; nobody waits for it."""

    def __init__(self) -> None:
        self.reads, self.writes = os.pipe()
        self.was_full = False
        """Was there so much that more is to be expected at once?"""
        os.set_blocking(self.reads, False)

    def read(self) -> bytes:
        """What is there. This process can always write, so there is no end."""
        try:
            data = os.read(self.reads, AT_ONCE)
        except OSError:  # nothing has come, or the output thread has ended and closed it
            data = b""
        self.was_full = len(data) > AT_ONCE // 2
        return data


class Records(Pipe):
    """From forked processes."""

    def __init__(self) -> None:
        super().__init__()
        self._unread = b""

    def write(self, stream: int, writer: int, request: str, text: str) -> None:
        """In a forked process. What it writes when its rank is no more is lost."""
        name = request.encode()[:255]
        size = HEAD.size + len(name)
        step = (select.PIPE_BUF - size) // A_CHARACTER
        with contextlib.suppress(BrokenPipeError):
            for begin in range(0, len(text), step):
                data = text[begin : begin + step].encode("utf-8", "backslashreplace")
                os.write(self.writes, HEAD.pack(size + len(data), stream, writer, len(name)) + name + data)

    def take(self) -> list[Written]:
        """What has come; what one process wrote in a row is one."""
        data, begin, found, row, texts = self._unread + self.read(), 0, [], None, list[bytes]()
        while begin + HEAD.size <= len(data):
            size, stream, writer, length = HEAD.unpack_from(data, begin)
            if size < HEAD.size + length or stream not in (1, 2):  # not ddip's: nobody knows where the next one begins
                begin = len(data)
                break
            if begin + size > len(data):
                break
            text = begin + HEAD.size + length
            this = writer, stream, data[begin + HEAD.size : text]
            if this != row and row is not None:
                found.append(_written(row, texts))
                texts = []
            row = this
            texts.append(data[text : begin + size])
            begin += size
        self._unread = data[begin:]
        return found if row is None else [*found, _written(row, texts)]


def _written(row: tuple[int, int, bytes], texts: list[bytes]) -> Written:
    writer, stream, request = row
    return Written(writer, stream, request.decode(errors="replace"), b"".join(texts).decode(errors="replace"))


class Descriptor(Pipe):
    """In place of 1 or 2, which C code and other programs write to; the rank's log has it, too."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._number = number
        self.log = os.dup(number)
        self._logged = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two reads
        os.dup2(self.writes, number)

    def take(self) -> list[Written]:
        """What has come."""
        data = self.read()
        with contextlib.suppress(OSError):  # the disk may be full
            self._log(data)
        text = self._decoder.decode(data)
        return [Written(0, self._number, None, text)] if text else []

    def _log(self, data: bytes) -> None:
        self._logged += len(data)
        if self._logged > LOG_BYTES:
            self._logged = len(data)
            os.ftruncate(self.log, 0)
            os.lseek(self.log, 0, os.SEEK_SET)
        while data:
            data = data[os.write(self.log, data) :]


class Pipes:
    """All of a rank's pipes; only its output thread takes from them."""

    def __init__(self) -> None:
        self.records = Records()
        self._pipes: list[Records | Descriptor] = [self.records]
        self._lines = Lines()
        self._poll = select.poll()
        """For the output thread alone: two threads cannot use one at once."""
        self._poll.register(self.records.reads, select.POLLIN)
        os.register_at_fork(after_in_child=self._leave)

    def _leave(self) -> None:
        """In a forked process: as long as it had an end to read, it could wait for ever to write when its rank has
        ended."""
        for pipe in self._pipes:
            os.close(pipe.reads)
        self._pipes = []

    def watch(self, number: int) -> Descriptor:
        """Put a pipe in place of descriptor `number`."""
        descriptor = Descriptor(number)
        self._pipes.append(descriptor)
        self._poll.register(descriptor.reads, select.POLLIN)
        return descriptor

    def has_come(self) -> bool:
        """Has something been written that was not taken? Any thread may ask."""
        poll = select.poll()
        for pipe in self._pipes:
            poll.register(pipe.reads, select.POLLIN)
        return bool(poll.poll(0))

    def has_begun(self) -> bool:
        """Has a line been taken of which the end is missing?"""
        return bool(self._lines)

    def take(self) -> Iterator[Written]:
        """What can be shown of what has come."""
        if not self._poll.poll(0):  # as a rule; to read each pipe in vain takes longer
            return
        for pipe in self._pipes:
            for written in pipe.take():
                yield from self._lines.add(written)

    def rest(self) -> list[Written]:
        """Lines that have been begun."""
        return self._lines.rest()
