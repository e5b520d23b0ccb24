"""All frames that the bridges forward, as an eavesdropper at the switch would capture them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import socket
import struct
import threading
from collections.abc import Iterator

ETH_P_ALL = 3
SOL_PACKET, PACKET_STATISTICS = 263, 6
SO_RCVBUFFORCE = 33
CLONE_NEWNET = 0x40000000


class Frames(list[bytes]):
    """Captured frames; ``marker in frames`` tests for text in the clear."""

    def __contains__(self, marker: object) -> bool:
        return any(marker in frame for frame in self)  # type: ignore[operator]


@contextlib.contextmanager
def sniffed() -> Iterator[Frames]:
    """Capture the frames that the switch forwards during the block; the list is complete after it.

    A text that is split over two frames is not found, so send it more than once.
    """
    frames = Frames()
    end, stop = os.pipe()
    with _socket_at_the_switch() as listener:
        reader = threading.Thread(target=_read, args=(listener, end, frames))
        reader.start()
        try:
            yield frames
        finally:
            os.write(stop, b".")
            reader.join()
            os.close(end)
            os.close(stop)
        _, lost = struct.unpack("II", listener.getsockopt(SOL_PACKET, PACKET_STATISTICS, 8))
    assert not lost, f"{lost} frames have not been seen"


def _read(listener: socket.socket, end: int, frames: Frames) -> None:
    """Capture frames until the pipe signals the end; then those that are still queued."""
    over = False
    while True:
        ready = select.select([listener] if over else [listener, end], [], [], 0 if over else None)[0]
        over = over or end in ready
        if listener in ready:
            frame, address = listener.recvfrom(1 << 17)
            if address[2] != socket.PACKET_OUTGOING:  # counted when it came in
                frames.append(frame)
        elif over:
            return


def _socket_at_the_switch() -> socket.socket:
    """Open a socket in the switch's network namespace.

    It stays in the namespace of the thread that creates it.
    """
    result: list[socket.socket | OSError] = []

    def open_socket() -> None:
        try:
            switch = os.open("/proc/1/ns/net", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(switch, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            os.close(switch)
            listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 28)
            result.append(listener)
        except OSError as error:
            result.append(error)

    thread = threading.Thread(target=open_socket)
    thread.start()
    thread.join()
    if isinstance(result[0], OSError):
        raise result[0]
    return result[0]
