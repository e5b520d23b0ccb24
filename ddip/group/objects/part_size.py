"""The size of the parts in which large objects travel, by the speed of the link so far.

A stop waits behind the part that is under way, so a part should take about PART_SECONDS.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

PART_SECONDS = 0.5
"""Time that a part should take."""
FIRST = 1 << 18
"""Bytes of the first part, or of all small objects that ranks on other hosts send at once."""
LEAST, MOST = 1 << 16, 1 << 24
"""Limits of a part in bytes."""
GROWTH = 4


class PartSize:
    """The size of the next part of one transfer."""

    def __init__(self) -> None:
        self.size = FIRST
        """Most bytes of the next part."""

    @contextlib.contextmanager
    def measure(self, size: int) -> Iterator[None]:
        """Measure how long the block takes to transfer `size` bytes, and adapt the size of the next part."""
        began = time.monotonic()
        yield
        if size >= self.size:  # the last part of an object says little
            speed = size / max(1e-6, time.monotonic() - began)
            self.size = min(MOST, GROWTH * self.size, max(LEAST, int(speed * PART_SECONDS)))

    def split(self, size: int) -> Iterator[tuple[int, int]]:
        """Yield begin and end of each part of an object of `size` bytes, and time its transfer by the caller."""
        begin = 0
        while begin < size:
            end = min(size, begin + self.size)
            with self.measure(end - begin):
                yield begin, end
            begin = end
