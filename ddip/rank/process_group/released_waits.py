"""End the waits of a released rank that the release itself has not ended.

a half-sent message    gloo forgets who waits for it                                       ``lost_waits.py``
a FileStore, from C++  looks for a key until the timeout                                   ``stores.FileWaits``
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from ddip.rank.native import lost_waits
from ddip.rank.runtime import stores
from ddip.rank.runtime.housekeeping import cells

LOST_SECONDS = 0.2
"""How long a wait must last after a release to be one that nothing else ends."""


def end_all(is_over: Callable[[float], bool], interrupt: Callable[[], None]) -> None:
    """End all such waits, until there are none.

    `is_over` waits for so many seconds, and returns whether this rank has begun to join another group. `interrupt`
    interrupts the cell.
    """
    before, quiet = dict[int, int](), 0
    with contextlib.closing(stores.FileWaits()) as files:
        while quiet < 2:
            if is_over(LOST_SECONDS):
                return
            waits = lost_waits.find_waits()
            lost = {buffer for thread, buffer in waits.items() if before.get(thread) == buffer}
            if lost and cells.busy and not cells.doing:
                interrupt()  # the cell first: what it waits for will hold anything
            lost_waits.end_waits(lost)
            in_files = files.end()
            goes_on = waits or in_files
            before, quiet = waits, 0 if goes_on else quiet + 1
