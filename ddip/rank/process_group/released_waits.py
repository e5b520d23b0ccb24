"""End waits of a released rank that the release itself has not ended.

a half-sent message      gloo does not notify the thread that waits for it    ``lost_waits.py``
a FileStore, from C++    polls for a key until the timeout                    ``stores.FileWaits``
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ddip.rank.native import lost_waits
from ddip.rank.runtime import stores
from ddip.rank.runtime.housekeeping import cells

LOST_SECONDS = 0.2
"""Time for which a wait must last after a release to be considered lost."""


def end_all(is_over: Callable[[float], bool], interrupt: Callable[[], None]) -> None:
    """End lost waits until two checks in a row find none, or this rank joins another group.

    Blocks until then. `is_over` sleeps for the given number of seconds and returns whether this rank has begun to join
    another group. `interrupt` interrupts the cell.
    """
    before, quiet = dict[int, int](), 0
    with contextlib.closing(stores.FileWaits()) as files:
        while quiet < 2:
            if is_over(LOST_SECONDS):
                return
            waits = lost_waits.find_waits()
            lost_buffers = {buffer for thread, buffer in waits.items() if before.get(thread) == buffer}
            if lost_buffers and cells.busy and not cells.doing:
                interrupt()  # interrupt the cell first, since the tensor that it waits for will hold undefined values
            lost_waits.end_waits(lost_buffers)
            in_files = files.end()
            before, quiet = waits, 0 if waits or in_files else quiet + 1
