"""Relay the controller's sockets to another host over the connection to its agent; nothing listens on a network.

    engine --unix socket in the run folder there-->  Relay of the agent
                                                        || frames, between the other messages of notebook and agent
    controller <--unix socket in the run folder here--  Relay of the notebook

A frame is FRAME, the stream number, the kind of frame, and data. The reader of frames never waits for a socket: it
queues data that a socket does not accept, so neither end can block the other.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from ddip.guard import Guard

FRAMES = 16
"""Longest queue of a relay's unsent frames; when it is full, the relay and the writers to its sockets wait."""


class Sender:
    """A thread that sends queued messages to one connection, and closes it after `close`."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[bytes, bool] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(FRAMES)
        self._guard = Guard("a message to another host could not be sent")
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def say(self, message: bytes) -> None:
        """Queue a message, and return at once; it is lost if the other end has ended."""
        self._messages.put((message, False))

    def send_frame(self, frame: bytes) -> None:
        """Queue a frame; wait while FRAMES frames are unsent."""
        self._room.acquire()
        self._messages.put((frame, True))

    def close(self) -> None:
        """Close the connection after the queued messages are sent; return at once."""
        self._messages.put(None)

    def _run(self) -> None:
        while (entry := self._messages.get()) is not None:
            message, is_frame = entry
            with self._guard, contextlib.suppress(OSError):  # the other end has ended
                self._connection.send_bytes(message)
            if is_frame:
                self._room.release()
        with contextlib.suppress(OSError):
            self._connection.close()


FRAME = 0
"""First byte of a frame, which JSON never begins with."""
HEAD = struct.Struct(">BIB")
"""Head of a frame: FRAME, stream number, kind."""
OPEN, DATA, END = range(3)
"""Kinds of frames: open a stream to the target whose number follows, data of a stream, end of a stream."""
AT_ONCE = 1 << 17
"""Largest data of a frame in bytes, so that other streams and messages get their turn."""
PAUSE_SECONDS = 0.02
"""Pause after a frame or a socket that cannot be used."""


@dataclass
class _Stream:
    """A connection to a socket on this host."""

    number: int
    socket: socket.socket
    unsent: deque[memoryview] = field(default_factory=deque)
    """Received data that the socket has not accepted yet.

    Without a bound, like ZeroMQ's queues in ipyparallel, where the data would be queued otherwise.
    """
    ending: bool = False
    """True if the other end has ended the stream; the socket is closed once all data is sent."""


class Relay:
    """One end of the relay, with a thread that serves its sockets.

    `send` sends a frame, and may wait. Received frames must be given to `heard`. The other end may open streams to the
    sockets `targets`.
    """

    def __init__(self, send: Callable[[bytes], None], name: str) -> None:
        self._send = send
        self.targets: Sequence[str] = ()
        self._streams: dict[int, _Stream] = {}
        self._listeners: list[socket.socket] = []
        self._stream_count = 0
        self._tasks: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closed = False
        self._guard = Guard("a connection to a rank on another host failed", pause_seconds=PAUSE_SECONDS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def listen(self, paths: Sequence[str]) -> None:
        """Listen on new sockets at `paths`; relay a connection to the n-th to the other end's target n.

        Returns at once. Raises OSError if a socket cannot be created.
        """
        for number, path in enumerate(paths):
            listener = socket.socket(socket.AF_UNIX)
            self._listeners.append(listener)
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(128)
            listener.setblocking(False)
            self._run_on_thread(lambda listener=listener, number=number: self._register_listener(listener, number))  # type: ignore[misc]

    def heard(self, frame: bytes) -> None:
        """Handle a received frame on the relay's thread; return at once."""
        self._run_on_thread(lambda: self._handle_frame(frame))

    def close(self) -> None:
        """Close all streams and listeners, and wait up to 1 s for the thread to end."""
        self._closed = True
        self._run_on_thread(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(1)

    # -- on the thread of the relay

    def _run_on_thread(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"x")

    def _run(self) -> None:
        try:
            while not self._closed:
                with self._guard:
                    for key, events in self._selector.select():
                        with self._guard:
                            self._serve(key, events)
        finally:
            for stream in list(self._streams.values()):
                stream.socket.close()
            for end in (*self._listeners, self._woken, self._waker):
                end.close()
            self._selector.close()

    def _serve(self, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._woken:
            self._run_tasks()
        elif isinstance(key.data, int):
            self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
        else:
            self._transfer(key.data, events)

    def _run_tasks(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        while self._tasks and not self._closed:
            with self._guard:
                self._tasks.popleft()()

    def _register_listener(self, listener: socket.socket, number: int) -> None:
        self._selector.register(listener, selectors.EVENT_READ, number)

    def _accept(self, listener: socket.socket, target: int) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            self._stream_count += 1
            try:
                self._send_stream_frame(self._stream_count, OPEN, bytes([target]))
            except BaseException:
                connection.close()
                raise
            self._add_stream(self._stream_count, connection)

    def _add_stream(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        stream = self._streams[number] = _Stream(number, connection)
        self._selector.register(connection, selectors.EVENT_READ, stream)

    def _handle_frame(self, frame: bytes) -> None:
        _, number, kind = HEAD.unpack_from(frame)
        rest = memoryview(frame)[HEAD.size :]
        stream = self._streams.get(number)
        if kind == OPEN:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.targets[rest[0]])
            except (OSError, IndexError):
                connection.close()
                self._send_stream_frame(number, END)
            else:
                self._add_stream(number, connection)
        elif stream is not None and kind == DATA:
            stream.unsent.append(rest)
            self._write_to_socket(stream)
        elif stream is not None:
            stream.ending = True
            self._write_to_socket(stream)

    def _transfer(self, stream: _Stream, events: int) -> None:
        if stream.number not in self._streams:
            return  # the stream has ended in this round of events
        if events & selectors.EVENT_WRITE:
            self._write_to_socket(stream)
        if events & selectors.EVENT_READ and stream.number in self._streams:
            self._read_from_socket(stream)

    def _write_to_socket(self, stream: _Stream) -> None:
        """Write received data to the stream's socket, as much as it accepts; end the stream if it is over."""
        try:
            while stream.unsent:
                first = stream.unsent[0]
                sent = stream.socket.send(first)
                if sent < len(first):
                    stream.unsent[0] = first[sent:]
                else:
                    stream.unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._end_stream(stream, tell=True)
            return
        if stream.ending and not stream.unsent:
            self._end_stream(stream, tell=False)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.unsent else 0)
        if self._selector.get_key(stream.socket).events != wanted:
            self._selector.modify(stream.socket, wanted, stream)

    def _read_from_socket(self, stream: _Stream) -> None:
        """Read data from the stream's socket, and send it to the other end."""
        try:
            data = stream.socket.recv(AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._send_stream_frame(stream.number, DATA, data)
        else:
            self._end_stream(stream, tell=True)

    def _end_stream(self, stream: _Stream, tell: bool) -> None:
        del self._streams[stream.number]
        self._selector.unregister(stream.socket)
        stream.socket.close()
        if tell:
            self._send_stream_frame(stream.number, END)

    def _send_stream_frame(self, number: int, kind: int, rest: bytes = b"") -> None:
        self._send(HEAD.pack(FRAME, number, kind) + rest)
