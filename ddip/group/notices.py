"""What is said of a cell while it runs, and taken back when it has ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ddip.errors import ranks_text
from ddip.output.area import Notice, notify
from ddip.output.tables import places_text, verb_of
from ddip.protocol.location import StackLocation
from ddip.protocol.reports import CellReport

Places = Mapping[int, StackLocation | None]
MEANING = {"rank": "the rank's number", "world_size": "the number of ranks"}
"""What the variables of each rank that a cell may replace by mistake stand for."""
BACK = "import torch.distributed as dist; {name} = dist.get_{name}()"


class Notices:
    """Those of one cell; `stop` is what ends it."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._shown: list[tuple[Notice, str]] = []

    def run_on(self, ranks: Sequence[int], error: object, places: Places) -> None:
        """`ranks` run on after the `error` of others, at these `places`."""
        what = f"{error}; {ranks_text(ranks)} still {verb_of(ranks, 'run')}, outside of collectives"
        hint = f"{self._stop} ends the cell and keeps all variables"
        self._show(f"{what}:\n{places_text(places)}\n{hint}", f"{ranks_text(ranks)} ran on for a while after that")

    def nobody_moves(self, seconds: float, places: Places, stopped: str) -> None:
        """No rank has made progress for `seconds`; `stopped` says which processes a signal has stopped, if any."""
        lines = [f"no rank has made progress for {seconds:g} s:", places_text(places), *filter(None, [stopped])]
        hint = f"{self._stop} ends the cell and keeps all variables, and so does %%dip --timeout SECONDS"
        text = "\n".join([*lines, f"the cell keeps waiting; {hint}"])
        self._show(text, f"no rank made progress for {seconds:g} s or more")

    def _show(self, text: str, afterwards: str) -> None:
        self._shown.append((Notice(text), afterwards))

    def take_back(self) -> None:
        """All ranks have ended: nothing of it is true any more."""
        for notice, afterwards in self._shown:
            notice.replace(afterwards)


def tell_replaced(reports: Mapping[int, CellReport | None]) -> None:
    """Say so if a cell has given ``rank`` or ``world_size`` another value, which it keeps: a loop may have, unseen."""
    values: dict[str, dict[str, list[int]]] = {}
    for rank, report in sorted(reports.items()):
        for name, value in ({} if report is None else report.get("replaced", {})).items():
            values.setdefault(name, {}).setdefault(value, []).append(rank)
    for name, ranks in values.items():
        where = ranks_text([rank for found in ranks.values() for rank in found])
        what = f"is {next(iter(ranks))}" if len(ranks) == 1 else "has other values"
        back = BACK.format(name=name)
        notify(f"{name} {what} on {where} from here on, and not {MEANING[name]}; %%dip: {back} brings that back")
