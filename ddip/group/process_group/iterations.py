"""Training iterations that failed cells have broken off, ended on all ranks before the next cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ddip.errors import RequestFailed
from ddip.group.members.ranks import Ranks
from ddip.output.area import notify
from ddip.protocol import on_rank
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import CellReport, IterationFacts, IterationReport

CLEARED = "the cell ended inside a training iteration: gradients of {models} were cleared on all ranks"
NOT_RESET = (
    "a failed cell may have left models and wrappers in the middle of an iteration, with gradients, and ddip could not "
    "reset them ({error}): recreate them"
)
UNCHANGED = "; parameters and optimizer are unchanged"


class Iterations:
    """Reset what a failed cell has left inside a training iteration, on all ranks."""

    def __init__(self, ranks: Ranks, release: Callable[[], object]) -> None:
        """`release` has collectives fail that a shard still waits for, if the user stops that wait."""
        self._ranks = ranks
        self._release = release
        self._pending: set[int] = set()
        """Ranks that have still to set back their wrappers."""
        self._is_broken = False
        """Has a rank been within an iteration, or have ranks been in different ones?"""

    def note_end(self, reports: Mapping[int, CellReport | None], failed: bool) -> bool:
        """Note how a cell has ended on the ranks of `reports`; None: it has not, or its rank has died or cannot tell.

        Returns whether the ranks must be reset: it has trained, or may have, and has `failed`.
        """
        told = [report["iteration"] for report in reports.values() if report is not None and "iteration" in report]
        if not failed and not any(one["unfinished"] for one in told):
            return False
        unknown = {rank for rank, report in reports.items() if report is None}
        if unknown.issubset(self._ranks.ended) and not any(_has_trained(one) for one in told):
            return False
        self._pending = set(range(len(self._ranks.members)))
        self._is_broken |= bool(unknown) or _is_broken(told)
        return True

    def settle(self, ranks: Collection[int], is_same_group: bool) -> None:
        """Have all of `ranks`, which are free, set back what a failed cell has broken off; tell the user of gradients.

        Raises RequestFailed or RequestInterrupted; what was stopped, or took too long, is done before the next cell.
        """
        to = sorted(self._pending.intersection(ranks))
        if not to:
            return
        try:
            facts = self._ask(to, on_rank.iteration_facts())
            self._is_broken = self._is_broken or _differ(facts)
            models = _union(one["models"] for one in facts)
            reset = on_rank.reset_iteration(self._is_broken, models, is_same_group)
            cleared = _union(self._ask(to, reset))
        except RequestFailed as error:
            if error.by_rank and not self._ranks.ended:  # it would fail before each cell from here on
                self._forget(to)
                notify(NOT_RESET.format(error=error))  # not every caller lets the user see what is raised
            raise
        self._forget(to)
        if cleared:
            notify(CLEARED.format(models=_listed(cleared)) + UNCHANGED * is_same_group)

    def _ask(self, ranks: Sequence[int], call: RemoteCall[R]) -> list[R]:
        return self._ranks.ask_soon(dict.fromkeys(ranks, call), release=self._release)

    def _forget(self, ranks: Collection[int]) -> None:
        self._pending -= set(ranks)
        self._is_broken = self._is_broken and bool(self._pending)


def _has_trained(report: IterationReport) -> bool:
    return report["forward"] or report["unfinished"] or bool(report["backwards"] or report["steps"])


def _is_broken(reports: Sequence[IterationReport]) -> bool:
    """Was one of the ranks that ran a cell within an iteration, or has one done more of them than another?

    >>> done = IterationReport(forward=False, unfinished=False, backwards=2, steps=2, in_thread=False)
    >>> behind, within = IterationReport({**done, "steps": 1}), IterationReport({**done, "forward": True})
    >>> _is_broken([done, done]), _is_broken([done, behind]), _is_broken([done, within])
    (False, True, True)
    """
    within = any(report["forward"] or report["unfinished"] for report in reports)
    return within or len({(report["backwards"], report["steps"]) for report in reports}) > 1


def _differ(facts: Sequence[IterationFacts]) -> bool:
    """Is a rank within an iteration, or has one gradients, of a wrapper that all have, that another has not?"""
    first, *others = (one["gradients"] for one in facts)
    shared = set(first).intersection(*others)
    return any(one["unfinished"] for one in facts) or any(one[key] != first[key] for one in others for key in shared)


def _union(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


def _listed(models: Sequence[str]) -> str:
    """
    >>> _listed(["net"]), _listed(["gen", "", "disc", "learn.model"]), _listed([""])
    ('`net`', '`gen`, `disc` and `learn.model`', 'a model that no variable holds')
    """
    quoted = [f"`{name}`" for name in models if name] or ["a model that no variable holds"]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]
