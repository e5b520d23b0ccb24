"""Detect a lost TCP connection by the kernel's retransmissions, whatever the processes at both ends do.

The kernel retransmits unacknowledged data, with longer and longer pauses: after a link was cut for 5 s, the next retry
comes within another 2 s. A process that is busy, stopped or swapped out does not matter, since its kernel acknowledges.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from pathlib import Path

BEAT_SECONDS = 3.0
"""Longest interval between two messages of each end."""
LOST_SECONDS = 10.0
"""Time without an acknowledgement after which the connection is lost: three beats."""
QUIET_SECONDS = 4.0
"""Silence below which the kernel's tables, which may be long, are not read."""
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def is_sending_again(ports: Collection[tuple[int, int]]) -> bool:
    """Return True if the kernel is retransmitting on a connection with one of these (local, remote) ports."""
    wanted = {f"{ours:04X} {theirs:04X}" for ours, theirs in ports}
    for table in TABLES:
        with contextlib.suppress(OSError), table.open() as lines:
            for line in lines:
                fields = line.split()  # proc(5): number, both ends, state, queues, timer, tries
                if f"{fields[1][-4:]} {fields[2][-4:]}" in wanted and int(fields[6], 16):
                    return True
    return False


class Watch:
    """Watch one connection; `ports` returns its (local, remote) ports."""

    def __init__(self, ports: Callable[[], Collection[tuple[int, int]]]) -> None:
        self._ports = ports
        self._heard = self._acknowledged = time.monotonic()

    def heard(self) -> None:
        """Note that the other end has sent something."""
        self._heard = time.monotonic()

    def is_lost(self) -> bool:
        """Return True if nothing arrived and nothing was acknowledged for LOST_SECONDS.

        Must be called more often than that, since a call notes acknowledgements.
        """
        now = time.monotonic()
        if now < self._heard + QUIET_SECONDS:
            return False
        if not is_sending_again(self._ports()):
            self._acknowledged = now
        return now > max(self._heard, self._acknowledged) + LOST_SECONDS
