"""Sends what notebook and agent say to each other, in a thread of its own: nobody else waits for the link."""

from __future__ import annotations

import contextlib
import queue
import threading
from multiprocessing.connection import Connection

FRAMES = 16
"""So many frames of a relay wait to be sent at most; then the relay waits, and whoever writes to its sockets."""


class Sender:
    """To one connection, which it closes when all has been sent that was said before `close`."""

    def __init__(self, connection: Connection, name: str) -> None:
        self._connection = connection
        self._messages: queue.SimpleQueue[tuple[bytes, bool] | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(FRAMES)
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
            with contextlib.suppress(OSError):
                self._connection.send_bytes(message)
            if is_frame:
                self._room.release()
        with contextlib.suppress(OSError):
            self._connection.close()
