"""A slow link: a ProxyCommand for ssh that delays everything that passes.

Run as ``python slow_link.py HOST PORT FILE``; `FILE` holds the delay in seconds of each byte, per direction.
"""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
import time
from pathlib import Path


def copy_with_delay(reads: int, writes: int, file: Path) -> None:
    """Copy from one descriptor to the other until the end, delaying each chunk."""
    chunks: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def write_when_due() -> None:
        while True:
            due, chunk = chunks.get()
            if not chunk:
                return
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(writes, chunk)

    writer = threading.Thread(target=write_when_due)
    writer.start()
    while chunk := os.read(reads, 1 << 16):
        chunks.put((time.monotonic() + float(file.read_text()), chunk))
    chunks.put((0.0, b""))
    writer.join()


def main() -> None:
    """Connect, and copy in both directions."""
    host, port, file = sys.argv[1:]
    with socket.create_connection((host, int(port))) as connection, contextlib.suppress(OSError):
        threading.Thread(target=copy_with_delay, args=(connection.fileno(), 1, Path(file)), daemon=True).start()
        copy_with_delay(0, connection.fileno(), Path(file))  # until ssh ends; later answers have no reader


if __name__ == "__main__":
    main()
