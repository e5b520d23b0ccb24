"""The controller process: ipyparallel's own controller, which ends and tidies up when its owner is gone.

``boot.py`` runs it, with the arguments of ``ipcontroller``.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import setproctitle
import zmq
from ipyparallel.controller import app, hub

from ddip.cluster.processes.ownership import clear_up
from ddip.cluster.processes.processes import Proc, end_processes
from ddip.protocol import compat_ipyparallel

MOST_FILES = 10_240
"""Enough for a thousand engines, and what macOS allows."""


def _watch(owner: int, folder: Path) -> None:
    """Wait for the owner, our parent, to end; then end its engines and our schedulers, remove the files, and leave."""
    while os.getppid() == owner:
        time.sleep(0.25)
    try:
        end_processes(Proc.of(child.pid) for child in psutil.Process().children())
        clear_up(folder)
    finally:
        os._exit(0)  # the main thread may be anywhere


def _open_more_files() -> None:
    """Raise the limit: each engine takes several sockets. What cells run in keeps the limit of the notebook."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS has a limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _schedulers_die_with_us() -> None:
    """Let no scheduler process outlive a controller that was killed."""
    if sys.platform != "linux":
        return
    import ctypes

    prctl, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1
    os.register_at_fork(after_in_child=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


READ_BY_HUB = (b"heartmonitor", b"intask", b"outtask", b"tracktask", b"inbcast", b"outbcast")
"""Topics of what passes the schedulers; not ``in``, ``out`` and ``iopub``: what goes to one engine and comes from it is
most of it, and the client itself ends what an engine that has ended will not answer."""


class Hub(hub.Hub):  # type: ignore[misc]
    """Takes an engine in when it says that it is ready; ipyparallel's waits for a heartbeat, and reads all messages."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.query_handlers["ready_request"] = self.engine_ready
        self.monitor.socket.unsubscribe(b"")
        for topic in READ_BY_HUB:
            self.monitor.socket.subscribe(topic)

    def engine_ready(self, ident: Any, message: dict[str, Any]) -> None:
        heart = message["content"]["uuid"].encode()
        if heart in self.incoming_registrations:  # else a heartbeat was quicker
            self.finish_registration(heart)


class Controller(app.IPController):  # type: ignore[misc]
    """ipyparallel's controller without its waits; its sockets are files, ``ipc://IP:1`` and so on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ports = itertools.count(1)

    def initialize(self, argv: list[str] | None = None) -> None:
        app.Hub = Hub
        app.time = SimpleNamespace(sleep=lambda seconds: None)  # a quarter of a second for sockets that are ready
        # a peer of ZeroMQ 2, or some bytes that look like one, needs no handshake: libzmq refuses it where a domain is
        # named for authentication (RFC 27), though nobody serves that
        self.context.setsockopt(zmq.ZAP_DOMAIN, b"ddip")
        super().initialize(argv)

    def to_work_dir(self) -> None:
        """Go there, and import nothing from there: it is the notebook's folder."""
        super().to_work_dir()
        sys.path.remove("")

    def next_port(self, pool_name: str | None = None) -> int:
        """The end of the next socket's name."""
        return next(self._ports)

    def construct_url(self, kind: str, channel: str, index: int | str | None = None) -> str:
        """As engines and clients write it; ipyparallel's own has a dash for the colon, and they would never meet."""
        interface, _, port = super().construct_url(kind, channel, index).rpartition("-")
        return f"{interface}:{port}"

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
    if refusal := compat_ipyparallel.CONTROLLER.find_refusal():
        sys.exit(refusal)
    _open_more_files()
    _schedulers_die_with_us()
    Controller.launch_instance(sys.argv[1:])
    for scheduler in multiprocessing.active_children():  # they are ending, too
        scheduler.join(1)
    os._exit(0)  # taking every object apart would take longer than all the rest
