"""Detect a lost TCP connection by the kernel's retransmissions, whatever the processes at both ends do.

The kernel retransmits unacknowledged data, with longer and longer pauses: after a link was cut for 5 s, the next retry
comes within another 2 s. A process that is busy, stopped or swapped out does not matter, since its kernel acknowledges.

Behind a relay, such as ProxyJump, this fails: the relay acknowledges, whether the other end exists or not. There, the
beats of the other end must arrive.
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
SILENT_SECONDS = 2 * BEAT_SECONDS
"""Time without a message after which the other end may be stopped; ddip then waits for no answer that it can do
without."""
QUIET_SECONDS = 4.0
"""Silence below which the kernel's tables, which may be long, are not read."""
LOOK_SECONDS = 1.5
"""Most time that one look adds to a relayed connection's silence, so that a process that was stopped misses no beat."""
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

    def __init__(self, ports: Callable[[], Collection[tuple[int, int]]], relayed: bool = False) -> None:
        self._ports, self._relayed = ports, relayed
        self._heard = self._acknowledged = self._looked = time.monotonic()
        self._silence = 0.0
        """Seconds without a message, as far as `is_lost` has looked."""

    def heard(self) -> None:
        """Note that the other end has sent something."""
        self._heard = time.monotonic()
        self._silence = 0.0

    @property
    def silence(self) -> float:
        """Time since the other end sent something, in seconds."""
        return time.monotonic() - self._heard

    def is_lost(self) -> bool:
        """Return True if nothing arrived for LOST_SECONDS, and, unless a relay is between, nothing was acknowledged.

        Must be called more often than that, since a call notes acknowledgements.
        """
        now = time.monotonic()
        self._silence += min(now - self._looked, LOOK_SECONDS)
        self._looked = now
        if self._relayed:
            return self._silence > LOST_SECONDS
        if now < self._heard + QUIET_SECONDS:
            return False
        if not is_sending_again(self._ports()):
            self._acknowledged = now
        return now > max(self._heard, self._acknowledged) + LOST_SECONDS
