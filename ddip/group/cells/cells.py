"""Run a group's cells: in sequence, or concurrently if they are on different ranks.

    run     the caller's thread follows the cell to its end (``running.py``)
    start   a thread of its own follows it; the caller continues, and requests for its busy ranks are refused or wait

The group's `turn` lock covers work on state that all cells share: sending a cell, updating the group's health after
one, and calls by ``group.py`` and ``lifecycle.py`` on the main threads of ranks.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from ddip.errors import BadInput, GroupError, ranks_text
from ddip.group import stopping
from ddip.group.cells.cell import Cell
from ddip.group.cells.cell_state import LOOK_SECONDS, Limits
from ddip.group.cells.cell_status import cell_bundle
from ddip.group.cells.differences import Differences
from ddip.group.cells.history import History
from ddip.group.cells.running import (
    RunningCell,
    tell_aborted,
    tell_half_steps,
    tell_replaced,
    tell_settings,
    tell_unchecked,
)
from ddip.group.members.ranks import Ranks, Requests, unfinished_ranks
from ddip.group.members.watch import StopProgress
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.group.process_group.signatures import DIFFERENT
from ddip.output import area
from ddip.output.area import cell_number, notices_in, notify
from ddip.output.cells.background_page import BackgroundOutput
from ddip.output.tables.tables import places_text, still_text
from ddip.protocol.reports import CellReport

log = logging.getLogger("ddip")

ASLEEP_SECONDS = 6.0
"""Time that the next cell waits for a rank that sleeps after the code of an earlier one has ended: torch waits 5 s for
each worker of a data loader that the garbage collector finalizes."""
LATE_CELLS = 20
"""Number of latest cells whose late output is still shown."""
END_SECONDS = 3.0
"""Time that the threads of background cells may take to notice that their group has ended."""


class Cells:
    """The running and queued cells of one group, and the state of its ranks after ended cells."""

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
        """The cells that run or wait for others, in order of submission."""
        self._pending_reports: list[tuple[Mapping[int, CellReport | None], bool, bool, bool]] = []
        """Cells that ended while others ran: reports by rank, whether the cell failed, whether it was unmatched, and
        whether its different collectives are reported already."""
        self._abandoned: Requests = {}
        self._listening: collections.deque[tuple[Cell, list[str]]] = collections.deque()
        self._count = 0
        self._ended = ""
        """The reason why the group has ended; empty while it runs."""

    # -- which ranks are free

    @property
    def stuck(self) -> list[int]:
        """The ranks that still run an abandoned cell or request."""
        ended = self._ranks.ended
        cells = [rank for rank in unfinished_ranks(self._abandoned) if rank not in ended]
        return sorted({*cells, *self._ranks.busy})

    def forget(self, ranks: Collection[int]) -> None:
        """Discard the state of replaced ranks."""
        self._abandoned = {rank: future for rank, future in self._abandoned.items() if rank not in ranks}
        for rank in ranks:
            self._ranks.abandoned.pop(rank, None)
            self._ranks.gpu_lost.pop(rank, None)

    def active_on(self, ranks: Collection[int], before: Cell | None = None) -> list[Cell]:
        """Return the running and queued cells that use some of `ranks`.

        With `before`, only cells that were submitted before that one.
        """
        active = []
        for cell in list(self._active):
            if cell is before:
                break
            if not set(cell.ranks).isdisjoint(ranks):
                active.append(cell)
        return active

    def ensure_not_running(self, ranks: Collection[int], why: str = "", before: Cell | None = None) -> None:
        """Raise GroupError if a cell runs on some of `ranks`, or is queued for them; does not wait.

        `why` is appended to the message, as the reason why the ranks must be free. With `before`, cells submitted after
        that one are ignored.
        """
        active = self.active_on(ranks, before)
        if active:
            texts = [cell.busy_text(sorted(set(cell.ranks).intersection(ranks))) for cell in active]
            raise GroupError("; ".join([*texts, *filter(None, [why])]))

    def end_abandoned(self) -> None:
        """Interrupt ranks that still run abandoned cells or requests, and raise GroupError if some do not end.

        It waits as long as these ranks make progress; without it, the next cell would silently wait for them. Running
        cells that are not abandoned are ignored. Raises RequestInterrupted if the stop button ends the wait.
        """
        stuck = self.settle()
        if stuck:
            places = places_text(self._ranks.stack_locations(stuck))
            problem = still_text(stuck, self._ranks.busy)
            raise GroupError(f"{problem}:\n{places}\n{self._ranks.advise_on_stuck(stuck)}")

    def settle(self) -> list[int]:
        """Interrupt the `stuck` ranks again, wait while they make progress, and return those that are still stuck.

        Aborts the collectives of abandoned cells first. Raises RequestInterrupted if the stop button ends the wait.
        """
        if self.stuck:
            with stopping.note_presses(
                "the wait for ranks that do not stop was interrupted; nothing has run"
            ) as button:
                if unfinished_ranks(self._abandoned):
                    self._manager.release(unfinished_ranks(self._abandoned) if self._active else None)
                under_way: dict[int, Any] = {rank: given.request for rank, given in self._ranks.abandoned.items()}
                under_way |= {rank: self._abandoned[rank] for rank in unfinished_ranks(self._abandoned)}
                self._ranks.interrupt({rank: under_way[rank].msg_id for rank in self.stuck})
                size = sum(given.size for given in self._ranks.abandoned.values())
                self._ranks.wait_for_links({rank: under_way[rank] for rank in self.stuck}, button, size)
                ending = StopProgress(self._ranks, self.stuck, asleep=ASLEEP_SECONDS)
                while not button.pressed:
                    button.wait_for([under_way[rank] for rank in self.stuck], LOOK_SECONDS)
                    if not ending.find_moving(self.stuck):
                        break
        return self.stuck

    def _is_alone(self, cell: Cell) -> bool:
        """Return True if no other cell can begin collectives: none is active, and the user waits for `cell`."""
        return not cell.background and list(self._active) == [cell]

    def _abort_collectives_of(self, cell: Cell) -> None:
        """Abort the collectives that wait in `cell`, without touching those of other cells."""
        alone = all(other is cell or other.state != "running" for other in list(self._active))
        self._manager.release(None if alone else cell.ranks)

    def find_asking(self, number: int | None) -> RunningCell | None:
        """Return the background cell that waits for answers, with this `number` if given; None: none does.

        Raises BadInput if the cell with this number does not wait.
        """
        asking = [running for cell, running in list(self._active.items()) if cell.background and running.questions]
        if number is None:
            return asking[0] if asking else None
        for running in asking:
            if running.cell.number == number:
                return running
        known = " or ".join(f"%dipdebug {running.cell.number}" for running in asking)
        instead = f"type {known}" if known else "no cell in the background does"
        raise BadInput(f"%dipdebug {number}: cell {number} does not wait at a prompt; {instead}")

    # -- running cells

    def number(self) -> int:
        """Return the number for a new cell: the notebook's, or the next one in a script.

        Call it once per cell.
        """
        self._count += 1
        return cell_number() or self._count

    def admit(self, cell: Cell, limits: Limits, until_it_ends: contextlib.ExitStack) -> RunningCell:
        """Register `cell` as active and in the history, and return it for `run` or `start`.

        Its ranks are busy until it ends. The caller has made sure that the ranks are free, or that the cell will wait
        for them. Sends nothing. `limits` are the cell's time limits. Until `until_it_ends` closes, the stop button
        stops the cell; a KeyboardInterrupt could otherwise leave a cell that never ends.
        """
        abort, is_alone = partial(self._abort_collectives_of, cell), partial(self._is_alone, cell)
        running = RunningCell(self._ranks, abort, is_alone, self._manager, cell, limits)
        cell.press_stop = running.press_stop
        cell.recording.most = self.history.keep_output_bytes
        until_it_ends.enter_context(stopping.call_on_press(running.press_stop))
        self._active[cell] = running
        self.history.add(cell)
        return running

    def run(self, running: RunningCell) -> None:
        """Send an admitted cell to its ranks, show its output, and return when it has ended.

        Raises CellError, CellTimeout or CellInterrupted, and GroupError if the controller ends.
        """
        self._run_to_end(running)
        error, running.cell.error = running.cell.error, None  # else its traceback would keep the frames of all callers
        if error is not None:
            raise error
        for _, reply in sorted(running.replies.items()):
            if area.show_pages(reply.result().payload):
                break  # only the first rank's pages are shown

    def start(self, running: RunningCell, ready: Callable[[], object] | None) -> None:
        """Start an admitted cell, now or after the cells that it must wait for, and follow it on a thread.

        Returns without waiting. If `ready` is None, the ranks are free, and an error of sending the cell is raised; the
        caller holds the group's `turn`. Otherwise, the thread waits for the earlier cells and calls `ready`, which
        prepares the ranks and may raise GroupError. If that fails, or an earlier cell, this cell does not run, and has
        the error.
        """
        # determined before the thread begins, so that a cell that fails until then also counts
        before = self._cells_before(running.cell)
        sent: Future[None] = Future()
        args = running, ready, before, sent
        thread = threading.Thread(target=self._in_background, args=args, name=f"ddip {running.cell.text}", daemon=True)
        try:
            thread.start()
            if ready is None:
                running.cell.begin()
                running.send()
        except BaseException as error:
            sent.cancel()
            running.cell.end(error)
            self._finish_cell(running, over=True)
            raise
        sent.set_result(None)

    def _in_background(
        self, running: RunningCell, ready: Callable[[], object] | None, before: list[Cell], sent: Future[None]
    ) -> None:
        concurrent.futures.wait([sent])
        if sent.cancelled():
            return
        with notices_in(running.output.page):
            if ready is None or self._wait_and_send(running, ready, before):
                self._run_to_end(running)

    def _wait_and_send(self, running: RunningCell, ready: Callable[[], object], before: list[Cell]) -> bool:
        """Wait for the cells `before` this one, call `ready`, then send the cell; return False if unsent.

        Never raises: an error becomes the error of the cell, which did not run then.
        """
        try:
            self._wait_for_turn(running, before)
            with self._turn:
                if self._ended:  # while waiting for the lock; `ready` may know a newer group
                    raise GroupError(self._ended)
                ready()
                running.cell.begin()
                running.send()
        except BaseException as error:  # this thread belongs to the cell, so the error becomes the cell's
            running.cell.end(error)
            running.cell.outcome = "not_run"
            self._finish_cell(running, over=True)
            return False
        return True

    def _cells_before(self, cell: Cell) -> list[Cell]:
        """Return earlier active cells that share a rank with `cell`, or all of them if a rebuild is due."""
        all_ranks = range(len(self._ranks.members))
        return self.active_on(cell.ranks if self._manager.healthy else all_ranks, cell)

    def _wait_for_turn(self, running: RunningCell, before: list[Cell]) -> None:
        """Wait for the cells `before` this one, and for any that it must wait for after that.

        Raises GroupError if one of them fails, or if this cell is stopped or the group ends meanwhile.
        """
        cell = running.cell
        while before:
            if not running.wait_for(before):
                why = "the group was ended" if self._ended else "it was stopped"
                raise GroupError(f"{cell.text} did not run: {why} while it waited for {ranks_text(cell.ranks)}")
            failed = next((other for other in before if other.outcome not in (None, "ok")), None)
            if failed is not None:
                raise GroupError(f"{cell.text} did not run: it waited for {failed.text}, which {failed.outcome_text}")
            before = self._cells_before(cell)

    def _run_to_end(self, running: RunningCell) -> None:
        """Follow a cell to its end, show that, and update the group; never raises, as the cell has the error.

        Sends the cell first unless it has been sent.
        """
        cell = running.cell
        raised: BaseException | None = None
        try:
            if not running.replies:
                cell.begin()
                running.send()
            running.follow()
        except BaseException as error:  # the controller, or the group, has ended
            raised = error
        try:
            running.finish(over=raised is not None)
        except Exception as error:  # the page may be closed; the cell must still end
            log.warning("the end of %s could not be shown: %s: %s", cell.text, type(error).__name__, error)
        if not self._ended:
            self._run_after(running)
        cell.end(raised or running.error(), stuck=raised is None and bool(running.unfinished))
        self._finish_cell(running, over=raised is not None)

    def _run_after(self, running: RunningCell) -> None:
        try:
            with self._turn:
                running.after(running.unfinished)
        except BaseException as error:  # even a KeyboardInterrupt: the cell has ended, and the remaining steps must run
            notify(f"{running.cell.text}: {error}")

    def _finish_cell(self, running: RunningCell, over: bool) -> None:
        """Update the group after the end of a cell, and set the cell's `done`; never raises.

        `over`: the cell did not run to its end, so there is nothing to learn from it.
        """
        cell = running.cell
        try:
            output = running.output
            if isinstance(output, BackgroundOutput):
                output.end(running.end_text, cell.error_text, cell_bundle(cell, output.rich))
            if self._ended:
                return
            with self._turn:
                self._active.pop(cell, None)
                if running.replies:
                    self._listen_on(running)
                self._record_end(running, over)
            self.history.trim()
        except BaseException as error:  # `Cell.wait` raises it
            cell.error = cell.error or error
        finally:
            self._active.pop(cell, None)
            cell.done.set_result(None)

    def _record_end(self, running: RunningCell, over: bool) -> None:
        """Record how the cell left the group, then report it to the user, in this order as printing may fail.

        `over` as in `_finish_cell`. The caller holds the group's `turn`.
        """
        failed = running.ending != "good"  # true even if the cell caught the interrupt of a stop
        unfinished_replies = {rank: future for rank, future in running.replies.items() if not future.done()}
        self._abandoned = {rank: f for rank, f in self._abandoned.items() if not f.done()} | unfinished_replies
        if unfinished_replies:
            self._manager.healthy = False
        self._ranks.note_lost_gpus(running.reports)
        trained = False
        reports = {rank: running.reports.get(rank) for rank in running.replies}
        if not over and reports:
            trained = self._manager.iterations.note_end(reports, failed)
            failed |= trained  # a good cell may have caught an error within an iteration
        if over or failed:
            self._differences.note_fault(running.name, trained)
        elif len(running.replies) == len(self._ranks.members):
            self._differences.is_torn = False
        if not over:
            self._pending_reports.append((reports, failed, running.unmatched, bool(running.different)))
        checked = self._update_health()
        tell_aborted(running.reports)
        if running.different and running.ending == "good":  # the cell has caught the error that would say so
            notify(DIFFERENT.format(lines=running.different))
        if not over:
            tell_unchecked(running.ending, running.reports)
            tell_half_steps(running.ending, running.reports)
            tell_settings(running.ending, running.reports)
        if self._manager.healthy:  # otherwise the rebuild sets `rank` and `world_size` again
            tell_replaced(checked)

    def _update_health(self) -> dict[int, CellReport | None]:
        """Check the group's health if no cell is running; return the reports that were checked, by rank.

        Returns none if a cell runs, or if none has ended since.
        """
        if any(cell.state == "running" for cell in self._active):
            return {}
        pending, self._pending_reports = self._pending_reports, []
        if not pending:
            return {}
        reports = {rank: report for by_rank, *_ in pending for rank, report in by_rank.items()}
        self._manager.update_health(
            reports,
            failed=any(failed for _, failed, _, _ in pending),
            unmatched=any(unmatched for _, _, unmatched, _ in pending),
            is_reported=any(is_reported for _, _, _, is_reported in pending),
        )
        return reports

    def _listen_on(self, running: RunningCell) -> None:
        """Keep listening for late output of this cell, and stop listening for that of the oldest one."""
        self._listening.append((running.cell, [request.msg_id for request in running.replies.values()]))
        if len(self._listening) > LATE_CELLS:
            cell, requests = self._listening.popleft()
            for msg_id in requests:
                self._ranks.cluster.stop_listening(msg_id)
            cell.output = None

    def end_all(self, why: str) -> None:
        """End all running and queued cells because the group ends, and wait for that, at most END_SECONDS.

        `why`: the message of the cells' errors.
        """
        self._ended = why
        active = list(self._active.items())
        for cell, running in active:
            cell.noted = True  # the user has ended the group, and needs no line about its cells
            running.end_with_group(why)
        concurrent.futures.wait([cell.done for cell, _ in active], timeout=END_SECONDS)
