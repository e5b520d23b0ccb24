"""What ranks are told of their host."""

from __future__ import annotations

import os
import sys

from ddip.output.area import notify
from ddip.protocol.rank_spec import INTERFACE_VARIABLES


def threads(cores: int, ranks: int) -> int:
    """CPU threads for each of `ranks` on a host with so many `cores`."""
    return max(1, cores // ranks)


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
