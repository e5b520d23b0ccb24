"""Let the ranks save their variables to a folder together, and load them."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddip.errors import TransferError
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.protocol import on_rank
from ddip.protocol.cell_messages import SaveSchedule
from ddip.protocol.reports import LoadReport, SaveReport


def schedule_of(folder: str, names: Sequence[str], seconds: float) -> SaveSchedule:
    """Return the schedule of saves to `folder`, relative to the notebook's, at least `seconds` apart."""
    return {"folder": _whole_path(folder), "names": list(names), "seconds": seconds}


def save_variables(manager: ProcessGroupManager, folder: str, names: Sequence[str], background: bool) -> SaveReport:
    """Save `names`, by default all, as ``Group.save`` does; raise TransferError with the ranks' reason."""
    call = on_rank.save_variables(_whole_path(folder), list(names), background)
    report = manager.ask_together(call)[0]
    if report["error"]:
        raise TransferError(f"nothing was saved: {report['error']}")
    return report


def load_variables(manager: ProcessGroupManager, folder: str, names: Sequence[str], anyway: bool) -> LoadReport:
    """Load `names`, by default all, as ``Group.load`` does; raise TransferError with the ranks' reason."""
    call = on_rank.load_variables(_whole_path(folder), list(names), anyway)
    report = manager.ask_together(call)[0]
    if report["error"]:
        raise TransferError(f"nothing was loaded: {report['error']}")
    return report


def _whole_path(folder: str) -> str:
    return os.path.abspath(os.path.expanduser(folder))
