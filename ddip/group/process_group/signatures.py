"""Find collectives of ranks that met although their operation, size, dtype, strides, reduction or root differs.

The n-th collective of one rank in a group meets the n-th of the others. torch does not compare them: with gloo, an
``all_reduce`` of int32 meets one of float32 and returns wrong numbers, and one of a longer tensor waits indefinitely.
Each rank therefore keeps a digest of the collectives that Python code has begun (``rank/process_group/tallies.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddip.errors import ranks_text
from ddip.group.members.members import Members
from ddip.group.process_group.steps import group_members
from ddip.protocol import on_rank
from ddip.protocol.location import StackLocation
from ddip.protocol.reports import Begun, Digests, GroupUse

DIFFERENT = "the ranks have begun different collectives, which do not match:\n{lines}"
ANSWER_SECONDS = 1.0
"""Time for the ranks to answer."""


@dataclass(frozen=True)
class DifferentCollectives:
    """Collectives of a group that met although they do not match."""

    members: list[int]
    """The ranks that were compared."""
    number: int
    """The number of collectives that were compared: those that all of the ranks have begun."""


def find_different(ranks: Members, begun: Mapping[int, Begun]) -> dict[str, DifferentCollectives]:
    """Return the groups in which ranks have begun different collectives.

    Only collectives that all of the ranks have begun are compared. The keys are those of the reports `begun`, which are
    by rank; a member without a report is not compared. A group is left out if other threads used it, since their order
    of collectives may differ, or if C++ has begun a collective on one rank and Python on another. Each group is found
    once, for one device. If some ranks have begun more collectives than others, this waits for their answers.
    """
    found: dict[str, DifferentCollectives] = {}
    size = len(ranks.members)
    for group in sorted({group for report in begun.values() for group in report}):
        for members in {tuple(group_members(report[group], size)) for report in begun.values() if group in report}:
            uses = {rank: begun[rank][group] for rank in members if group in begun.get(rank, {})}
            are_comparable = len(uses) > 1 and all(
                tuple(group_members(use, size)) == members and not use["by_threads"] for use in uses.values()
            )
            is_new = not any(_name_of(other) == _name_of(group) for other in found)
            if are_comparable and is_new and _do_differ(ranks, group, uses):
                found[group] = DifferentCollectives(list(uses), min(use["collectives"] for use in uses.values()))
    return found


def _do_differ(ranks: Members, group: str, uses: Mapping[int, GroupUse]) -> bool:
    """Return whether ranks have begun different collectives in `group`, whose `uses` are by rank."""
    numbers = {use["collectives"] for use in uses.values()}
    digests: list[Digests] = [(use["by_python"], use["digest"], use["positions"]) for use in uses.values()]
    if len(numbers) > 1:
        call = on_rank.digests_up_to(group, min(numbers))
        answers = ranks.call_on_control_channel(list(uses), call, ANSWER_SECONDS)
        digests = [answer for answer in answers.values() if answer is not None]
    are_aligned = len({(by_python, positions) for by_python, _, positions in digests}) == 1
    return are_aligned and len({digest for _, digest, _ in digests}) > 1


def _name_of(group: str) -> str:
    """Return the name of a group without its device."""
    return group.rpartition(" ")[0]


def describe_different(ranks: Members, group: str, different: DifferentCollectives) -> str:
    """Return a text about the first collectives of `group` that differ, with a line for each kind.

    `group` is a key of `find_different`, and `different` its value. Waits for the ranks. If one does not answer, or if
    none of the collectives that are kept differ, the text says only that.
    """
    members, number = different.members, different.number
    answers = ranks.call_on_control_channel(members, on_rank.signatures_of(group, number), ANSWER_SECONDS)
    silent = [rank for rank in members if not answers.get(rank)]
    if silent:
        return f"  {ranks_text(silent)} did not answer"
    lists = {rank: answer for rank, answer in answers.items() if answer}
    length = min(map(len, lists.values()))
    for back in range(length, 0, -1):
        if len({signatures[-back] for signatures in lists.values()}) > 1:
            call = on_rank.place_of_signature(group, number, back)
            places = ranks.call_on_control_channel(list(lists), call, ANSWER_SECONDS)
            return _lines_text({rank: (lists[rank][-back], places[rank]) for rank in lists})
    return f"  {ranks_text(members)}: not among the last {length} collectives"


def find_different_waits(ranks: Members, running: Sequence[int], everyone: Sequence[int]) -> str:
    """Describe the different collectives in which the `running` ranks wait; empty if they do not.

    `everyone`: all ranks of the cell. All `running` ones must wait: a rank that computes may still take another part.
    Waits for the ranks' answers.
    """
    answers = ranks.call_on_control_channel(running, on_rank.pending_wait(), ANSWER_SECONDS)
    waits = [answer for answer in answers.values() if answer is not None]
    if len(waits) < len(running):
        return ""
    uses = ranks.call_on_control_channel(everyone, on_rank.begun_operations(), ANSWER_SECONDS)
    begun = {rank: use for rank, use in uses.items() if use is not None}
    for group, different in find_different(ranks, begun).items():
        if any(group in wait["begun"] for wait in waits):
            return describe_different(ranks, group, different)
    return ""


def _lines_text(by_rank: Mapping[int, tuple[str, dict[str, object] | None]]) -> str:
    """Return a line for each collective: the ranks that began it, what it is, and where it is."""
    by_line: dict[str, list[int]] = {}
    for rank, (signature, place) in by_rank.items():
        location = StackLocation() if place is None else StackLocation(**place)  # type: ignore[arg-type]
        where = f", {location.line_text}: {location.source}" if location.line else ""
        by_line.setdefault(f"{signature}{where}", []).append(rank)
    return "\n".join(f"  {ranks_text(members)}: {line}" for line, members in by_line.items())
