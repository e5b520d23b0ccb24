"""The cells of a group: one after the other, or beside each other where they are on different ranks.

    run     the caller's thread follows it to its end (``running.py``)
    start   a thread of its own does; the caller goes on      --busy ranks-->  who wants these is refused, or waits

What is common to all of them has its `turn`: to send a cell, to look at what the group is like when one has ended, and
what ``group.py`` and ``lifecycle.py`` do on the main threads of ranks.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from typing import Any

from ddip.errors import GroupError, ranks_text
from ddip.group import stopping
from ddip.group.cells.cell import Cell
from ddip.group.cells.cell_state import LOOK_SECONDS, Limits
from ddip.group.cells.cell_status import beside
from ddip.group.cells.differences import Differences
from ddip.group.cells.history import History
from ddip.group.cells.running import (
    Requests,
    RunningCell,
    tell_aborted,
    tell_replaced,
    tell_settings,
    tell_unchecked,
    unfinished,
)
from ddip.group.members.ranks import Ranks
from ddip.group.members.watch import Ending
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.output import area
from ddip.output.area import cell_number, notices_in, notify
from ddip.output.cells.background_page import BackgroundOutput
from ddip.output.tables.tables import places_text, still_text, way_out
from ddip.protocol.cell_messages import Asked
from ddip.protocol.reports import CellReport

log = logging.getLogger("ddip")

ASLEEP_SECONDS = 6.0
"""How long the next cell waits for a rank that sleeps in what comes after the code of a former one: torch waits 5 s for
each worker of a data loader that the collector takes apart."""
LATE_CELLS = 20
"""Cells whose late output is still shown."""
END_SECONDS = 3.0
"""How long the threads of background cells may take to see that their group has ended."""


class Cells:
    """All that were given to the ranks of one group."""

    def __init__(
        self,
        ranks: Ranks,
        manager: ProcessGroupManager,
        differences: Differences,
        history: History,
        turn: contextlib.AbstractContextManager[Any],
    ) -> None:
        self.history = history
        self._differences = differences
        self._turn = turn
        self._ranks = ranks
        self._manager = manager
        self._active: dict[Cell, RunningCell] = {}
        """Those that run, or wait for others, in the order in which they came."""
        self._unjudged: list[tuple[Mapping[int, CellReport | None], bool, bool]] = []
        """What ranks reported of cells that have ended while others ran; whether these failed, and were unmatched."""
        self._abandoned: Requests = {}
        self._listening: collections.deque[tuple[Cell, list[str]]] = collections.deque()
        self._count = 0
        self._ended = ""
        """Why there is no group any more."""

    # -- which ranks are free

    @property
    def stuck(self) -> list[int]:
        """Ranks that still run a cell that was given up, or do something else that was."""
        ended = self._ranks.ended
        cells = [rank for rank in unfinished(self._abandoned) if rank not in ended]
        return sorted({*cells, *self._ranks.busy})

    def forget(self, ranks: Collection[int]) -> None:
        """These ranks have new processes."""
        self._abandoned = {rank: future for rank, future in self._abandoned.items() if rank not in ranks}
        for rank in ranks:
            self._ranks.abandoned.pop(rank, None)
            self._ranks.gpu_lost.pop(rank, None)

    def active_on(self, ranks: Collection[int], before: Cell | None = None) -> list[Cell]:
        """The cells that run on some of `ranks`, or wait for them; only those that came `before` that one."""
        found = []
        for cell in list(self._active):
            if cell is before:
                break
            if not set(cell.ranks).isdisjoint(ranks):
                found.append(cell)
        return found

    def ensure_not_running(self, ranks: Collection[int], why: str = "", before: Cell | None = None) -> None:
        """Raise GroupError if a cell runs on some of `ranks`; `why`, if it is not plain, these are needed."""
        active = self.active_on(ranks, before)
        if active:
            texts = [cell.busy_text(sorted(set(cell.ranks).intersection(ranks))) for cell in active]
            raise GroupError("\n".join([*texts, *filter(None, [why])]))

    def ensure_idle(self) -> None:
        """Raise GroupError if a cell that the user gave up still runs: the next one would wait for it unseen."""
        stuck = self.settle()
        if stuck:
            places = places_text(self._ranks.places(stuck))
            what = still_text(stuck, self._ranks.busy)
            raise GroupError(f"{what}:\n{places}\n{way_out(stuck)}")

    def settle(self) -> list[int]:
        """Stop the ranks that are `stuck` once more, and wait while they make progress; returns those that do not."""
        if self.stuck:
            if unfinished(self._abandoned):
                self._manager.release(unfinished(self._abandoned) if self._active else None)
            under_way: dict[int, Any] = {rank: given.request for rank, given in self._ranks.abandoned.items()}
            under_way |= {rank: self._abandoned[rank] for rank in unfinished(self._abandoned)}
            self._ranks.interrupt({rank: under_way[rank].msg_id for rank in self.stuck})
            ending = Ending(self._ranks, self.stuck, asleep=ASLEEP_SECONDS)
            while True:
                concurrent.futures.wait([under_way[rank] for rank in self.stuck], timeout=LOOK_SECONDS)
                if not ending.moving(self.stuck):
                    break
        return self.stuck

    def _release_for(self, cell: Cell) -> None:
        """What waits in a collective for `cell` fails; not what other cells do."""
        alone = all(one is cell or one.state != "running" for one in list(self._active))
        self._manager.release(None if alone else cell.ranks)

    # -- run

    def number(self) -> int:
        """That of the cell that is given now: the notebook's, or in a script the next."""
        self._count += 1
        return cell_number() or self._count

    def admit(self, cell: Cell, limits: Limits, until_it_ends: contextlib.ExitStack) -> RunningCell:
        """From now on its ranks are busy with `cell`, and `until_it_ends` the stop button stops it.

        A KeyboardInterrupt between this and `run` would leave a cell that never ends.
        """
        running = RunningCell(self._ranks, lambda: self._release_for(cell), cell, limits)
        cell.press_stop = running.press_stop
        cell.recording.most = self.history.keep_output_bytes
        until_it_ends.enter_context(stopping.calling(running.press_stop))
        self._active[cell] = running
        self.history.add(cell)
        return running

    def run(self, running: RunningCell, unmatched: bool, asked: Asked) -> None:
        """Run a cell that was admitted to its end. `unmatched`: it may begin collectives on some ranks only.

        `asked` is what the ranks are told of it besides. Raises CellError, CellTimeout, CellInterrupted, or GroupError
        if the controller ends.
        """
        self._go(running, unmatched, asked)
        error, running.cell.error = running.cell.error, None  # it will have the frames of all who called this
        if error is not None:
            raise error
        for _, reply in sorted(running.replies.items()):
            if area.show_pages(reply.result().payload):
                break  # the first rank's

    def start(self, running: RunningCell, unmatched: bool, asked: Asked, ready: Callable[[], object] | None) -> None:
        """Run a cell that was admitted in the background: now, or when those before it have ended well.

        `ready` makes ranks that are free fit for it then, and raises GroupError if they cannot be; None: they are.
        """
        before = self._before(running.cell)  # now: one that fails before the thread begins is waited for, too
        sent: Future[None] = Future()
        args = running, unmatched, asked, ready, before, sent
        thread = threading.Thread(target=self._in_background, args=args, name=f"ddip {running.cell.text}", daemon=True)
        try:
            thread.start()
            if ready is None:
                running.cell.begin()
                running.send(asked)
        except BaseException as error:
            sent.cancel()
            running.cell.end(error)
            self._end(running, unmatched, over=True)
            raise
        sent.set_result(None)

    def _in_background(
        self,
        running: RunningCell,
        unmatched: bool,
        asked: Asked,
        ready: Callable[[], object] | None,
        before: list[Cell],
        sent: Future[None],
    ) -> None:
        concurrent.futures.wait([sent])
        if sent.cancelled():
            return
        with notices_in(running.output.page):
            if ready is None or self._begins(running, ready, asked, before):
                self._go(running, unmatched, None)

    def _begins(self, running: RunningCell, ready: Callable[[], object], asked: Asked, before: list[Cell]) -> bool:
        """Wait for the cells `before` this one, and send it; returns False if it has ended without that."""
        try:
            self._wait_for_turn(running, before)
            with self._turn:
                if self._ended:  # while it waited for this; the group that `ready` knows may be another
                    raise GroupError(self._ended)
                ready()
                running.cell.begin()
                running.send(asked)
        except BaseException as error:  # on a thread of its own: it is the cell's
            running.cell.end(error)
            running.cell.outcome = "not_run"
            self._end(running, False, over=True)
            return False
        return True

    def _before(self, cell: Cell) -> list[Cell]:
        """What `cell` has to wait for: until its ranks are free, and all ranks if the group must be formed again."""
        all_ranks = range(len(self._ranks.members))
        return self.active_on(cell.ranks if self._manager.healthy else all_ranks, cell)

    def _wait_for_turn(self, running: RunningCell, before: list[Cell]) -> None:
        """Wait for the cells `before` this one, and for what must be waited for then. Raises GroupError."""
        cell = running.cell
        while before:
            if not running.wait_for(before):
                what = "and the group was ended" if self._ended else "and was stopped"
                raise GroupError(f"{cell.text} waited for {ranks_text(cell.ranks)}, {what}; it did not run")
            failed = next((one for one in before if one.outcome not in (None, "ok")), None)
            if failed is not None:
                what = f"{failed.text}, for which {cell.text} waited, {failed.outcome_text}"
                raise GroupError(f"{what}; {cell.text} did not run")
            before = self._before(cell)

    def _go(self, running: RunningCell, unmatched: bool, asked: Asked | None) -> None:
        """Follow a cell to its end; never raises. `asked`: it has still to be sent."""
        cell = running.cell
        raised: BaseException | None = None
        try:
            if asked is not None:
                cell.begin()
                running.send(asked)
            running.follow()
        except BaseException as error:  # the controller, or the group, has ended
            raised = error
        try:
            running.finish(over=raised is not None)
        except Exception as error:  # the page may be gone; the cell ends all the same
            log.warning("the end of %s could not be shown: %s: %s", cell.text, type(error).__name__, error)
        if not self._ended:
            self._do_after(running)
        cell.end(raised or running.error(), stuck=raised is None and bool(running.unfinished))
        self._end(running, unmatched, over=raised is not None)

    def _do_after(self, running: RunningCell) -> None:
        try:
            with self._turn:
                running.after(running.unfinished)
        except BaseException as error:  # also a stop: the cell has ended, and its end goes on
            notify(f"{running.cell.text}: {error}")

    def _end(self, running: RunningCell, unmatched: bool, over: bool) -> None:
        """The cell has ended: what comes of that for the group; `over`: nothing."""
        cell = running.cell
        try:
            output = running.output
            if isinstance(output, BackgroundOutput):
                output.end(running.end_text, cell.error_text, beside(cell, output.rich))
            if self._ended:
                return
            with self._turn:
                self._active.pop(cell, None)
                if running.replies:
                    self._listen_on(running)
                self._take_stock(running, unmatched, over)
            self.history.trim()
        except BaseException as error:  # who waits for the cell raises it
            cell.error = cell.error or error
        finally:
            self._active.pop(cell, None)
            cell.done.set_result(None)

    def _take_stock(self, running: RunningCell, unmatched: bool, over: bool) -> None:
        """Note how the cell has left the group, then tell the user: what is printed may fail."""
        failed = running.ending != "good"  # also where the cell has caught the interrupt of a stop
        left = {rank: future for rank, future in running.replies.items() if not future.done()}
        self._abandoned = {rank: f for rank, f in self._abandoned.items() if not f.done()} | left
        if left:
            self._manager.healthy = False
        self._ranks.note_lost_gpus(running.reports)
        trained = False
        if not over and running.replies:
            told = {rank: running.reports.get(rank) for rank in running.replies}
            trained = self._manager.iterations.note_end(told, failed)
        if over or failed:
            self._differences.note_fault(running.name, trained)
        if not over and not left:
            self._unjudged.append((running.reports, failed, unmatched))
        judged = self._judge()
        tell_aborted(running.reports)
        if not over:
            tell_unchecked(running.ending, running.reports)
            tell_settings(running.ending, running.reports)
        if self._manager.healthy:  # else the ranks get their numbers anew
            tell_replaced(judged)

    def _judge(self) -> dict[int, CellReport | None]:
        """Find out how the group is, if no cell runs; return the reports that were looked at."""
        if any(one.state == "running" for one in self._active):
            return {}
        unjudged, self._unjudged = self._unjudged, []
        if not unjudged or self._abandoned:
            return {}
        reports = {rank: report for one, _, _ in unjudged for rank, report in one.items()}
        self._manager.update_health(
            reports, any(failed for _, failed, _ in unjudged), any(meant for _, _, meant in unjudged)
        )
        return reports

    def _listen_on(self, running: RunningCell) -> None:
        """What comes late is shown for the last cells only."""
        self._listening.append((running.cell, [request.msg_id for request in running.replies.values()]))
        if len(self._listening) > LATE_CELLS:
            cell, requests = self._listening.popleft()
            for msg_id in requests:
                self._ranks.cluster.stop_listening(msg_id)
            cell.output = None

    def end_all(self, why: str) -> None:
        """The group ends: those that run end with it, and tell the user so."""
        self._ended = why
        active = list(self._active.items())
        for _, running in active:
            running.end_with_group(why)
        concurrent.futures.wait([cell.done for cell, _ in active], timeout=END_SECONDS)
