"""What ranks are told of the host that they share with the notebook."""

from __future__ import annotations

import os
import socket
import sys
import weakref

from ddip.output.area import notify
from ddip.protocol.rank_spec import INTERFACE_VARIABLES


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads(ranks: int) -> int:
    """CPU threads for each of `ranks` on this host."""
    return max(1, cores() // ranks)


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


class HeldPort:
    """A TCP port for programs that want a MASTER_PORT, held as long as this object lives; the group needs none.

    It is bound and never listened on, so the kernel gives it to nobody else, while a listener with ``SO_REUSEADDR``,
    as every rendezvous of torch is, may take it.
    """

    def __init__(self) -> None:
        with socket.socket() as holder:
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("", 0))  # all addresses: a rendezvous listens on all of them
            self.number: int = holder.getsockname()[1]
            weakref.finalize(self, os.close, holder.detach())
