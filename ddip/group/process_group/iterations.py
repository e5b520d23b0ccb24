"""Reset training iterations that failed cells have interrupted, on all ranks before the next cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ddip.errors import RequestFailed
from ddip.group.members.ranks import Ranks
from ddip.output.area import inform, notify
from ddip.protocol import on_rank
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import CellReport, IterationFacts, IterationReport

CLEARED = "the cell ended inside a training iteration: gradients of {models} were cleared on all ranks"
NOT_RESET = (
    "a failed cell may have left models and wrappers in the middle of an iteration, with gradients, and ddip could not "
    "reset them ({error}): recreate them"
)
HOOKS = (
    "your communication hook of {models} may keep values of the unfinished iteration, such as an error feedback: reset "
    "them, or create the DDP wrapper again"
)
UNCHANGED = "; parameters and optimizers are as the cell left them"


class Iterations:
    """Resets models and wrappers that a failed cell left inside a training iteration, on all ranks."""

    def __init__(self, ranks: Ranks, release: Callable[[], object]) -> None:
        """Store `release`, which aborts collectives that a shard waits for if the user interrupts a reset."""
        self._ranks = ranks
        self._release = release
        self._pending: set[int] = set()
        """The ranks that have yet to reset their wrappers."""
        self._is_broken = False
        """True if a rank was inside an iteration, or ranks were in different ones."""
        self._is_half_updated = False
        """True if a rank was within a step of an optimizer."""

    def note_end(self, reports: Mapping[int, CellReport | None], failed: bool) -> bool:
        """Record the end of a cell, and return whether the ranks must be reset before the next one.

        They must be reset if the cell `failed` and trained, or may have trained, or if it left an iteration unfinished;
        `settle` then does that. A report is None if the cell has not ended on that rank, or the rank has died or could
        not report.
        """
        iterations = [
            report["iteration"] for report in reports.values() if report is not None and "iteration" in report
        ]
        if not failed and not any(report["unfinished"] or report["in_step"] for report in iterations):
            return False
        unknown = {rank for rank, report in reports.items() if report is None}
        if unknown.issubset(self._ranks.ended) and not any(_has_trained(report) for report in iterations):
            return False
        self._pending = set(range(len(self._ranks.members)))
        self._is_broken |= bool(unknown) or _is_broken(iterations)
        self._is_half_updated |= any(report["in_step"] for report in iterations)
        return True

    def settle(self, ranks: Collection[int], is_same_group: bool) -> None:
        """Reset interrupted iterations on `ranks`, which are free, and print which gradients were cleared.

        `is_same_group`: the process group has not been rebuilt since. Does nothing if no reset is due. Raises
        RequestFailed or RequestInterrupted; a reset that was stopped or took too long is repeated before the next cell.
        """
        due = sorted(self._pending.intersection(ranks))
        if not due:
            return
        try:
            facts = self._ask_ranks(due, on_rank.iteration_facts())
            self._is_broken = self._is_broken or _facts_differ(facts)
            models = _merge_lists(fact["models"] for fact in facts)
            reset = on_rank.reset_iteration(self._is_broken, models, is_same_group)
            answers = self._ask_ranks(due, reset)
        except RequestFailed as error:
            if error.by_rank and not self._ranks.ended:  # a repeated reset would fail before every further cell
                self._mark_reset(due)
                notify(NOT_RESET.format(error=error))  # not every caller shows the error to the user
            raise
        self._mark_reset(due)
        if cleared := _merge_lists(answer["cleared"] for answer in answers):
            is_unchanged = is_same_group and not self._is_half_updated
            inform(CLEARED.format(models=_join_models(cleared)) + UNCHANGED * is_unchanged)
        if hooks := _merge_lists(answer["hooks"] for answer in answers):
            notify(HOOKS.format(models=_join_models(hooks)))
        self._is_half_updated = False

    def _ask_ranks(self, ranks: Sequence[int], call: RemoteCall[R]) -> list[R]:
        return self._ranks.ask_soon(dict.fromkeys(ranks, call), release=self._release)

    def _mark_reset(self, ranks: Collection[int]) -> None:
        self._pending -= set(ranks)
        self._is_broken = self._is_broken and bool(self._pending)


def _has_trained(report: IterationReport) -> bool:
    return (
        report["forward"] or report["unfinished"] or report["in_step"] or bool(report["backwards"] or report["steps"])
    )


def _is_broken(reports: Sequence[IterationReport]) -> bool:
    """Return whether a rank ended inside an iteration, or ranks have done different numbers of them.

    >>> done = IterationReport(forward=False, unfinished=False, in_step=False, backwards=2, steps=2, in_thread=False)
    >>> behind, within = IterationReport({**done, "steps": 1}), IterationReport({**done, "forward": True})
    >>> _is_broken([done, done]), _is_broken([done, behind]), _is_broken([done, within])
    (False, True, True)
    """
    within = any(report["forward"] or report["unfinished"] or report["in_step"] for report in reports)
    return within or len({(report["backwards"], report["steps"]) for report in reports}) > 1


def _facts_differ(facts: Sequence[IterationFacts]) -> bool:
    """Return whether a rank is inside an iteration, or only some ranks have gradients of a shared wrapper."""
    first, *others = (facts_of_rank["gradients"] for facts_of_rank in facts)
    shared = set(first).intersection(*others)
    return any(facts_of_rank["unfinished"] for facts_of_rank in facts) or any(
        facts_of_rank[key] != first[key] for facts_of_rank in others for key in shared
    )


def _merge_lists(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(itertools.chain.from_iterable(lists)))


def _join_models(models: Sequence[str]) -> str:
    """Join the names of models for a message.

    >>> _join_models(["net"]), _join_models(["gen", "", "disc", "learn.model"]), _join_models([""])
    ('`net`', '`gen`, `disc` and `learn.model`', 'a model that no variable holds')
    """
    quoted = [f"`{name}`" for name in models if name] or ["a model that no variable holds"]
    return f"{', '.join(quoted[:-1])} and {quoted[-1]}" if len(quoted) > 1 else quoted[0]
