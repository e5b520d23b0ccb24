"""Let the ranks save their variables together and load them; follow a schedule of saves.

between cells    the notebook asks the ranks to save: ``%dipsave``, or a schedule after a cell
within a cell    the cell's options carry the schedule; the ranks agree at a point of the loop (``rank/saves/points``)
in threads       ranks write a save in the background; the notebook asks how it went, and waits for it at the end
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence

from ddip.errors import GroupError, RequestFailed, RequestInterrupted, TransferError
from ddip.group.lifecycle import Lifecycle
from ddip.output.area import notify, stop_name
from ddip.protocol import on_rank
from ddip.protocol.cell_messages import CellOptions, SaveSchedule
from ddip.protocol.reports import LoadReport, SaveReport, SaveStatus

log = logging.getLogger("ddip")
ANSWER_SECONDS = 2.0
"""Longest wait for the answer of a rank."""
POINT_SECONDS = 0.2
"""Time between two looks whether a loop has reached a point at which it saves."""
NOTHING: SaveStatus = {"warned": 0, "writing": False, "error": ""}
REPLACED = (
    "ranks have been replaced, so ddip no longer saves to {folder}; load it with %dipload {folder}, then type %dipsave "
    "--every again"
)

HELD = "saves to {folder} wait, and the former save stays: {why}"
TORN = "a cell has failed; they continue after the next cell that succeeds on all ranks"
DIFFER = (
    "the ranks differ in {names}; %dipsync copies rank 0's values, %dipload {folder} loads the former save, and "
    "--every again saves each rank's own values"
)
UNKNOWN = "the ranks could not be compared"
UNKNOWN_SINCE_FAULT = (
    "the ranks could not be compared after a fault, and may differ; type --every again after %dipload {folder}, or to "
    "save each rank's own values"
)
LOOK_SECONDS = 5.0
"""Least time between two comparisons of the ranks while saves wait."""
LOADED = "everything was loaded: the interrupt came too late"
SAVED_UNKNOWN = "the ranks could not be compared after a fault; the save has each rank's own values"
SAVED_DIFFERING = "the ranks differ in {names} since a fault, and the save has each rank's own values"


class Saves:
    """The saves of one group; ``Group`` describes the methods with the same names."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._schedule: SaveSchedule | None = None
        self._scheduled_ranks: list[tuple[int, int]] = []
        """Engines and PIDs of the ranks for which the schedule was made."""
        self._held = ""
        """Reason why saves by schedule wait, as it was last printed; empty if they do not wait."""
        self._looked_at = 0.0
        """Time of the last comparison after which saves wait; 0 if the next one must not wait."""
        self._saved_at = 0.0
        self._writes = False
        """True while a save in the background may not be complete."""
        self._known_error = ""

    @property
    def schedule(self) -> SaveSchedule | None:
        """The schedule of saves; None after ranks were replaced, since new ranks lack variables."""
        if self._schedule is not None and self._scheduled_ranks != self._engines:
            notify(REPLACED.format(folder=self._schedule["folder"]))
            self._schedule = None
        return self._schedule

    def add_schedule(self, asked: CellOptions) -> None:
        """Add the schedule to the options of a cell, unless the ranks differ since a fault.

        The caller holds the group's `turn`, and the ranks of the cell are ready for it.
        """
        if (schedule := self.schedule) is None:
            return
        if self._lifecycle.parts.differences.is_unsettled and (self._runs_cells or self._is_held(schedule["folder"])):
            return
        asked["saves"] = schedule

    @property
    def _engines(self) -> list[tuple[int, int]]:
        return [(member.engine, member.pid) for member in self._lifecycle.parts.ranks.members]

    def _is_held(self, folder: str) -> bool:
        """Return True if the ranks differ since a fault, or could not be compared; print why if it is new."""
        differences = self._lifecycle.parts.differences
        if differences.is_unknown:
            return self._hold(folder, UNKNOWN_SINCE_FAULT.format(folder=folder))
        try:
            names = differences.still_differing()
            why = DIFFER.format(names=", ".join(names), folder=folder) if names else ""
        except RequestFailed:
            log.debug("the ranks could not be compared", exc_info=True)
            why = UNKNOWN
        return self._hold(folder, why)

    def _must_wait(self, folder: str) -> bool:
        """Return True if no save may be taken now: ranks may be within a step, different, or not idle."""
        with self._lifecycle.turn:
            parts = self._lifecycle.parts
            if self._runs_cells or parts.ranks.ended or parts.cells.stuck:
                return True
            if parts.differences.is_torn:
                return self._hold(folder, TORN)
            if self._held and time.monotonic() - self._looked_at < LOOK_SECONDS:
                return True
            return self._is_held(folder)

    def _hold(self, folder: str, why: str) -> bool:
        """Note why saves wait, empty if they do not, and print it if it is new; return True if they wait."""
        if why and why != self._held:
            notify(HELD.format(folder=folder, why=why))
        self._held, self._looked_at = why, 0.0 if why in ("", TORN) else time.monotonic()
        return bool(why)

    @property
    def _runs_cells(self) -> bool:
        return bool(self._lifecycle.parts.cells.active_on(range(self._lifecycle.size)))

    def save(self, folder: str, names: Sequence[str], background: bool) -> SaveReport:
        """Save variables of all ranks to `folder`."""
        report = self._save(folder, names, background)
        if background:
            self._known_error = ""  # the same error is reported again
        return report

    def _save(self, folder: str, names: Sequence[str], background: bool) -> SaveReport:
        with self._lifecycle.turn:
            self._lifecycle.ensure_ready_for_cell(needs_group=True)
            self._writes = background
            self._report_differing()
            call = on_rank.save_variables(_whole_path(folder), list(names), background)
            report = self._lifecycle.parts.manager.ask_together(call)[0]
        if report["error"]:
            raise TransferError(f"nothing was saved: {report['error']}")
        return report

    def _report_differing(self) -> None:
        """Print which variables differ since a fault, as a save is about to be taken."""
        differences = self._lifecycle.parts.differences
        if differences.is_unknown:
            notify(SAVED_UNKNOWN)
        with contextlib.suppress(RequestFailed):
            if names := differences.still_differing():
                notify(SAVED_DIFFERING.format(names=", ".join(names)))

    def load(self, folder: str, names: Sequence[str], anyway: bool) -> LoadReport:
        """Load saved variables into all ranks."""
        with self._lifecycle.turn:
            self._lifecycle.ensure_ready_for_cell(needs_group=True)
            call = on_rank.load_variables(_whole_path(folder), list(names), anyway)
            try:
                report = self._lifecycle.parts.manager.ask_together(call)[0]
            except RequestInterrupted as error:
                if error.has_succeeded:
                    raise RequestInterrupted(LOADED) from None
                raise
            if not report["error"]:
                with contextlib.suppress(RequestFailed):  # then saves by schedule wait, as before
                    self._lifecycle.parts.differences.settle_variables(report["loaded"])
        if report["error"]:
            raise TransferError(f"nothing was loaded: {report['error']}")
        self._looked_at = 0.0
        return report

    def save_every(self, seconds: float | None, folder: str, names: Sequence[str]) -> None:
        """Begin a schedule of saves, or end it for None."""
        self._schedule, self._held, self._known_error = None, "", ""
        if seconds is not None:
            with self._lifecycle.turn:
                if not self._runs_cells and not self._lifecycle.parts.ranks.ended:
                    self._report_differing()
                    with contextlib.suppress(RequestFailed):  # then the next cell does it
                        self._lifecycle.parts.ranks.ask(range(self._lifecycle.size), on_rank.watch_warnings())
                self._lifecycle.parts.differences.settle()
            self._schedule = {"folder": _whole_path(folder), "names": list(names), "seconds": seconds}
        self._saved_at, self._scheduled_ranks = time.monotonic(), self._engines

    def save_if_due(self) -> SaveReport | None:
        """Save in the background if the schedule asks for it, and no cell runs."""
        due = self.schedule
        if due is None or time.monotonic() - self._saved_at < due["seconds"] or self._runs_cells:
            return None
        if self._must_wait(due["folder"]):
            return None
        self._saved_at = time.monotonic()
        return self._save(due["folder"], due["names"], background=True)

    def save_before_end(self, seconds: float) -> bool:
        """Save at the next point of the running cell, within `seconds`; at once if none runs."""
        due, end = self.schedule, time.monotonic() + seconds
        if due is None:
            return False
        if self._runs_cells:
            ranks, before = self._lifecycle.parts.ranks, self.status()["warned"]
            ranks.call_on_control_channel(ranks.live, on_rank.request_save(), seconds=ANSWER_SECONDS)
            while self._runs_cells and time.monotonic() < end:
                if self.status()["warned"] > before:
                    return True
                time.sleep(POINT_SECONDS)
            if self._runs_cells:
                return False
        if self._must_wait(due["folder"]):
            return False
        self._save(due["folder"], due["names"], background=False)
        return True

    def status(self) -> SaveStatus:
        """Return how the saves of rank 0 go, also while it runs a cell."""
        ranks = self._lifecycle.parts.ranks
        return ranks.call_on_control_channel([0], on_rank.describe_saves(), seconds=ANSWER_SECONDS)[0] or NOTHING

    def background_error(self) -> str:
        """Return once why the last save in the background failed; empty if it runs or is complete."""
        if not self._writes and self._schedule is None:
            return ""
        status = self.status()
        self._writes, error = status["writing"], status["error"]
        known, self._known_error = self._known_error, error
        return error if error != known else ""

    def finish(self) -> None:
        """Wait until the ranks have written a save in the background, unless the user presses stop."""
        if not self._lifecycle.alive or not (self._writes or self._schedule is not None):
            return
        try:
            is_told = False
            while not self._lifecycle.parts.ranks.ended and self.status()["writing"]:
                if not is_told:
                    notify(f"waiting until the last save is written; {stop_name()} gives it up")
                is_told = True
                time.sleep(POINT_SECONDS)
            if not self._lifecycle.parts.ranks.ended and (error := self.background_error()):
                notify(f"the last save in the background failed: {error}")
        except GroupError:
            log.debug("the controller ended before the last save was written", exc_info=True)
        except KeyboardInterrupt:
            notify("the last save was given up; the save before it stays")


def _whole_path(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))
