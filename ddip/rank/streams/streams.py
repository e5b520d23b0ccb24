"""stdout, stderr and displays of a rank: text is sent within 40 ms, cut if it is a flood, or discarded if unwanted.

ipykernel hands text to an output thread that sends it at intervals. Limiting and ordering also happen in that thread,
so that a loop of prints costs no more than in the notebook's own kernel.
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
from typing import TYPE_CHECKING, Any

from ipykernel.iostream import OutStream
from ipykernel.zmqshell import ZMQDisplayPublisher
from tornado.ioloop import IOLoop

from ddip.protocol.old_versions import RequestBuffers
from ddip.rank.streams import cell_log
from ddip.rank.streams.limiter import Chunk, OutputLimiter
from ddip.rank.streams.pipes import Pipe, Pipes, ProcessText

DESCRIPTORS = {"stdout": 1, "stderr": 2}
PAUSE_SECONDS = 10e-6
"""Pause between two writes after which the pipes are checked for other output; a loop of prints skips the check."""
POLL_SECONDS = 0.002
"""Delay before a pipe that had little data is watched again."""
ORDER_SECONDS = 1.0
"""Maximum time that a write waits for earlier output of other writers to be read."""
HIDDEN_CHARACTERS = 8_000
"""Characters kept of the text that the notebook does not show."""
MAX_LIMITERS = 50
"""Number of last cells whose limiters are kept for output that their threads write later."""

_current_header: ContextVar[dict[str, Any]] = ContextVar("ddip_cell")
"""Header of the request to which output belongs; an asyncio task inherits that of its creator."""


class _CellOutput:
    """A mixin that attributes a thread's output to the cell that started the thread.

    ipykernel would attribute it to the cell that runs when the thread writes.
    """

    _latest_header: dict[str, Any] = {}

    @property
    def parent_header(self) -> dict[str, Any]:
        try:
            return _current_header.get()
        except LookupError:
            return getattr(threading.current_thread(), "ddip_cell", None) or self._latest_header

    @parent_header.setter
    def parent_header(self, value: dict[str, Any]) -> None:
        _current_header.set(value)
        self._latest_header = value


class _BufferedStream(RequestBuffers, OutStream):  # type: ignore[misc]
    """ipykernel's stream before 6.29."""


if TYPE_CHECKING or hasattr(OutStream, "_flush_buffers"):  # noqa: SIM108  # as an expression, mypy takes it for a value
    _Stream = OutStream
else:
    _Stream = _BufferedStream


class RankStream(_CellOutput, _Stream):  # type: ignore[misc]
    """stdout or stderr of a rank."""

    flush_interval = 0.04
    _last_writer: RankStream | None = None
    """The stream that was written to last; shared by both streams."""
    _queue: deque[tuple[RankStream, dict[str, Any], str]] = deque()
    """Text to be sent, in order: stream, header of the cell's request, text; shared by both streams."""
    _streams: dict[int, RankStream] = {}
    """Both streams, by their descriptors."""
    _order_lock = threading.RLock()
    """Held while output of other writers is queued behind that of this process; shared by both streams."""
    _pipes: Pipes
    """Pipes with the output of other writers; shared by both streams."""
    _last_write = 0.0
    """Time of the last write; per stream, since assigning a class attribute invalidates Python's lookup caches."""
    last_text = ""
    """End of the text that was sent or discarded last, which may be a progress bar; shared by both streams."""
    hidden_text = ""
    """End of the text of the current cell if the notebook does not show this rank; shared by both streams."""
    flushing = False
    """True while the output thread flushes, set before it takes the text; shared by both streams.

    Messages that were scheduled earlier have been sent by then, since that thread does one thing after the other.
    """
    _is_timer_set = False
    """True while the output thread has a timer for the next flush of this stream."""
    _forked_pid = 0
    """PID of this process if a cell forked it, otherwise 0; faster to read with each write than ``os.getpid``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Create the stream and put a pipe in place of its descriptor.

        ipykernel's own descriptor threads are not used: their blocking reads may deliver text after the cell's end.
        """
        super().__init__(*args, watchfd=False, **kwargs)
        first = not RankStream._streams
        if first:
            RankStream._pipes = Pipes()
            os.register_at_fork(after_in_child=lambda: setattr(RankStream, "_forked_pid", os.getpid()))
        self._number = DESCRIPTORS[self.name]
        RankStream._streams[self._number] = self
        self._descriptor = self._pipes.watch(self._number)
        self._original_stdstream_copy = self._descriptor.log
        for pipe in [self._pipes.records] * first + [self._descriptor]:
            self.pub_thread.schedule(partial(self._watch_pipe, pipe))

    def write(self, string: str) -> int:
        """Write text for the output thread to send, after all text written before it to either stream.

        A process that a cell has forked has no output thread, so its text goes through a pipe to the rank.
        """
        if self._forked_pid:
            self._pipes.records.write(self._number, self._forked_pid, self.parent_header.get("msg_id", ""), string)
            return len(string)
        now = time.monotonic()
        if now > self._last_write + PAUSE_SECONDS:
            self._wait_for_external()
        self._last_write = now
        with self._order_lock:
            before = RankStream._last_writer
            if before is not self:
                RankStream._last_writer = self
                if before is not None:
                    before._queue_own()
            super().write(string)
        self._flush_soon()
        return len(string)

    def _schedule_flush(self) -> None:
        """Do nothing within ipykernel's `write`, which holds `_order_lock`; `_flush_soon` schedules the flush.

        Scheduling blocks while the output thread's queue is full, and that thread may wait for the lock.
        """

    def _flush_soon(self) -> None:
        """Schedule a flush after `flush_interval`, waking up the output thread at most once per interval."""
        if not self._flush_pending:
            self._flush_pending = True
            if not self._is_timer_set:
                self._is_timer_set = True
                self.pub_thread.schedule(self._start_timer)

    def _start_timer(self) -> None:
        self._io_loop.call_later(self.flush_interval, self._on_timer)

    def _on_timer(self) -> None:
        self._is_timer_set = False  # cleared first, so that a write from now on schedules another flush
        if self._flush_pending:
            self.pub_thread.schedule(self._flush)

    def _wait_for_external(self) -> None:
        """Wait until the output thread has queued other writers' output, so that it precedes the next write."""
        thread = self.pub_thread.thread
        if thread is not threading.current_thread() and thread.is_alive() and self._pipes.has_data():
            queued = threading.Event()
            self.pub_thread.schedule(self._queue_external_soon)
            self.pub_thread.schedule(queued.set)
            queued.wait(ORDER_SECONDS)

    def _watch_pipe(self, pipe: Pipe) -> None:
        """Read `pipe` whenever it has data, on the output thread, with short pauses to batch small writes."""

        def on_data(*_: Any) -> None:
            self._queue_external_soon()
            if not pipe.was_full:
                self._io_loop.remove_handler(pipe.reads)
                self._io_loop.call_later(POLL_SECONDS, self._watch_pipe, pipe)

        self._io_loop.add_handler(pipe.reads, on_data, IOLoop.READ)

    def _queue_external_soon(self) -> None:
        """Queue the output of other writers, on the output thread, and have the next flush send it."""
        self._queue_external()
        if not self._flush_pending:
            self._flush_pending = True
            self._start_timer()

    def _queue_external(self) -> None:
        """Queue output of subprocesses and C code, after the Python output that was written before it."""
        with self._order_lock:
            for written in self._pipes.take():
                writer = RankStream._last_writer
                own = [] if writer is None else [(writer, parent, text) for parent, text in writer._flush_buffers()]
                if own:
                    self._queue_incomplete()
                    self._queue.extend(own)
                self._queue.append(self._attribute(written))

    def _queue_incomplete(self) -> None:
        """Queue other writers' incomplete lines, which were written before the text in this process's buffers."""
        self._queue.extend(map(self._attribute, self._pipes.rest()))

    def _attribute(self, written: ProcessText) -> tuple[RankStream, dict[str, Any], str]:
        """Return `written` as a queue entry of its cell.

        That is the cell that forked the writer, or the latest cell for text from a descriptor.
        """
        stream = self._streams[written.stream]
        if written.request is None:
            return stream, stream._latest_header, written.text
        return stream, stream._headers.get(written.request, {"msg_id": written.request}), written.text

    def _queue_own(self) -> None:
        self._queue.extend((self, parent, text) for parent, text in self._flush_buffers())

    def close(self) -> None:
        """Flush, but stay open, since the next cell writes to the same stream."""
        self.flush()

    def _flush_buffers(self) -> Iterator[tuple[dict[str, Any], str]]:
        """Take this process's own text out of the buffers, and yield it by request.

        Hidden text is also logged, for the report if the process dies.
        """
        for header, text in super()._flush_buffers():
            if self._is_hidden(header):
                self._descriptor.append_to_log(text[-HIDDEN_CHARACTERS:].encode("utf-8", "backslashreplace"))
            yield header, text

    def begin_cell(self, header: dict[str, Any], limit: int) -> None:
        """Begin the cell of the request `header`, which may show `limit` characters; 0 discards its text."""
        RankStream.last_text = RankStream.hidden_text = ""
        self._headers[header["msg_id"]], self._limiters[header["msg_id"]] = header, OutputLimiter(limit)
        if len(self._limiters) > MAX_LIMITERS:
            oldest = next(iter(self._limiters))
            del self._headers[oldest], self._limiters[oldest]

    def has_rest(self, header: dict[str, Any]) -> bool:
        """Return whether the tail of the cell's text has not been sent."""
        return self._limiters[header["msg_id"]].rest() is not None

    def end_cell(self, header: dict[str, Any]) -> None:
        """Have the next flush send the tail of the cell's text, if the output limit has held it back."""
        self._ended_cells.append(header)
        if getattr(sys, self.name) is not self:
            self.pub_thread.schedule(self._flush)

    @cached_property
    def _limiters(self) -> dict[str, OutputLimiter]:
        return {}

    @cached_property
    def _headers(self) -> dict[str, dict[str, Any]]:
        return {}

    @cached_property
    def _ended_cells(self) -> deque[dict[str, Any]]:
        return deque()

    def flush(self) -> None:
        """Wait until the output thread has sent all text; if the text of this cell is hidden, only log it.

        A loop may call this with each line that it prints.
        """
        if not self._is_hidden(self.parent_header):
            self.flush_all()
        elif not self._forked_pid:
            with self._order_lock:
                self._queue_own()

    def _is_hidden(self, header: dict[str, Any]) -> bool:
        """Return whether the notebook does not show the text of the cell with this `header` of its request."""
        limiter = self._limiters.get(header.get("msg_id", ""))
        return limiter is not None and not limiter.limit

    def flush_all(self) -> None:
        """Wait until the output thread has processed all text, including text that is discarded."""
        thread = self.pub_thread.thread
        if self._forked_pid or self.is_quiet():
            return
        if thread is threading.current_thread() or not thread.is_alive():
            self._flush()
            return
        sent = threading.Event()
        self.pub_thread.schedule(partial(self._flush_and_notify, sent))
        sent.wait(self.flush_timeout)

    def _flush_and_notify(self, sent: threading.Event) -> None:
        """Flush on the output thread, then set `sent` for the thread that waits in `flush_all`."""
        try:
            self._flush()
        finally:
            sent.set()

    @classmethod
    def is_quiet(cls) -> bool:
        """Return whether all text written so far, to either stream or by other writers, has been sent."""
        with cls._order_lock:  # data that was read from a pipe is in the queue
            streams = list(cls._streams.values())
            pending = any(stream._flush_pending or stream._ended_cells for stream in streams)
            busy = pending or cls._queue or cls.flushing
            return not busy and not cls._pipes.has_data() and not cls._pipes.has_incomplete()

    def _flush(self) -> None:
        if not self._is_master_process():
            return  # the buffers hold copies of the parent's text, which the parent sends
        RankStream.flushing = True
        try:
            self._flush_both()
        finally:
            RankStream.flushing = False

    def _flush_both(self) -> None:
        ended = [self._ended_cells.popleft() for _ in range(len(self._ended_cells))]  # their text is all taken below
        self._flush_pending = False
        self._subprocess_flush_pending = False
        self._queue_external()
        self._queue_incomplete()
        self._queue_own()
        for (stream, _), entries in groupby(self._drain_queue(), key=lambda entry: (entry[0], entry[1].get("msg_id"))):
            group = list(entries)
            stream._send_limited("".join(text for _, _, text in group), group[0][1])
        for header in ended:
            rest = self._limiters[header["msg_id"]].rest()
            if rest is not None:
                self._send(rest, header)

    def _drain_queue(self) -> Iterator[tuple[RankStream, dict[str, Any], str]]:
        for _ in range(len(self._queue)):
            yield self._queue.popleft()

    def _send_limited(self, text: str, parent: dict[str, Any]) -> None:
        """Log `text` of the cell with the header `parent`, and send what its limiter lets through."""
        cell_log.write_text(parent.get("msg_id", ""), text)
        RankStream.last_text = text[-300:]
        limiter = self._limiters.get(parent.get("msg_id", ""))
        if limiter is None:
            self._send(Chunk(text), parent)
        elif limiter.limit:
            chunk = limiter.take(text)
            if chunk is not None:
                self._send(chunk, parent)
        else:
            RankStream.hidden_text = (RankStream.hidden_text + text)[-HIDDEN_CHARACTERS:]

    def _send(self, chunk: Chunk, parent: dict[str, Any]) -> None:
        if chunk.breaks:
            self._send(Chunk("\n"), parent)
        if not chunk.text:
            return
        content = {"name": self.name, "text": chunk.text}
        if chunk.line is not None:
            content.update(line=chunk.line, cut=chunk.cut)
        self.session.send(self.pub_thread, self.session.msg("stream", content, parent=parent), ident=self.topic)


class RankDisplay(_CellOutput, ZMQDisplayPublisher):  # type: ignore[misc]
    """The display publisher of a rank."""

    def _flush_streams(self) -> None:
        """Flush both streams, so that text written before a display appears above it.

        This works even if a cell has replaced ``sys.stdout`` with an object that ignores flushes, as rich does while
        it draws a bar.
        """
        super()._flush_streams()
        last = RankStream._last_writer  # `write` has queued the text of the other stream before
        if last is not None and last not in (sys.stdout, sys.stderr):
            last.flush()

    def publish(self, data: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        if "<progress" in data.get("text/html", ""):  # a progress bar of fastprogress
            RankStream.last_text = data["text/html"][-300:].replace("\n", " ")
        super().publish(data, *args, **kwargs)


def tag_threads_with_cells() -> None:
    """Patch ``Thread.start`` to store the header of the starting cell in each thread as ``ddip_cell``."""
    start = threading.Thread.start

    def start_in_cell(self: threading.Thread) -> None:
        self.ddip_cell = getattr(sys.stdout, "parent_header", None)  # type: ignore[attr-defined]
        start(self)

    threading.Thread.start = start_in_cell  # type: ignore[method-assign]
