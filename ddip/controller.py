"""The controller process: ipyparallel's own controller, which ends and tidies up when its owner is gone.

Run as ``python -m ddip.controller``, with the arguments of ``ipcontroller``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import setproctitle
from ipyparallel.controller import app, hub

from ddip.owner import Proc, clear_up, end_processes


def _watch(owner: int, folder: Path) -> None:
    """Wait for the owner, our parent, to end; then end its engines and our schedulers, remove the files, and leave."""
    while os.getppid() == owner:
        time.sleep(0.25)
    try:
        end_processes(Proc.of(child.pid) for child in psutil.Process().children())
        clear_up(folder)
    finally:
        os._exit(0)  # the main thread may be anywhere


def _schedulers_die_with_us() -> None:
    """Let no scheduler process outlive a controller that was killed."""
    if sys.platform != "linux":
        return
    import ctypes

    prctl, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1
    os.register_at_fork(after_in_child=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


class Hub(hub.Hub):  # type: ignore[misc]
    """Takes an engine in when it says that it is ready; ipyparallel's waits for a heartbeat."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.query_handlers["ready_request"] = self.engine_ready

    def engine_ready(self, ident: Any, message: dict[str, Any]) -> None:
        heart = message["content"]["uuid"].encode()
        if heart in self.incoming_registrations:  # else a heartbeat was quicker
            self.finish_registration(heart)


class Controller(app.IPController):  # type: ignore[misc]
    """ipyparallel's controller without its waits, and with ports that nobody else can take."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._reserved: list[socket.socket] = []

    def initialize(self, argv: list[str] | None = None) -> None:
        app.Hub = Hub
        app.time = SimpleNamespace(sleep=lambda seconds: None)  # a quarter of a second for sockets that are ready
        super().initialize(argv)

    def next_port(self, pool_name: str | None = None) -> int:
        """A free port, bound until this process ends, so that no other process is given it before it is used.

        ipyparallel lets go of a port before it listens there; on Linux, another socket of the address may listen when
        both allow it.
        """
        if sys.platform != "linux":
            return int(super().next_port(pool_name))
        reserved = socket.socket()
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((self.engine_ip, 0))
        self._reserved.append(reserved)
        return int(reserved.getsockname()[1])

    def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
        """Write the file in one piece: engines and client take it as soon as it is there."""
        super().save_connection_dict(f"{fname}.new", cdict)
        folder = Path(self.profile_dir.security_dir)
        (folder / f"{fname}.new").replace(folder / fname)


def main() -> None:
    """Entry point."""
    setproctitle.setproctitle(f"ddip controller ({os.environ.pop('DDIP_NOTEBOOK')})")
    owner, folder = int(os.environ.pop("DDIP_OWNER")), Path(os.environ.pop("DDIP_RUN_FOLDER"))
    threading.Thread(target=_watch, args=(owner, folder), name="ddip-owner", daemon=True).start()
    _schedulers_die_with_us()
    Controller.launch_instance(sys.argv[1:])
    for scheduler in multiprocessing.active_children():  # they are ending, too
        scheduler.join(1)
    os._exit(0)  # taking every object apart would take longer than all the rest


if __name__ == "__main__":
    main()
