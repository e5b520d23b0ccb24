"""The controller process: ipyparallel's controller, which cleans up and exits when its owner ends.

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
"""Limit on open files: enough for a thousand engines, and allowed on macOS."""


def _clean_up_after_owner(owner: int, folder: Path) -> None:
    """Wait until the owner, the parent process, ends; then clean up and exit.

    Ends the owner's engines and this controller's schedulers, and removes the files.
    """
    while os.getppid() == owner:
        time.sleep(0.25)
    try:
        end_processes(Proc.of(child.pid) for child in psutil.Process().children())
        clear_up(folder)
    finally:
        os._exit(0)  # the main thread cannot be interrupted everywhere


def _open_more_files() -> None:
    """Raise the limit on open files, since each engine needs several sockets.

    Engines keep the notebook's limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):  # macOS has a further limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _end_schedulers_with_controller() -> None:
    """Fork the scheduler processes, and let the kernel kill them if this controller is killed; Linux only.

    A forkserver, the default since Python 3.14, would be two more processes and a socket, and outlive the controller.
    """
    if sys.platform != "linux":
        return
    import ctypes

    multiprocessing.set_start_method("fork")

    prctl, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1
    os.register_at_fork(after_in_child=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


READ_BY_HUB = (b"heartmonitor", b"intask", b"outtask", b"tracktask", b"inbcast", b"outbcast")
"""Topics of the schedulers' traffic that the Hub reads.

It does not read ``in``, ``out`` and ``iopub``, which carry most of the traffic: the messages to and from single
engines. The client itself ends requests to an engine that has ended.
"""


class Hub(hub.Hub):  # type: ignore[misc]
    """A Hub that registers an engine as soon as it is ready, and reads only READ_BY_HUB.

    ipyparallel's Hub waits for a heartbeat of the engine, and reads all messages.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.query_handlers["ready_request"] = self.engine_ready
        self.monitor.socket.unsubscribe(b"")
        for topic in READ_BY_HUB:
            self.monitor.socket.subscribe(topic)

    def engine_ready(self, ident: Any, message: dict[str, Any]) -> None:
        """Register the engine that sends this message, unless a heartbeat has registered it already."""
        heart = message["content"]["uuid"].encode()
        if heart in self.incoming_registrations:  # else a heartbeat has registered it already
            self.finish_registration(heart)


class Controller(app.IPController):  # type: ignore[misc]
    """ipyparallel's controller without its fixed waits; its sockets are files, ``ipc://IP:1`` and so on."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._ports = itertools.count(1)

    def initialize(self, argv: list[str] | None = None) -> None:
        app.Hub = Hub
        app.time = SimpleNamespace(sleep=lambda seconds: None)  # it waits 0.25 s for sockets that are ready
        # libzmq accepts a ZeroMQ 2 peer, or bytes that look like one, without a handshake, unless an authentication
        # domain is set (RFC 27); no handler for it is needed
        self.context.setsockopt(zmq.ZAP_DOMAIN, b"ddip")
        super().initialize(argv)

    def to_work_dir(self) -> None:
        """Change to the working directory, the notebook's folder, and keep it off ``sys.path``."""
        super().to_work_dir()
        sys.path.remove("")

    def next_port(self, pool_name: str | None = None) -> int:
        """Return the number at the end of the next socket's name."""
        return next(self._ports)

    def construct_url(self, kind: str, channel: str, index: int | str | None = None) -> str:
        """Return the URL with a colon before the port, as engines and clients write it.

        ipyparallel writes a dash.
        """
        interface, _, port = super().construct_url(kind, channel, index).rpartition("-")
        return f"{interface}:{port}"

    def save_connection_dict(self, fname: str, cdict: dict[str, Any]) -> None:
        """Write the connection file atomically, since engines and client read it as soon as it exists."""
        super().save_connection_dict(f"{fname}.new", cdict)
        folder = Path(self.profile_dir.security_dir)
        (folder / f"{fname}.new").replace(folder / fname)


def main() -> None:
    """Run the controller until it is stopped or its owner ends."""
    setproctitle.setproctitle(f"ddip controller ({os.environ.pop('DDIP_NOTEBOOK')})")
    owner, folder = int(os.environ.pop("DDIP_OWNER")), Path(os.environ.pop("DDIP_RUN_FOLDER"))
    threading.Thread(target=_clean_up_after_owner, args=(owner, folder), name="ddip-owner", daemon=True).start()
    if refusal := compat_ipyparallel.CONTROLLER.find_refusal():
        sys.exit(refusal)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's warning to all processes
    _open_more_files()
    _end_schedulers_with_controller()
    Controller.launch_instance(sys.argv[1:])
    for scheduler in multiprocessing.active_children():  # they are ending as well
        scheduler.join(1)
    os._exit(0)  # the interpreter's teardown would take longer than the rest of the shutdown
