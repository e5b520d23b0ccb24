"""What a rank tells of a cell that has just ended; it goes with the reply."""

from __future__ import annotations

import time
from typing import Any

from ddip.protocol.cell_messages import Asked
from ddip.protocol.remote import call
from ddip.protocol.reports import CellReport, IterationReport
from ddip.rank.kernel.shell import RankShell
from ddip.rank.runtime import c10d
from ddip.rank.runtime.gpu import gpu

UNKNOWN: IterationReport = {"forward": True, "unfinished": True, "backwards": 0, "steps": 0, "in_thread": False}
"""The worst: the cell may have ended anywhere in its training."""
_unchecked: list[str] = []
"""What failed of `_check` since the cell began."""


def _check(target: str, *args: Any) -> Any:
    """Make a ``call``; return its result, or None after an error, which goes with the report."""
    told = call(target, *args)
    if "error" in told:
        _unchecked.append(f"{target}: {told['error']}: {told['message']}")
    return told.get("ok")


def begin_cell(asked: Asked) -> None:
    """Note what the state is that the cell may change."""
    _unchecked.clear()
    _check("process_group.membership.begin_cell")
    _check("objects.iteration.begin_cell")
    _check("runtime.process_settings.begin_cell")
    _check("runtime.current.begin", asked.get("name", ""), asked.get("ranks", []), asked.get("rich", True))


def of_the_cell(shell: RankShell) -> CellReport:
    """The report, but for the seconds.

    A fault of ddip's own is told in it, and not raised: the notebook must hear that the cell has ended.
    """
    report: CellReport = {"released": False, "state": "none"}
    told = call("process_group.membership.report")
    if "ok" in told:
        report.update(told["ok"])
        report["released"] = report["released"] or c10d.is_connection_lost(shell.raised)
    else:
        report["fault"] = f"{told['error']}: {told['message']}"
    report["iteration"] = _check("objects.iteration.report") or UNKNOWN
    report["gpu"] = _check("runtime.gpu.settle") or "under way"
    if report["gpu"] == "lost":
        report["gpu_lost"] = gpu.lost
    replaced = _check("process_group.membership.replaced")
    if replaced:
        report["replaced"] = replaced
    aborted = _check("process_group.aborted_tensors.take")
    if aborted:
        report["aborted"] = aborted
    settings = _check("runtime.process_settings.end_cell", shell.raised)
    if settings:
        report["settings"] = settings
    if _unchecked:
        report["unchecked"] = _unchecked[:]
    report["at"] = shell.raised_at or time.time()
    if shell.raised is not None:
        report["waited"] = call("process_group.membership.waited_in", shell.raised).get("ok", "")
    elif shell.caught is not None:
        caught = shell.caught
        report["caught"] = {"name": caught.name, "message": caught.message, "traceback": caught.traceback}
    return report
