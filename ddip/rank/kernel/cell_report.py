"""The report that a rank adds to the reply of each cell."""

from __future__ import annotations

import time
from typing import Any

from ddip.protocol.cell_messages import CellOptions
from ddip.protocol.remote import call_target
from ddip.protocol.reports import CellReport, IterationReport
from ddip.rank.kernel.shell import RankShell
from ddip.rank.runtime import c10d, stacks
from ddip.rank.runtime.gpu import gpu

UNKNOWN: IterationReport = {
    "forward": True,
    "unfinished": True,
    "in_step": False,
    "backwards": 0,
    "steps": 0,
    "in_thread": False,
}
"""The most pessimistic report: the cell may have ended anywhere in a training iteration."""
_unchecked: list[str] = []
"""Errors of `_call_checked` since the cell began."""


@stacks.runs_around_cells
def _call_checked(target: str, *args: Any) -> Any:
    """Return the result of ``call_target(target, *args)``, or None after an error, which is then reported."""
    reply = call_target(target, *args)
    if "error" in reply:
        _unchecked.append(f"{target}: {reply['error']}: {reply['message']}")
    return reply.get("ok")


def begin_cell(asked: CellOptions) -> None:
    """Record the state that the cell may change, and reset the state that is kept per cell.

    `asked`: the notebook's options of the cell. Never raises: errors are added to the report of the cell.
    """
    _unchecked.clear()
    _call_checked("process_group.membership.begin_cell")
    _call_checked("objects.iteration.begin_cell")
    _call_checked("runtime.process_settings.begin_cell")
    facts = asked.get("name", ""), asked.get("ranks", []), asked.get("rich", True), asked.get("script")
    _call_checked("runtime.current.begin_cell", *facts)
    _call_checked("saves.points.begin_cell", asked.get("saves"))


@stacks.runs_around_cells
def build_report(shell: RankShell) -> CellReport:
    """Build the report of the cell that has just ended, without its ``seconds``.

    Errors in ddip itself are put into the report instead of raised: the notebook must learn that the cell has ended.
    """
    report: CellReport = {"released": False, "state": "none"}
    reply = call_target("process_group.membership.report_state")
    if "ok" in reply:
        report.update(reply["ok"])
        report["released"] = report["released"] or c10d.is_connection_lost(shell.raised)
    else:
        report["fault"] = f"{reply['error']}: {reply['message']}"
    report["iteration"] = _call_checked("objects.iteration.report_position") or UNKNOWN
    report["gpu"] = _call_checked("runtime.gpu.settle_gpu") or "under way"
    if report["gpu"] == "lost":
        report["gpu_lost"] = gpu.lost
    replaced = _call_checked("process_group.membership.find_replaced")
    if replaced:
        report["replaced"] = replaced
    aborted = _call_checked("process_group.aborted_tensors.take_reports")
    if aborted:
        report["aborted"] = aborted
    settings = _call_checked("runtime.process_settings.end_cell", shell.raised)
    if settings:
        report["settings"] = settings
    if _unchecked:
        report["unchecked"] = _unchecked[:]
    report["at"] = shell.raised_at or time.time()
    if shell.raised is not None:
        report["waited"] = call_target("process_group.membership.waited_in", shell.raised).get("ok", "")
    elif shell.caught is not None:
        caught = shell.caught
        report["caught"] = {"name": caught.name, "message": caught.message, "traceback": caught.traceback}
    return report
