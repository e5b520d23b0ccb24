"""Run ssh, and send beats to the agent at its other end, whatever the notebook does.

Run as ``python -P -m ddip.cluster.hosts.beats COMMAND``, for a host behind a relay such as ProxyJump. The relay
acknowledges what either end sends, also when the other end is gone, so the ends count beats instead (``links.py``). The
notebook cannot send them in time, because C code may keep its interpreter for minutes:

    notebook  --pipe-->  this process, which adds beats  --pipe-->  ssh  ...  agent
              <--------------------- pipe -----------------------
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

from ddip.cluster.processes import links


def pass_on(source: Connection, target: Connection) -> None:
    """Pass messages from `source` to `target` until one of them closes, with beats after the first one.

    Then close `target`.
    """
    lock, ended = threading.Lock(), threading.Event()

    def send_message(message: bytes) -> None:
        with lock:
            target.send_bytes(message)

    def send_beats() -> None:
        with contextlib.suppress(OSError):
            while not ended.wait(links.BEAT_SECONDS):
                send_message(b'{"beat": 0}')

    with contextlib.suppress(EOFError, OSError):
        send_message(source.recv_bytes())
        threading.Thread(target=send_beats, daemon=True).start()
        while True:
            send_message(source.recv_bytes())
    ended.set()
    with lock:
        target.close()


def main() -> None:
    """Run the command until it ends, and exit with its code."""
    process = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)
    assert process.stdin is not None
    source, target = Connection(os.dup(0), writable=False), Connection(os.dup(process.stdin.fileno()), readable=False)
    process.stdin.close()
    threading.Thread(target=pass_on, args=(source, target), daemon=True).start()
    sys.exit(process.wait() % 256)


if __name__ == "__main__":
    main()
