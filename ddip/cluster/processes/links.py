"""Is the other end of a TCP connection still there? The kernel knows, whatever the processes at both ends do.

What is sent and not acknowledged is sent again, with longer and longer pauses: after a link was cut for 5 s, the next
try comes within another 2 s. A process that is busy, stopped or swapped out does not matter: its kernel acknowledges.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection
from pathlib import Path

BEAT_SECONDS = 3.0
"""How often each end sends something, at least."""
LOST_SECONDS = 10.0
"""For so long nothing may be acknowledged: three beats."""
QUIET_SECONDS = 4.0
"""Below that, nobody looks: the kernel's tables may be long."""
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))


def is_sending_again(ports: Collection[tuple[int, int]]) -> bool:
    """Does the kernel send again on a connection between these ports, ours and theirs?"""
    wanted = {f"{ours:04X} {theirs:04X}" for ours, theirs in ports}
    for table in TABLES:
        with contextlib.suppress(OSError), table.open() as lines:
            for line in lines:
                fields = line.split()  # proc(5): number, both ends, state, queues, timer, tries
                if f"{fields[1][-4:]} {fields[2][-4:]}" in wanted and int(fields[6], 16):
                    return True
    return False


class Watch:
    """Of one connection; `ports` tells its ports, ours and theirs."""

    def __init__(self, ports: Callable[[], Collection[tuple[int, int]]]) -> None:
        self._ports = ports
        self._heard = self._acknowledged = time.monotonic()

    def heard(self) -> None:
        """Something has come from the other end."""
        self._heard = time.monotonic()

    def is_lost(self) -> bool:
        """Has nothing come, and nothing been acknowledged, for LOST_SECONDS? Ask every so often."""
        now = time.monotonic()
        if now < self._heard + QUIET_SECONDS:
            return False
        if not is_sending_again(self._ports()):
            self._acknowledged = now
        return now > max(self._heard, self._acknowledged) + LOST_SECONDS
