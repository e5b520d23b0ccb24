"""What ranks are told of the host that they share with the notebook."""

from __future__ import annotations

import os
import socket
import sys

from ddip.output.area import notify
from ddip.protocol.rank_spec import INTERFACE_VARIABLES


def threads(ranks: int) -> int:
    """CPU threads for each of `ranks` on this host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // ranks)


def directory() -> str:
    """Where the notebook is, for new ranks."""
    try:
        return os.getcwd()
    except FileNotFoundError:  # somebody has removed it
        return "/"


def loopback() -> str:
    """Name of the loopback interface."""
    return "lo" if sys.platform == "linux" else "lo0"


def tell_interfaces() -> None:
    """Say which settings of the environment are not followed."""
    ours = loopback()
    for name in INTERFACE_VARIABLES:
        theirs = os.environ.get(name) or ours
        if theirs != ours:
            notify(f"{name}={theirs} is not used: the ranks are on one host, and talk over {ours}")


def free_port() -> int:
    """A TCP port that is free on loopback, for programs that want a MASTER_PORT; the group itself needs none."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
