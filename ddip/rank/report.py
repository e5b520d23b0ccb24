"""What a rank tells of a cell that has just ended; it goes with the reply."""

from __future__ import annotations

import time

from ddip.protocol.remote import call
from ddip.protocol.reports import CellReport
from ddip.rank.gpu import gpu
from ddip.rank.shell import RankShell


def of_the_cell(shell: RankShell) -> CellReport:
    """The report, but for the seconds.

    A fault of ddip's own is told in it, and not raised: the notebook must hear that the cell has ended.
    """
    report: CellReport = {"released": False, "state": "none"}
    told = call("process_group.report")
    if "ok" in told:
        report.update(told["ok"])
    else:
        report["fault"] = f"{told['error']}: {told['message']}"
    state = call("gpu.settle")
    report["gpu"] = state.get("ok", "under way")
    if report["gpu"] == "lost":
        report["gpu_lost"] = gpu.lost
    replaced = call("process_group.replaced").get("ok")
    if replaced:
        report["replaced"] = replaced
    report["at"] = shell.raised_at or time.time()
    if shell.raised is not None:
        report["waited"] = call("process_group.waited_in", shell.raised).get("ok", "")
    elif shell.caught is not None:
        caught = shell.caught
        report["caught"] = {"name": caught.name, "message": caught.message, "traceback": caught.traceback}
    return report
