"""What a rank writes: sent soon, not sent where nobody looks, and of a flood only the beginning and the end.

ipykernel hands text to a thread that sends it every so often. What is done here is done in that thread, so that a loop
of prints costs what it costs in a notebook's own kernel.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import groupby
from typing import Any

from ipykernel.iostream import OutStream
from ipykernel.zmqshell import ZMQDisplayPublisher
from tornado.ioloop import IOLoop

from ddip.rank.streams import cell_log
from ddip.rank.streams.limiter import Chunk, OutputLimiter
from ddip.rank.streams.pipes import Pipe, Pipes, Written

DESCRIPTORS = {"stdout": 1, "stderr": 2}
PAUSE_SECONDS = 10e-6
"""After a pause between two writes something else may have written; within a loop of prints nobody looks."""
REST_SECONDS = 0.002
"""After which a pipe is looked at again that had little in it."""
ORDER_SECONDS = 1.0
"""How long a write waits at most until what was written elsewhere before it has been read."""
CELLS = 50
"""Cells whose budgets are kept, for what their threads write later."""

_cell: ContextVar[dict[str, Any]] = ContextVar("ddip_cell")
"""Header of the request whose output this is: of a task, the one in which it was made."""


class _OfThreads:
    """Whoever starts a thread is its cell: ipykernel would take the cell that runs when the thread writes."""

    _latest: dict[str, Any] = {}

    @property
    def parent_header(self) -> dict[str, Any]:
        try:
            return _cell.get()
        except LookupError:
            return getattr(threading.current_thread(), "ddip_cell", None) or self._latest

    @parent_header.setter
    def parent_header(self, value: dict[str, Any]) -> None:
        _cell.set(value)
        self._latest = value


class RankStream(_OfThreads, OutStream):  # type: ignore[misc]
    """stdout or stderr of a rank."""

    flush_interval = 0.04
    _writer: RankStream | None = None
    """Which of the two was written to last; of both."""
    _line: deque[tuple[RankStream, dict[str, Any], str]] = deque()
    """What was written to one before the other was written to, in order; of both."""
    _streams: dict[int, RankStream] = {}
    """By their descriptors."""
    _in_order = threading.RLock()
    """Held while others' writes are put behind those of this process: both are looked at at one moment; of both."""
    _pipes: Pipes
    """What others write; of both."""
    _wrote = 0.0
    """When it was written to last; not of both, since to change a class costs all that is looked up there next."""
    last_text = ""
    """The end of what was sent last, or would be if somebody looked: perhaps a progress bar; of both."""
    flushing = False
    """Does the output thread send what was written? Of both, and set before it takes that. All that was to leave before
    has left, since that thread does one after the other."""
    _timed = False
    """Will the output thread look soon?"""
    _process = 0
    """In what a cell has forked: its pid. Asked with each write, and quicker than to ask the system."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """ipykernel reads descriptors in a thread for each, with blocking reads: after the cell's end, perhaps."""
        super().__init__(*args, watchfd=False, **kwargs)
        first = not RankStream._streams
        if first:
            RankStream._pipes = Pipes()
            os.register_at_fork(after_in_child=lambda: setattr(RankStream, "_process", os.getpid()))
        self._number = DESCRIPTORS[self.name]
        RankStream._streams[self._number] = self
        descriptor = self._pipes.watch(self._number)
        self._original_stdstream_copy = descriptor.log
        for pipe in [self._pipes.records] * first + [descriptor]:
            self.pub_thread.schedule(partial(self._watch, pipe))

    def write(self, string: str) -> int:
        """What the other stream still holds was written before, and leaves before: whichever is flushed first.

        A process that a cell has forked has no thread that sends: this rank does it.
        """
        if self._process:
            self._pipes.records.write(self._number, self._process, self.parent_header.get("msg_id", ""), string)
            return len(string)
        now = time.monotonic()
        if now > self._wrote + PAUSE_SECONDS:
            self._wait_for_others()
        self._wrote = now
        with self._in_order:
            before = RankStream._writer
            if before is not self:
                RankStream._writer = self
                if before is not None:
                    before._line_up()
            super().write(string)
        self._flush_soon()
        return len(string)

    def _schedule_flush(self) -> None:
        """Not within ipykernel's `write`: this waits while the output thread's queue is full, which would wait for the
        order that is held there."""

    def _flush_soon(self) -> None:
        """The output thread is woken up once for an interval, not for each line of a loop that flushes them."""
        if not self._flush_pending:
            self._flush_pending = True
            if not self._timed:
                self._timed = True
                self.pub_thread.schedule(self._wait_an_interval)

    def _wait_an_interval(self) -> None:
        self._io_loop.call_later(self.flush_interval, self._flush_in_turn)

    def _flush_in_turn(self) -> None:
        self._timed = False  # before the look: what is written from here on asks again
        if self._flush_pending:
            self.pub_thread.schedule(self._flush)

    def _wait_for_others(self) -> None:
        """What has been written elsewhere until now goes before what is written here next."""
        thread = self.pub_thread.thread
        if thread is not threading.current_thread() and thread.is_alive() and self._pipes.has_come():
            taken = threading.Event()
            self.pub_thread.schedule(self._take_soon)
            self.pub_thread.schedule(taken.set)
            taken.wait(ORDER_SECONDS)

    def _watch(self, pipe: Pipe) -> None:
        """In the output thread: look when something comes. It does not wake up for each word that a process writes."""

        def come(*_: Any) -> None:
            self._take_soon()
            if not pipe.was_full:
                self._io_loop.remove_handler(pipe.reads)
                self._io_loop.call_later(REST_SECONDS, self._watch, pipe)

        self._io_loop.add_handler(pipe.reads, come, IOLoop.READ)

    def _take_soon(self) -> None:
        """In the output thread: something has been written elsewhere; it is sent with the next flush."""
        self._take()
        if not self._flush_pending:
            self._flush_pending = True
            self._wait_an_interval()

    def _take(self) -> None:
        """Line up what others have written, behind what this process has written before."""
        with self._in_order:
            for written in self._pipes.take():
                writer = RankStream._writer
                own = [] if writer is None else [(writer, parent, text) for parent, text in writer._flush_buffers()]
                if own:
                    self._line_up_begun()
                    self._line.extend(own)
                self._line.append(self._attributed(written))

    def _line_up_begun(self) -> None:
        """Lines that others have not ended: they came before what this process has in its buffers."""
        self._line.extend(map(self._attributed, self._pipes.rest()))

    def _attributed(self, written: Written) -> tuple[RankStream, dict[str, Any], str]:
        """To the cell that forked its writer; what comes by a descriptor to the one that runs, or ran last."""
        stream = self._streams[written.stream]
        if written.request is None:
            return stream, stream._latest, written.text
        return stream, stream._headers.get(written.request, {"msg_id": written.request}), written.text

    def _line_up(self) -> None:
        self._line.extend((self, parent, text) for parent, text in self._flush_buffers())

    def close(self) -> None:
        """A cell that closes it has written all that it wants to; the next one writes here, too."""
        self.flush()

    def begin_cell(self, header: dict[str, Any], limit: int) -> None:
        """The cell of the request with this header may show `limit` characters; 0: nobody looks."""
        RankStream.last_text = ""
        self._headers[header["msg_id"]], self._budgets[header["msg_id"]] = header, OutputLimiter(limit)
        if len(self._budgets) > CELLS:
            oldest = next(iter(self._budgets))
            del self._headers[oldest], self._budgets[oldest]

    def has_rest(self, header: dict[str, Any]) -> bool:
        """Is there an end of what the cell wrote that has not been sent?"""
        return self._budgets[header["msg_id"]].rest() is not None

    def end_cell(self, header: dict[str, Any]) -> None:
        """Send it with the next flush."""
        self._ended.append(header)
        if getattr(sys, self.name) is not self:
            self.pub_thread.schedule(self._flush)

    @cached_property
    def _budgets(self) -> dict[str, OutputLimiter]:
        return {}

    @cached_property
    def _headers(self) -> dict[str, dict[str, Any]]:
        return {}

    @cached_property
    def _ended(self) -> deque[dict[str, Any]]:
        return deque()

    def flush(self) -> None:
        """A turn of the output thread, where there is something to be sent and somebody looks: a loop may ask for it
        with each line that it prints."""
        budget = self._budgets.get(self.parent_header.get("msg_id", ""))
        if budget is None or budget.limit:
            self.flush_all()

    def flush_all(self) -> None:
        """The same, also of what nobody looks at."""
        thread = self.pub_thread.thread
        if self._process or self.is_quiet():
            return
        if thread is threading.current_thread() or not thread.is_alive():
            self._flush()
            return
        sent = threading.Event()
        self.pub_thread.schedule(partial(self._flush_for, sent))
        sent.wait(self.flush_timeout)

    def _flush_for(self, sent: threading.Event) -> None:
        """For who waits: if the rank ends right after, nothing is lost."""
        try:
            self._flush()
        finally:
            sent.set()

    @classmethod
    def is_quiet(cls) -> bool:
        """Has all that was written until now been sent? Of both."""
        with cls._in_order:  # what has been taken from a pipe is in the line
            streams = list(cls._streams.values())
            begun = any(one._flush_pending or one._ended for one in streams) or cls._line or cls.flushing
            return not begun and not cls._pipes.has_come() and not cls._pipes.has_begun()

    def _flush(self) -> None:
        if not self._is_master_process():
            return  # what the buffers hold is the parent's, which sends it
        RankStream.flushing = True
        try:
            self._flush_both()
        finally:
            RankStream.flushing = False

    def _flush_both(self) -> None:
        self._flush_pending = False
        self._subprocess_flush_pending = False
        self._take()
        self._line_up_begun()
        self._line_up()
        for (stream, _), texts in groupby(self._popped(), key=lambda one: (one[0], one[1].get("msg_id"))):
            found = list(texts)
            stream._show("".join(text for _, _, text in found), found[0][1])
        while self._ended:
            header = self._ended.popleft()
            rest = self._budgets[header["msg_id"]].rest()
            if rest is not None:
                self._send(rest, header)

    def _popped(self) -> Iterator[tuple[RankStream, dict[str, Any], str]]:
        for _ in range(len(self._line)):
            yield self._line.popleft()

    def _show(self, text: str, parent: dict[str, Any]) -> None:
        cell_log.write(parent.get("msg_id", ""), text)
        RankStream.last_text = text[-300:]
        budget = self._budgets.get(parent.get("msg_id", ""))
        if budget is None:
            self._send(Chunk(text), parent)
        elif budget.limit:
            piece = budget.take(text)
            if piece is not None:
                self._send(piece, parent)

    def _send(self, piece: Chunk, parent: dict[str, Any]) -> None:
        if piece.breaks:
            self._send(Chunk("\n"), parent)
        if not piece.text:
            return
        content = {"name": self.name, "text": piece.text}
        if piece.line is not None:
            content.update(line=piece.line, cut=piece.cut)
        self.session.send(self.pub_thread, self.session.msg("stream", content, parent=parent), ident=self.topic)


class RankDisplay(_OfThreads, ZMQDisplayPublisher):  # type: ignore[misc]
    """What a rank displays."""

    def _flush_streams(self) -> None:
        """What was written before is above it, also where something has taken the place of `sys.stdout` that keeps a
        flush to itself, as that of rich does while it draws a bar."""
        super()._flush_streams()
        last = RankStream._writer  # what the other one held has left before
        if last is not None and last not in (sys.stdout, sys.stderr):
            last.flush()

    def publish(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "<progress" in data.get("text/html", ""):  # as fastprogress shows it
            RankStream.last_text = data["text/html"][-300:].replace("\n", " ")
        super().publish(data, *args, **kwargs)


def threads_belong_to_their_cells() -> None:
    """From here on each thread knows the cell in which it was started, and so do the threads that it starts."""
    start = threading.Thread.start

    def start_in_cell(self: threading.Thread) -> None:
        self.ddip_cell = getattr(sys.stdout, "parent_header", None)  # type: ignore[attr-defined]
        start(self)

    threading.Thread.start = start_in_cell  # type: ignore[method-assign]
