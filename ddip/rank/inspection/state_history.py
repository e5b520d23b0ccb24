"""Remember the state that this rank had after its last good cells, to tell what a later cell has broken.

    cell ends well   -->  a quick walk: numbers and tensor versions, 1 to 40 ms     \\  slices of some ms on the event
    still idle       -->  a walk with checksums of all tensors                      /   loop, while the rank is idle
    next cell comes  -->  a quick walk that has not ended may go on for 1 % of the time since the last one

A cell that fails leaves the history as it is. A cell that fails on another rank only is dropped from it when the
notebook says so (`forget_since`). A walk may be abandoned on one rank and not on another, so each snapshot has the name
of the last cell that all ranks have run: only snapshots with the same name compare.
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

from ddip.rank import namespace
from ddip.rank.inspection.walk import Path, Walk, variables_of
from ddip.rank.runtime.gpu import gpu

log = logging.getLogger("ddip")
IDLE_SECONDS, SUM_SECONDS = 0.05, 0.5
"""How long a rank is idle before the quick walk begins, and then before the one with checksums."""
SLICE_SECONDS = 0.003
"""How long a walk holds up a cell that comes, at most."""
SHARE = 0.01
"""Part of the time since the last walk that a quick one may take of a cell's."""
REST = 10
"""How many times as long as a walk with checksums took the rank rests before the next."""
LONGEST_SECONDS = 20.0
"""A walk that is longer is given up."""
KEPT_CELLS, KEPT_SNAPSHOTS = 64, 4


@dataclass(frozen=True)
class Snapshot:
    """The values of all paths after a good cell."""

    values: dict[Path, Any]
    names: frozenset[str]
    """The variables that there were."""
    cell: str
    """Name of the last cell that all ranks had run; it is the same on all ranks that have this snapshot."""
    number: int
    """How many cells had begun."""
    has_checksums: bool


class History:
    """The last snapshots, and the walk for the next."""

    def __init__(self) -> None:
        self._kept: dict[str, Snapshot] = {}
        """By name of their cell, the oldest first."""
        self._cell = ""
        self._begun = 0
        self._numbers: collections.OrderedDict[str, int] = collections.OrderedDict()
        """Of the last cells, by name, how many had begun before."""
        self._good = True
        """Whether the last cell ended well."""
        self._walk: tuple[Walk, Iterator[None], bool] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._began = self._ended = time.monotonic()
        self._rests_until = 0.0
        self._spent = 0.0
        self._took = 0.0
        """Seconds that the last quick walk took."""

    def is_recorded(self, whole: bool) -> bool:
        """Return whether the state after the last good cell is known; `whole`: with the values of tensors."""
        last = self.last
        return last is not None and last.number == self._begun and (last.has_checksums or not whole)

    @property
    def last(self) -> Snapshot | None:
        """The latest snapshot."""
        return next(reversed(self._kept.values()), None)

    @property
    def cells(self) -> list[str]:
        """The names of the cells after which a snapshot was taken, the latest first."""
        return list(self._kept)[::-1]

    def after(self, cell: str) -> Snapshot | None:
        """The snapshot that was taken after `cell`; None if there is none."""
        return self._kept.get(cell)

    # -- called by the kernel, on the main thread

    def begin_cell(self, name: str, is_shared: bool) -> None:
        """Take the quick snapshot that is due, if that costs next to nothing; a cell begins.

        `is_shared`: all ranks of the group run it.
        """
        budget = SHARE * (time.monotonic() - self._ended)
        if self._is_due and budget > self._took:
            self._run(time.monotonic() + budget)
        self.pause()
        self._numbers[name] = self._begun
        self._begun += 1
        if is_shared:
            self._cell = name
        if len(self._numbers) > KEPT_CELLS:
            self._numbers.popitem(last=False)

    def end_cell(self, good: bool) -> None:
        """Plan the next snapshot."""
        self._good = good
        self.resume()

    def pause(self) -> None:
        """Abandon the walk under way: something is about to change the variables."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._walk = None

    def resume(self) -> None:
        """Begin the walk again as soon as the rank is idle."""
        self.pause()
        if self._good:
            self._plan(IDLE_SECONDS, False)

    def forget_since(self, cell: str) -> None:
        """Drop the snapshots that were taken after `cell` began: it failed, here or on another rank."""
        self.pause()
        self._good = False
        number = self._numbers.get(cell)
        if number is not None:
            self._kept = {name: one for name, one in self._kept.items() if one.number <= number}

    def begin_anew(self) -> None:
        """Forget all snapshots, and take one: the ranks have just been made equal, and the next cell may fail."""
        self._kept.clear()
        self._good = True
        self.pause()
        self._run(time.monotonic() + LONGEST_SECONDS, checksums=True)
        self._rests_until = 0.0
        self.resume()

    # -- the walk

    @property
    def _is_due(self) -> bool:
        return self._good and self._begun > 0 and (self.last is None or self.last.number < self._begun)

    def _plan(self, seconds: float, checksums: bool) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._continue, checksums)

    def _continue(self, checksums: bool) -> None:
        """Do a slice of the walk; called by the event loop while the rank is idle."""
        self._timer = None
        with contextlib.suppress(KeyboardInterrupt):  # meant for nothing that runs; it would end the event loop
            if self._run(time.monotonic() + SLICE_SECONDS, checksums):
                if not checksums:
                    self._plan(max(SUM_SECONDS, self._rests_until - time.monotonic()), True)
            elif self._walk is not None:
                self._plan(0.0, checksums)

    def _run(self, until: float, checksums: bool = False) -> bool:
        """Walk until `until` on ``time.monotonic``; return whether a snapshot was taken."""
        began = time.monotonic()
        try:
            if self._walk is None or self._walk[2] != checksums:
                names = variables_of(namespace())
                known = frozenset() if self.last is None else self.last.names
                walk = Walk(names, known, checksums=checksums and gpu.state == "done")
                self._walk, self._spent = (walk, walk.steps, checksums), 0.0
            walk, steps, _ = self._walk
            for _ in steps:
                now = time.monotonic()
                if now >= until:
                    self._spent += now - began
                    if self._spent > LONGEST_SECONDS:
                        self._walk = None
                    return False
        except Exception:  # whatever is in the namespace, the rank must go on
            log.debug("the state after a cell could not be recorded", exc_info=True)
            self._walk = None
            return False
        self._ended = time.monotonic()
        took = self._spent + self._ended - began
        self._took = self._took if checksums else took
        if checksums:
            self._rests_until = self._ended + REST * took
        self._walk = None
        self._kept.pop(self._cell, None)  # of the time before a cell that only some ranks have run
        self._kept[self._cell] = Snapshot(walk.values, walk.names, self._cell, self._begun, checksums)
        if len(self._kept) > KEPT_SNAPSHOTS:
            del self._kept[next(iter(self._kept))]
        return True

    def walk_now(self, *, checksums: bool = True, keep: bool = False, known: Collection[str] = ()) -> Walk:
        """Walk over the variables as they are, without a pause; those in `known` first."""
        self.pause()
        walk = Walk(variables_of(namespace()), known, checksums=checksums and gpu.state == "done", keep=keep)
        end = time.monotonic() + LONGEST_SECONDS
        for _ in walk.steps:
            if time.monotonic() > end:
                raise TimeoutError(f"comparing the variables took longer than {LONGEST_SECONDS:g} s")
        return walk


history = History()


def is_recorded(whole: bool) -> bool:
    """Return whether the state after the last good cell is known; may be asked beside a cell."""
    return history.is_recorded(whole)


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """While this lasts, something else than a cell may change variables."""
    history.pause()
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            history.resume()
