"""Record snapshots of this rank's state after good cells, to show later what a failed cell has changed.

    cell ends well   -->  a quick walk: numbers and tensor versions, 1 to 40 ms     \\  slices of some ms on the event
    still idle       -->  a walk with checksums of all tensors                      /   loop, while the rank is idle
    next cell comes  -->  an unfinished quick walk may continue for 1 % of the time since the last walk

A failed cell does not change the history. If a cell fails on another rank only, the notebook has its snapshot removed
(`forget_since`). Some ranks may abandon a walk that others finish. Each snapshot therefore has the name of the last
cell that all ranks have run, and only snapshots with equal names are compared.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ddip.protocol.on_rank import READING
from ddip.rank import user_namespace
from ddip.rank.inspection.walk import Path, Walk, variables_of
from ddip.rank.runtime.gpu import gpu

log = logging.getLogger("ddip")
IDLE_SECONDS, SUM_SECONDS = 0.05, 0.5
"""Idle time before a quick walk begins, and from its end to a walk with checksums."""
SLICE_SECONDS = 0.003
"""Duration of one slice of a walk, and so the longest delay of a cell by it."""
SHARE = 0.01
"""Share of the time since the last walk by which a quick walk may delay a cell."""
REST = 10
"""Pause after a walk with checksums, as a multiple of its duration."""
LONGEST_SECONDS = 20.0
"""Duration after which a walk is abandoned."""
KEPT_CELLS, KEPT_SNAPSHOTS = 64, 4


@dataclass(frozen=True)
class Snapshot:
    """The state of this rank's variables after a good cell, as one small value per path."""

    values: dict[Path, Any]
    names: frozenset[str]
    """Names of all variables at that time."""
    cell: str
    """Name of the last cell that all ranks had run; it is the same on all ranks that have this snapshot."""
    number: int
    """Number of cells that had begun."""
    has_checksums: bool


class History:
    """The latest snapshots, and the walk that takes the next one; used on the main thread."""

    def __init__(self) -> None:
        self._snapshots: dict[str, Snapshot] = {}
        """Snapshots by the name of their cell, the oldest first."""
        self._cell = ""
        self._begun = 0
        self._numbers: collections.OrderedDict[str, int] = collections.OrderedDict()
        """Number of cells that had begun before each of the last cells, by cell name."""
        self._good = True
        """False after a failed cell, until the next good one."""
        self._walk: tuple[Walk, Iterator[None], bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = self._ended = time.monotonic()
        self._rests_until = 0.0
        self._spent_seconds = 0.0
        self._quick_seconds = 0.0
        """Duration of the last quick walk, seconds."""

    def is_recorded(self, whole: bool) -> bool:
        """Return whether the state after the last cell is recorded, with checksums if `whole` is set."""
        last = self.last
        return last is not None and last.number == self._begun and (last.has_checksums or not whole)

    @property
    def last(self) -> Snapshot | None:
        """The latest snapshot."""
        return next(reversed(self._snapshots.values()), None)

    @property
    def cells(self) -> list[str]:
        """The names of the cells with a snapshot, the latest first."""
        return list(self._snapshots)[::-1]

    def after(self, cell: str) -> Snapshot | None:
        """Return the snapshot that was taken after `cell`; None if there is none."""
        return self._snapshots.get(cell)

    # -- called by the kernel, on the main thread

    def begin_cell(self, name: str, is_shared: bool) -> None:
        """Prepare for the cell `name`: finish a quick snapshot that is due, if that takes little time.

        Other walks are abandoned. `is_shared` says that all ranks of the group run the cell.
        """
        budget = SHARE * (time.monotonic() - self._ended)
        if self._is_due and budget > self._quick_seconds:
            self._run_walk(time.monotonic() + budget)
        self.pause()
        self._numbers[name] = self._begun
        self._begun += 1
        if is_shared:
            self._cell = name
        if len(self._numbers) > KEPT_CELLS:
            self._numbers.popitem(last=False)

    def end_cell(self, good: bool) -> None:
        """Schedule the next snapshot if the cell was `good`."""
        self._good = good
        self.resume()

    def pause(self) -> None:
        """Abandon the current walk, because variables are about to change."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._walk = None

    def resume(self) -> None:
        """Restart the walk as soon as the rank is idle."""
        self.pause()
        if self._good:
            self._schedule(IDLE_SECONDS, False)

    def forget_since(self, cell: str) -> None:
        """Drop the snapshots that were taken after the failed `cell` began, on this rank or another."""
        self.pause()
        self._good = False
        number = self._numbers.get(cell)
        if number is not None:
            self._snapshots = {name: kept for name, kept in self._snapshots.items() if kept.number <= number}

    def replace_snapshots(self) -> None:
        """Replace all snapshots with one with checksums, taken now, after ranks were made equal.

        Takes up to `LONGEST_SECONDS`; if that is too short, `pause_recording` has a quick one taken after the request.
        """
        self._snapshots.clear()
        self._good = True
        self.pause()
        self._run_walk(time.monotonic() + LONGEST_SECONDS, checksums=True)
        self._rests_until = 0.0

    # -- the walk

    @property
    def _is_due(self) -> bool:
        return self._good and self._begun > 0 and (self.last is None or self.last.number < self._begun)

    def _schedule(self, seconds: float, checksums: bool) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._run_slice, checksums)

    def _run_slice(self, checksums: bool) -> None:
        """Do a slice of the walk; called by the event loop while the rank is idle."""
        self._timer = None
        with contextlib.suppress(KeyboardInterrupt):  # no cell runs, and an interrupt would end the event loop
            if self._run_walk(time.monotonic() + SLICE_SECONDS, checksums):
                if not checksums:
                    self._schedule(max(SUM_SECONDS, self._rests_until - time.monotonic()), True)
            elif self._walk is not None:
                self._schedule(0.0, checksums)

    def _run_walk(self, until: float, checksums: bool = False) -> bool:
        """Continue the walk until the monotonic time `until`; return True if it completed a snapshot.

        `checksums`: with checksums of tensors; a walk of the other kind is abandoned. Never raises.
        """
        began = time.monotonic()
        try:
            if self._walk is None or self._walk[2] != checksums:
                names = variables_of(user_namespace())
                known_names = frozenset() if self.last is None else self.last.names
                walk = Walk(names, known_names, checksums=checksums and gpu.state == "done")
                self._walk, self._spent_seconds = (walk, walk.steps, checksums), 0.0
            walk, steps, _ = self._walk
            for _ in steps:
                now = time.monotonic()
                if now >= until:
                    self._spent_seconds += now - began
                    if self._spent_seconds > LONGEST_SECONDS:
                        self._walk = None
                    return False
        except Exception:  # no object in the namespace may stop the rank
            log.debug("the state after a cell could not be recorded", exc_info=True)
            self._walk = None
            return False
        self._ended = time.monotonic()
        duration = self._spent_seconds + self._ended - began
        self._quick_seconds = self._quick_seconds if checksums else duration
        if checksums:
            self._rests_until = self._ended + REST * duration
        self._walk = None
        self._snapshots.pop(self._cell, None)  # may be older, if only some ranks have run a cell since
        self._snapshots[self._cell] = Snapshot(walk.values, walk.names, self._cell, self._begun, checksums)
        if len(self._snapshots) > KEPT_SNAPSHOTS:
            del self._snapshots[next(iter(self._snapshots))]
        return True

    def walk_now(
        self,
        *,
        checksums: bool = True,
        keep: bool = False,
        known: Collection[str] = (),
        first: Collection[str] = (),
    ) -> Walk:
        """Abandon the current walk, walk over all variables without a pause, and return the complete walk.

        `known`, `first`, `checksums` and `keep` as in `Walk`. There are no checksums while the GPU works.
        Raises TimeoutError after `LONGEST_SECONDS`.
        """
        self.pause()
        variables, checksums = variables_of(user_namespace()), checksums and gpu.state == "done"
        walk = Walk(variables, known, first=first, checksums=checksums, keep=keep)
        end = time.monotonic() + LONGEST_SECONDS
        for _ in walk.steps:
            if time.monotonic() > end:
                raise TimeoutError(f"comparing the variables took longer than {LONGEST_SECONDS:g} s")
        return walk


history = History()


def is_recorded(whole: bool) -> bool:
    """Return whether the state after the last cell is recorded, with checksums if `whole` is set.

    May be called while a cell runs.
    """
    return history.is_recorded(whole)


@contextlib.contextmanager
def pause_recording(doing: str | None = None) -> Iterator[None]:
    """Suspend recording while a request may change variables; `doing`: its label.

    The next snapshot replaces the last one, at first without checksums. It is not taken if the last one still holds:
    the request changes nothing, or has replaced the snapshots itself.
    """
    history.pause()
    before = history.last
    try:
        yield
    finally:
        is_unchanged = doing in READING or history.last is not before
        if not is_unchanged or not history.is_recorded(whole=True):
            with contextlib.suppress(RuntimeError):  # the loop has ended
                history.resume()
