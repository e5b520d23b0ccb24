"""All frames that the bridges forward, as somebody would read them who listens there."""

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
    """`marker in frames`: has it been seen in the clear?"""

    def __contains__(self, marker: object) -> bool:
        return any(marker in frame for frame in self)  # type: ignore[operator]


@contextlib.contextmanager
def sniffed() -> Iterator[Frames]:
    """What the switch has seen while the block ran is in the list when the block has ended. A text that lies across two
    frames is not found: send it more than once."""
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
    """All that has come, until the other end of the pipe says that it is over; then what still waits."""
    over = False
    while True:
        ready = select.select([listener] if over else [listener, end], [], [], 0 if over else None)[0]
        over = over or end in ready
        if listener in ready:
            frame, address = listener.recvfrom(1 << 17)
            if address[2] != socket.PACKET_OUTGOING:  # it has come in elsewhere
                frames.append(frame)
        elif over:
            return


def _socket_at_the_switch() -> socket.socket:
    """A socket stays in the network namespace of the thread that has made it, wherever it is used."""
    made: list[socket.socket | OSError] = []

    def make() -> None:
        try:
            switch = os.open("/proc/1/ns/net", os.O_RDONLY)
            if ctypes.CDLL(None, use_errno=True).setns(switch, CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
            os.close(switch)
            listener = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
            listener.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 1 << 28)
            made.append(listener)
        except OSError as error:
            made.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]
