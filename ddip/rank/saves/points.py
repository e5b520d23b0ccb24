"""Save at the points that a training loop marks with ``ddip.save_point``, as ``%dipsave --every`` asks for.

All ranks must agree at which call they save. They talk to each other about once per second: each time they agree how
many calls they skip until they talk again.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from ddip.protocol.cell_messages import SaveSchedule
from ddip.protocol.reports import SaveStatus
from ddip.protocol.text import print_reasons
from ddip.rank.runtime import current

CHECK_SECONDS = 1.0
"""Time between two points at which the ranks talk to each other."""


@dataclass
class _Plan:
    """The schedule of saves as this rank follows it."""

    schedule: SaveSchedule
    last: float = field(default_factory=time.monotonic)
    """Time of the last save, or of the beginning."""
    warned: bool = False
    """True if a save is requested at the next point."""
    calls: int = 0
    """Calls of ``save_point`` in this cell."""
    next_check: int = 1
    """Call at which the ranks talk to each other."""
    error: str = ""
    """Reason why the last save at a point failed; empty if it did not."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Reasons why the last save at a point left variables out."""
    checked: float = 0.0
    checked_calls: int = 0
    """Time and calls of the last check in this cell."""


_plan: _Plan | None = None
"""The schedule that the notebook has sent with the cell; None: no saves."""
saves = 0
"""Complete saves at points after a scheduler's warning."""


def _reach_point() -> bool:
    plan = _plan
    assert plan is not None
    plan.calls += 1
    return plan.calls >= plan.next_check and _agree_on_save(plan)


def _agree_on_save(plan: _Plan) -> bool:
    from ddip.sharded.copies import from_all

    now, calls = time.monotonic(), plan.calls - plan.checked_calls
    per_call = (now - plan.checked) / calls if plan.checked_calls else CHECK_SECONDS
    warned, plan.warned = plan.warned, False  # before the ranks talk: a warning meanwhile is for the next point
    answers = from_all((per_call, warned, warned or now - plan.last >= plan.schedule["seconds"]))
    slowest = max(per_call for per_call, *_ in answers)
    plan.checked, plan.checked_calls = now, plan.calls
    plan.next_check = plan.calls + max(1, int(CHECK_SECONDS / max(slowest, 1e-6)))
    if not any(due for *_, due in answers):
        return False
    plan.last = now
    return _save_here(plan, in_background=not any(warned for _, warned, _ in answers))


def _save_here(plan: _Plan, in_background: bool) -> bool:
    global saves
    from ddip.rank.saves.save_state import save_variables

    report = save_variables(plan.schedule["folder"], plan.schedule["names"], in_background)
    saves += not in_background and not report["error"]
    is_first, known = os.environ.get("RANK") == "0", plan.error
    plan.error = report["error"]
    if report["error"]:
        if report["error"] != known and is_first:  # once, not in each step
            print(f"ddip: nothing was saved: {report['error']}")
        return False
    if report["left_out"] != plan.left_out and is_first:
        print_reasons("not saved", report["left_out"])
    plan.left_out = report["left_out"]
    return True


def begin_cell(schedule: SaveSchedule | None) -> None:
    """Follow `schedule` in the cell that begins; None: save nothing. A cell on some ranks only has no points.

    Counts begin again, so that they are the same on all ranks.
    """
    global _plan
    save_points: Any = importlib.import_module("ddip.sharded.save_points")  # now, as a cell may remove modules
    save_points.at_point = _reach_point if schedule is not None and current.is_everywhere() else None
    if schedule is None:
        _plan = None
        return
    if _plan is None or _plan.schedule != schedule:
        _plan = _Plan(schedule)
        watch_warnings()
    _plan.calls, _plan.next_check, _plan.checked_calls = 0, 1, 0


def watch_warnings() -> None:
    """Let SIGUSR1 request a save while a cell runs, unless the user has a handler for it."""
    is_free = signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN)
    if threading.current_thread() is threading.main_thread() and is_free:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGUSR1, _note_warning)


def _note_warning(number: int, frame: FrameType | None) -> None:
    request_save()


def request_save() -> int:
    """Request a save at the next point of the running cell; return the number of such saves so far."""
    if _plan is not None:
        _plan.warned = True
    return saves


def describe_saves() -> SaveStatus:
    """Return how many saves followed a warning, and how the last one in the background goes."""
    save_state = sys.modules.get("ddip.rank.saves.save_state")
    writing, error = (False, "") if save_state is None else save_state.background_save()
    return {"warned": saves, "writing": writing, "error": error}
