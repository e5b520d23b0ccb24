"""Host settings for ranks: CPU threads and network interfaces."""

from __future__ import annotations

import os
import sys

from ddip.output.area import notify
from ddip.protocol.rank_spec import INTERFACE_VARIABLES


def threads_per_rank(cores: int, ranks: int) -> int:
    """Return the number of CPU threads for each of `ranks` on a host with `cores` cores; at least 1."""
    return max(1, cores // ranks)


def loopback_name() -> str:
    """Return the name of the loopback interface."""
    return "lo" if sys.platform == "linux" else "lo0"


def report_ignored_interfaces() -> None:
    """Tell the user which interface variables of the environment are ignored on a single host."""
    ours = loopback_name()
    for name in INTERFACE_VARIABLES:
        theirs = os.environ.get(name) or ours
        if theirs != ours:
            notify(f"{name}={theirs} is ignored: the ranks are on one host and communicate over {ours}")
