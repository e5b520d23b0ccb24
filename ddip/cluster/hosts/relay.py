"""The controller's sockets on another host, by the connection to its agent: nothing listens on any network.

    engine --unix socket in the run folder there-->  Relay of the agent
                                                        || frames, among what notebook and agent say to each other
    controller <--unix socket in the run folder here--  Relay of the notebook

A frame is FRAME, the number of its stream, what it is, and bytes. Whoever reads frames never waits for a socket: what
one does not take is kept, so neither end can block the other.
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
"""So many frames of a relay wait to be sent at most; then the relay waits, and whoever writes to its sockets."""


class Sender:
    """To one connection, which it closes when all has been sent that was said before `close`."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[bytes, bool] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(FRAMES)
        self._guard = Guard("a message to another host could not be sent")
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def say(self, message: bytes) -> None:
        """Send it; returns at once. Who is gone hears nothing."""
        self._messages.put((message, False))

    def send_frame(self, frame: bytes) -> None:
        """Send it, when there is room."""
        self._room.acquire()
        self._messages.put((frame, True))

    def close(self) -> None:
        """Nothing more will be said; returns at once."""
        self._messages.put(None)

    def _run(self) -> None:
        while (one := self._messages.get()) is not None:
            message, is_frame = one
            with self._guard, contextlib.suppress(OSError):  # who is gone hears nothing
                self._connection.send_bytes(message)
            if is_frame:
                self._room.release()
        with contextlib.suppress(OSError):
            self._connection.close()


FRAME = 0
"""First byte of a frame; JSON begins with another."""
HEAD = struct.Struct(">BIB")
OPEN, DATA, END = range(3)
"""A stream begins, to the socket whose number follows; goes on; is over."""
AT_ONCE = 1 << 17
"""Bytes in a frame at most, so that others get their turn."""
PAUSE_SECONDS = 0.02
"""After a frame, or a socket, that cannot be used."""


@dataclass
class _Stream:
    """A connection to a socket of this host."""

    number: int
    socket: socket.socket
    unsent: deque[memoryview] = field(default_factory=deque)
    """Without a bound, as ZeroMQ's own queues are in ipyparallel: what is not kept here is kept there."""
    ending: bool = False
    """Has the other end ended it? Then it is closed when all has been sent."""


class Relay:
    """One end. `send` sends a frame, and may wait; frames that come are given to `heard`.

    Sockets to which the other end may open streams are `targets`.
    """

    def __init__(self, send: Callable[[bytes], None], name: str) -> None:
        self._send = send
        self.targets: Sequence[str] = ()
        self._streams: dict[int, _Stream] = {}
        self._listeners: list[socket.socket] = []
        self._begun = 0
        self._tasks: deque[Callable[[], None]] = deque()
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._over = False
        self._guard = Guard("a connection to a rank on another host failed", pause_seconds=PAUSE_SECONDS)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def listen(self, paths: Sequence[str]) -> None:
        """Have each connection to one of these new sockets be a stream to the target with its number.

        Raises OSError.
        """
        for number, path in enumerate(paths):
            listener = socket.socket(socket.AF_UNIX)
            self._listeners.append(listener)
            listener.bind(path)
            os.chmod(path, 0o600)
            listener.listen(128)
            listener.setblocking(False)
            self._do(lambda listener=listener, number=number: self._watch(listener, number))  # type: ignore[misc]

    def heard(self, frame: bytes) -> None:
        """A frame has come; returns at once."""
        self._do(lambda: self._heard(frame))

    def close(self) -> None:
        """End all streams."""
        self._over = True
        self._do(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join(1)

    # -- in its thread

    def _do(self, task: Callable[[], None]) -> None:
        self._tasks.append(task)
        with contextlib.suppress(BlockingIOError, OSError):
            self._waker.send(b"x")

    def _run(self) -> None:
        try:
            while not self._over:
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
            self._work()
        elif isinstance(key.data, int):
            self._accept(key.fileobj, key.data)  # type: ignore[arg-type]
        else:
            self._move(key.data, events)

    def _work(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        while self._tasks and not self._over:
            with self._guard:
                self._tasks.popleft()()

    def _watch(self, listener: socket.socket, number: int) -> None:
        self._selector.register(listener, selectors.EVENT_READ, number)

    def _accept(self, listener: socket.socket, target: int) -> None:
        with contextlib.suppress(OSError):
            connection, _ = listener.accept()
            self._begun += 1
            try:
                self._tell(self._begun, OPEN, bytes([target]))
            except BaseException:
                connection.close()
                raise
            self._take(self._begun, connection)

    def _take(self, number: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        stream = self._streams[number] = _Stream(number, connection)
        self._selector.register(connection, selectors.EVENT_READ, stream)

    def _heard(self, frame: bytes) -> None:
        _, number, kind = HEAD.unpack_from(frame)
        rest = memoryview(frame)[HEAD.size :]
        stream = self._streams.get(number)
        if kind == OPEN:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(self.targets[rest[0]])
            except (OSError, IndexError):
                connection.close()
                self._tell(number, END)
            else:
                self._take(number, connection)
        elif stream is not None and kind == DATA:
            stream.unsent.append(rest)
            self._push(stream)
        elif stream is not None:
            stream.ending = True
            self._push(stream)

    def _move(self, stream: _Stream, events: int) -> None:
        if stream.number not in self._streams:
            return  # it has ended in this turn
        if events & selectors.EVENT_WRITE:
            self._push(stream)
        if events & selectors.EVENT_READ and stream.number in self._streams:
            self._pull(stream)

    def _push(self, stream: _Stream) -> None:
        """Send what has come to its socket, as far as that takes it."""
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
            self._end(stream, tell=True)
            return
        if stream.ending and not stream.unsent:
            self._end(stream, tell=False)
            return
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if stream.unsent else 0)
        if self._selector.get_key(stream.socket).events != wanted:
            self._selector.modify(stream.socket, wanted, stream)

    def _pull(self, stream: _Stream) -> None:
        """Send the other end what its socket has."""
        try:
            data = stream.socket.recv(AT_ONCE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._tell(stream.number, DATA, data)
        else:
            self._end(stream, tell=True)

    def _end(self, stream: _Stream, tell: bool) -> None:
        del self._streams[stream.number]
        self._selector.unregister(stream.socket)
        stream.socket.close()
        if tell:
            self._tell(stream.number, END)

    def _tell(self, number: int, kind: int, rest: bytes = b"") -> None:
        self._send(HEAD.pack(FRAME, number, kind) + rest)
