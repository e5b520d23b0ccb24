"""A network with a long way: what ssh uses for its connection (ProxyCommand), and which delays all that passes.

Run as ``python slow_link.py HOST PORT FILE``; `FILE` holds the seconds that each byte takes, in each direction.
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


def carry(reads: int, writes: int, file: Path) -> None:
    """From one descriptor to the other, until the end of what comes, each chunk some time after it came."""
    chunks: queue.Queue[tuple[float, bytes]] = queue.Queue()

    def write() -> None:
        while True:
            due, chunk = chunks.get()
            if not chunk:
                return
            time.sleep(max(0.0, due - time.monotonic()))
            os.write(writes, chunk)

    writer = threading.Thread(target=write)
    writer.start()
    while chunk := os.read(reads, 1 << 16):
        chunks.put((time.monotonic() + float(file.read_text()), chunk))
    chunks.put((0.0, b""))
    writer.join()


def main() -> None:
    """Entry point."""
    host, port, file = sys.argv[1:]
    with socket.create_connection((host, int(port))) as there, contextlib.suppress(OSError):
        threading.Thread(target=carry, args=(there.fileno(), 1, Path(file)), daemon=True).start()
        carry(0, there.fileno(), Path(file))  # until ssh is gone: nobody takes what still comes back


if __name__ == "__main__":
    main()
