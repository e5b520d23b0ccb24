"""Find the differences between ranks that a fault has left, and report them before the next cell.

    across ranks   a value that was equal on all ranks after the last good cells, and now differs, was broken
    at rest        a flag that was the same after each good cell, and has changed, was left in mid-operation
    by design      values that already differed before: rank numbers, shards, losses of each rank's own data

A path that no good cell had is evidence only if it is a counter or a flag. Tensors are compared by value, not by how
often they were written, unless their values may differ by design, as those of shards do.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ddip.errors import BadInput, RequestFailed, RequestInterrupted, ranks_text
from ddip.group.members.ranks import Ranks
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.output.area import notify
from ddip.output.tables.check_table import CheckRow, CheckTable, on_ranks
from ddip.protocol import on_rank
from ddip.protocol.on_rank import STEPPED_ROLES, R, RemoteCall
from ddip.protocol.reports import AdviceReport, ChangedConstant, Compared, Described

Kind: TypeAlias = Literal["new", "unknown", "settled", "design"]
"""Kind of a path that differs although no fault has broken it.

``new``: it did not exist after a good cell. ``unknown``: it existed after a good cell, but its values were not
recorded. ``settled``: it was equal only after the last good cell, such as a seed set there, or a loss by chance.
``design``: its values already differed after good cells.
"""
Row: TypeAlias = tuple[int, int]
Rows: TypeAlias = dict[int, Row]
"""Hashes of value and version (0: none) by the hash of their path."""
MOST_PATHS = 10_000
"""Maximum number of differing paths to describe; further ones are only counted."""
MOST_LINES, MOST_VALUES = 8, 8
ABSENT = (0, 0)
CUT = (
    "ddip compares only a part of so many objects after a fault, so it may not name differences deep inside large "
    "lists and dictionaries"
)
NO_HISTORY = "ddip had no earlier state, so it compared only counters, optimizers and generators in variables"
CHECKED_ROLES = ("module", "optimizer", "scheduler", "scaler", "sampler", "subset")
"""Roles of objects whose differences ``%dipcheck`` reports even if they are by design."""
PROGRESS = ("['step']", ".last_epoch", "._step_count", "._scale", "._growth_tracker")
"""Ends of paths that show how far an optimizer, scheduler or scaler has come."""
SYNC = "%dipsync {name} copies rank 0's"
OTHER_RANK = " (--from RANK: another rank's)"
REVIVED = "the rebuild has given DDP models rank 0's parameters, to which the optimizers of rank {source} do not belong"
TODO = {
    "module": "%dipsync {name}; statistics of BatchNorm: SyncBatchNorm, or rank 0's",
    "subset": "give random_split a generator with the same seed on all ranks",
    "sampler": "the same seed and epoch on all ranks",
    "generator": "torch.manual_seed(...) on all ranks, or ignore this if intended",
}
"""Advice for a differing object of each role; `SYNC` for all others."""


@dataclass(frozen=True)
class Difference:
    """One path whose value differs between ranks, or that was left in mid-operation."""

    path: str
    owner: str
    """The object to name in messages."""
    part: str
    values: Mapping[int, str]
    """The value in words, by rank; ranks without the path are missing."""
    counts: bool
    """True if such values seldom differ by design."""
    role: str = ""
    """The role of its object in training."""
    sharded: bool = False
    """True if each rank holds a different part of the object's parameters."""
    before: str = ""
    """The value after good cells, if the path was left in mid-operation."""


@dataclass
class Findings:
    """The result of one comparison."""

    differences: list[Difference] = field(default_factory=list)
    at_rest: list[Difference] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    """Hashes of the paths of `differences`."""
    more: int = 0
    """Number of further differing paths, which are not described."""
    is_cut: bool = False
    """True if a rank has more objects than are compared."""
    first_cell: bool = False
    """True if no good cell was recorded, so that only counters, optimizers and generators were compared."""
    by_design: list[str] = field(default_factory=list)
    """Paths, up to an index, of values that differ, and that count as intended."""


def variable_of(path: str) -> str:
    """Return the variable at the beginning of a path.

    >>> [variable_of(path) for path in ("opt.state[net.weight]['step']", "losses[3]", "net")]
    ['opt', 'losses', 'net']
    """
    return path.partition(".")[0].partition("[")[0]


class Differences:
    """Compares the ranks of one group after faults."""

    def __init__(self, ranks: Ranks, manager: ProcessGroupManager) -> None:
        self._ranks, self._manager = ranks, manager
        self._failed: list[str] = []
        """Names of the cells that have failed since the last comparison."""
        self._reported: set[int] = set()
        """Hashes of paths that were reported to the user, until they are equal again."""
        self._unsettled: set[int] = set()
        """Hashes of paths that a fault has left different, as long as they may still differ."""
        self._former: tuple[list[int], int] | None = None
        """Rank attributes and size of a former group whose objects do not refuse to work yet."""
        self._cut_reported = self._has_trained = False
        self.is_torn = False
        """True from a fault until a cell on all ranks has succeeded: the fault may have come within a step."""
        self.is_unknown = False
        """True once the comparison after a fault has failed, until the state of the ranks is taken as intended."""

    def note_fault(self, cell: str, trained: bool = False) -> None:
        """Record that a cell failed, was stopped, timed out or lost a rank.

        `report_fault` then compares the ranks. `cell`: unique name of its run. `trained`: the cell may have begun
        training iterations.
        """
        if not (self.pending or self.is_unsettled):
            self._manager.has_revived = False
        self._failed.append(cell)
        self._has_trained |= trained
        self.is_torn = True

    @property
    def pending(self) -> bool:
        """True if a fault has happened since the last comparison."""
        return bool(self._failed)

    @property
    def is_unsettled(self) -> bool:
        """True if the ranks may still differ since a fault."""
        return self.is_unknown or bool(self._unsettled)

    def settle(self) -> None:
        """Take the present state of the ranks as intended."""
        self._unsettled.clear()
        self.is_torn = self.is_unknown = False

    def settle_variables(self, names: Collection[str]) -> None:
        """Take the present values of the variables `names` as intended: they were loaded.

        Raises RequestFailed and RequestInterrupted.
        """
        self._unsettled.difference_update(path for path, name in self._differing_paths() if name in names)

    def still_differing(self) -> list[str]:
        """Compare the ranks if a fault has left them different; return the variables that still differ.

        Raises RequestFailed and RequestInterrupted.
        """
        return sorted({name for _, name in self._differing_paths()})

    def _differing_paths(self) -> list[tuple[int, str]]:
        """Return hashes and variables of the paths that still differ since a fault.

        Forgets paths that are equal again. Those beyond `MOST_PATHS` are missing.
        """
        if not self._unsettled:
            return []
        found = self._compare([])
        self._unsettled.intersection_update(found.hashes)
        described = zip(found.hashes, found.differences, strict=False)  # further hashes have no description
        return [(path, variable_of(one.owner)) for path, one in described if path in self._unsettled]

    def report_fault(self) -> None:
        """Compare all ranks after a fault, and print the differences; wait for the ranks, which must be idle.

        If interrupted, raises RequestInterrupted, and the next call repeats the comparison. If it fails, prints why.
        """
        failed, self._failed = self._failed, []
        try:
            found = self._compare(failed)
        except RequestInterrupted:
            self._failed = failed
            raise
        except RequestFailed as error:
            self.is_unknown = True
            notify(f"the ranks could not be compared after the fault ({error}); %dipcheck tries again")
            return
        text = self._report(found, AFTER_FAULT)
        if not text and found.first_cell and self._has_trained:
            text = f"{NO_HISTORY}; %dipcheck compares the rest"
        self._has_trained = False
        if text:
            notify(text)
        if found.is_cut and not self._cut_reported:
            self._cut_reported = True
            notify(CUT)

    def _report(self, found: Findings, why: str) -> str:
        """Record the differences until they are equal again, and return their text."""
        self._reported.update(found.hashes)
        self._unsettled.update(found.hashes)
        return fault_text(found, len(self._ranks.members), why, self._manager.has_revived)

    def report_new_ranks(self, compared: Collection[str]) -> set[str] | None:
        """Print the optimizers, schedulers and scalers of new ranks that are at other steps.

        Each is compared once all ranks have it, except for those at the paths `compared`. Returns the paths that have
        been compared; None if no further call is due, since no rank lacks one, or the new ranks have trained. Raises
        RequestInterrupted.
        """
        try:
            answers = self._ask_all(on_rank.find_stepped_objects())
            by_rank = [set(paths) for paths, _ in answers]
            common, all_paths = set.intersection(*by_rank), set.union(*by_rank)
            found = _select_progress(self._compare([""])) if common.difference(compared) else Findings()
            if text := self._report(found, NEW_RANKS):
                notify(text)
        except RequestFailed as error:
            notify(f"the new ranks could not be compared with the others ({error}); %dipcheck tries again")
            return None
        return None if common == all_paths or all(steps for _, steps in answers) else common

    def _ask_all(self, call: RemoteCall[R]) -> list[R]:
        """Make `call` on all ranks."""
        calls = dict.fromkeys(range(len(self._ranks.members)), call)
        return self._ranks.ask_soon(calls, release=self._manager.release)

    def _common_snapshots(self, failed: Sequence[str]) -> list[str]:
        """Return the names of the cells after which every rank has taken a snapshot, the latest first.

        First drops the snapshots taken since one of the cells `failed` began. New ranks, which have none, do not count.
        """
        recorded = [self._ask_all(on_rank.list_snapshots(cell)) for cell in failed or [""]][-1]
        first, *others = [cells for cells in recorded if cells] or [[]]
        return [cell for cell in first if all(cell in cells for cells in others)]

    def _compare(self, failed: Sequence[str]) -> Findings:
        """Compare the ranks: after the cells named in `failed`, or as they are now if it is empty."""
        after_fault = bool(failed)
        cells = self._common_snapshots(failed)
        reports = self._ask_all(on_rank.hash_variables(cells, after_fault))
        broken, others, first = broken_paths(reports)
        self._reported.intersection_update([*broken, *others])
        broken += [path for path in self._reported | self._unsettled if others.pop(path, None) is not None]
        found = Findings(first_cell=first, is_cut=any(report["is_cut"] for report in reports))
        if broken or others:
            described = self._ask_all(on_rank.describe_paths([*broken, *others][:MOST_PATHS]))
            found.differences, found.hashes, found.by_design = _describe_differences(
                described, broken, others, after_fault
            )
            found.hashes += broken[MOST_PATHS:]
            found.more = max(0, len(broken) - MOST_PATHS)
        differing = {difference.path for difference in found.differences}
        found.at_rest = [item for item in _find_not_at_rest(reports) if item.path.partition("#")[0] not in differing]
        return found

    def rank_marks(self) -> list[int]:
        """Return the hashes of the attributes whose value is the rank's own number on every rank, sorted.

        Raises RequestFailed or RequestInterrupted.
        """
        calls = {rank: on_rank.rank_marks(rank) for rank in range(len(self._ranks.members))}
        return sorted(set.intersection(*(set(marks) for marks in self._ranks.ask_soon(calls))))

    def note_size(self, marks: list[int], size: int) -> None:
        """Record that the group had `size` ranks until now; `marks`: the result of `rank_marks` in that group."""
        self._former = (marks, size) if marks else None

    @property
    def has_stale(self) -> bool:
        """True if `refuse_stale` is due."""
        return self._former is not None

    def refuse_stale(self) -> None:
        """Make objects created for the former group of `note_size` refuse to work, and print their names.

        Does nothing if that has happened. Raises RequestFailed or RequestInterrupted.
        """
        if self._former is None:
            return
        former, self._former = self._former, None
        marks, size = former
        try:
            answers = self._ask_all(on_rank.refuse_stale(marks, size))
        except (RequestFailed, RequestInterrupted) as error:
            if isinstance(error, RequestInterrupted) or self._ranks.ended:  # others would fail before each cell
                self._former = former
            raise
        paths = list(dict.fromkeys(path for answer in answers for path in answer))
        if paths:
            more = f" and {len(paths) - MOST_LINES} more" if len(paths) > MOST_LINES else ""
            notify(
                f"these objects belong to the former group of {size} ranks, and raise errors now; recreate them: "
                f"{', '.join(paths[:MOST_LINES])}{more}"
            )

    def check(self, names: Sequence[str]) -> CheckTable:
        """Compare the ranks now and look for common mistakes, only in the variables `names` if any are given.

        Raises BadInput if no rank has one of the `names`, RequestFailed, and RequestInterrupted.
        """
        found = self._compare([])
        size = len(self._ranks.members)
        rows = []
        for group in _group_by_object([*found.differences, *found.at_rest]):
            name = variable_of(group[0].owner)
            if not names or name in names:
                todo = TODO.get(group[0].role, SYNC).format(name=name)
                rows.append(CheckRow(GENERATORS.get(name, group[0].owner), _object_line(group, size), todo))
        answers = self._ask_all(on_rank.find_advice(list(names), size))
        unknown = ", ".join(name for name in names if not any(name in answer["names"] for answer in answers))
        if unknown:
            raise BadInput(
                f"%dipcheck: {unknown} is not a variable with a state on any rank; type %dipcheck to compare all"
            )
        by_advice: dict[tuple[str, str, str], list[int]] = {}
        for rank, answer in enumerate(answers):
            for one in answer["advice"]:
                by_advice.setdefault((one["path"], one["what"], one["todo"]), []).append(rank)
        rows += [CheckRow(path, on_ranks(r, size) + what, todo) for (path, what, todo), r in by_advice.items()]
        for name, lack in _find_missing(answers).items():
            todo = f"run the cell that defines it, or %dipsync {name}"
            rows.append(CheckRow(name, f"missing on {ranks_text(lack)}", todo))
        by_design = [path for path in found.by_design if not names or variable_of(path) in names]
        return CheckTable(rows, max(answer["objects"] for answer in answers), size, by_design)

    def report_missing(self, new: Sequence[int], source: int) -> None:
        """Print which variables the `new` ranks lack, and what to type.

        `source`: rank from which the user copies.
        Raises RequestFailed or RequestInterrupted.
        """
        if new:
            answers = self._ask_all(on_rank.find_advice([], len(self._ranks.members)))
            if text := missing_text(answers, new, source):
                notify(text)

    def sync(self, names: Sequence[str], source: int) -> tuple[list[str], dict[str, str]]:
        """Copy differing values from rank `source` to the others: in `names`, or all that are known to differ.

        Returns the copied paths, and the reason for each path that could not be copied. Raises BadInput if none of
        `names` could be copied, such as sharded objects, RequestFailed, and RequestInterrupted.
        """
        paths: set[int] = set()
        if source and self._manager.has_revived and self.is_unsettled:
            if not names:
                raise BadInput(f"%dipsync --from {source}: {REVIVED.format(source=source)}; type %dipsync")
            notify(REVIVED.format(source=source))
        if not names:
            found = self._compare([])
            paths = self._reported.union(found.hashes)
            if not paths:
                return [], {}
        call = on_rank.sync_state(list(names), sorted(paths), source, self._common_snapshots([]))
        answers = self._manager.ask_together(call)
        copied, refused = answers[source]["copied"], answers[source]["refused"]
        if refused and not copied and set(refused) <= set(names):
            why = "; ".join(f"{name}: {text}" for name, text in sorted(refused.items()))
            raise BadInput(f"%dipsync {' '.join(names)}: nothing was copied. {why}")
        if not names:
            self._reported = paths if refused else set()
        if refused or self._unsettled:  # forget what is equal now: training may make it differ by design again
            self._unsettled.intersection_update(self._compare([]).hashes)
        return copied, refused


def missing_text(answers: Sequence[AdviceReport], new: Sequence[int], source: int) -> str:
    """Return a line for the user about variables that the `new` ranks lack; empty if there are none.

    `answers`: the reports of all ranks on their variables. `source`: rank from which a typed %dipsync copies.

    >>> reports = [AdviceReport(advice=[], names=names, objects=0) for names in (["net", "opt"], ["net"])]
    >>> missing_text(reports, [1], 0)
    'rank 1 is new and lacks opt: run the cells that define it, or type %dipsync opt'
    >>> missing_text(reports[::-1], [0], 0)
    'rank 0 is new and lacks opt: run the cells that define it, or type %dipsync opt --from 1'
    """
    found = {name: lack for name, lack in _find_missing(answers).items() if set(lack) <= set(new)}
    if not found:
        return ""
    lacking = sorted({rank for lack in found.values() for rank in lack})
    if source in lacking:
        source = next((rank for rank in range(len(answers)) if rank not in lacking), source)
    what = "is new and lacks" if len(lacking) == 1 else "are new and lack"
    it = "it" if len(found) == 1 else "them"
    more = f" and {len(found) - MOST_LINES} more" if len(found) > MOST_LINES else ""
    typed = " ".join(list(found)[:MOST_LINES]) + (f" --from {source}" if source else "")
    return (
        f"{ranks_text(lacking)} {what} {', '.join(list(found)[:MOST_LINES])}{more}: run the cells that define {it}, or "
        f"type %dipsync {typed}"
    )


def _find_missing(answers: Sequence[AdviceReport]) -> dict[str, list[int]]:
    """Return the ranks that lack each variable that another rank has, by name."""
    names = sorted({name for answer in answers for name in answer["names"]})
    lacking = {name: [rank for rank, answer in enumerate(answers) if name not in answer["names"]] for name in names}
    return {name: ranks for name, ranks in lacking.items() if ranks}


def rows_of(packed: bytes) -> Rows:
    """Unpack the rows of ``state_report.hash_variables``: value and version by path.

    Each is a hash or number of 64 bits.
    """
    numbers = array("Q", packed)
    return {numbers[n]: (numbers[n + 1], numbers[n + 2]) for n in range(0, len(numbers), 3)}


def broken_paths(reports: Sequence[Compared]) -> tuple[list[int], dict[int, Kind], bool]:
    """Compare `reports` of all ranks, and classify differing paths by what was known after good cells.

    Returns the hashes of the paths that a fault has broken, the kind of each other differing path by its hash, and True
    if no good state is known to compare with, so that no path can count as broken.
    """
    now = [rows_of(report["now"]) for report in reports]
    known = [report for report in reports if report["has_history"]]
    good = [rows_of(report["good"]) for report in known] if len(known) > 1 else []  # one rank has no other to equal
    former = [rows_of(report["former"]) for report in known if report["former"]]
    former = former if len(former) == len(known) else []
    broken: list[int] = []
    others: dict[int, Kind] = {}
    for path in dict.fromkeys(path for rows in now for path in rows):
        values = [rows.get(path, ABSENT) for rows in now]
        if not _rows_differ(values):
            continue
        present = [row for row, report in zip(values, reports, strict=True) if report["has_history"] or row != ABSENT]
        if not _rows_differ(present):
            continue  # the path is missing on new ranks only
        before = [rows.get(path, ABSENT) for rows in good]
        if not any(row != ABSENT for row in before):
            others[path] = "new"
        elif not _was_equal(values, before):
            others[path] = "design" if any(value for value, _ in before) else "unknown"
        elif not _rows_differ(before) and _rows_differ([rows[path] for rows in former if path in rows]):
            others[path] = "settled"
        else:
            broken.append(path)
    return broken, others, not good


def _rows_differ(rows: Sequence[Row]) -> bool:
    """Return whether values differ, or versions if values are missing."""
    if any(value for value, _ in rows):
        return len({value for value, _ in rows}) > 1
    return len({version for _, version in rows}) > 1


def _was_equal(now: Sequence[Row], before: Sequence[Row]) -> bool:
    """Return whether values that now differ were equal after the last good cell, by value or write count.

    The last snapshot before a fault may have had no time for tensor values; then only write counts are known.
    """
    versions = {version for _, version in before}
    if (all(value for value, _ in before) or not any(versions)) and not _rows_differ(before):
        return True
    return all(versions) and len(versions) == 1 < len({version for _, version in now})


def _describe_differences(
    described: Sequence[Mapping[int, Described]], broken: Sequence[int], others: Mapping[int, Kind], after_fault: bool
) -> tuple[list[Difference], list[int], list[str]]:
    """Return the differences at these paths that are worth reporting, the hashes of their paths, and the other paths.

    The others differ in a way that is not worth reporting. After a fault, these are all differences by design; a check
    reports those of a model or its training.
    """
    found, hashes, by_design = [], [], dict[str, None]()
    for number in [*broken, *others]:
        found_on = {rank: rows[number] for rank, rows in enumerate(described) if number in rows}
        if not found_on:
            continue
        first = next(iter(found_on.values()))
        values = {
            rank: "other values" if facts["value"] is None else facts["value"] for rank, facts in found_on.items()
        }
        counts = all(facts["counts"] for facts in found_on.values())
        is_rank = list(values.values()) == [str(rank) for rank in range(len(described))] and len(described) > 1
        if number in others:
            is_shared = len(found_on) == len(described) and not is_rank
            of_training = not after_fault and first["role"] in CHECKED_ROLES and first["part"] != "gradients"
            is_new = others[number] == "new" and not first["owner"].startswith("<")
            is_evidence = is_new and all(facts["is_new_evidence"] for facts in found_on.values())
            is_trained = others[number] in ("unknown", "settled") and first["is_trained"]
            is_evidence = is_evidence or (others[number] == "settled" and counts)
            if not is_shared or not (is_evidence or is_trained or of_training):
                if not first["owner"].startswith("<"):
                    by_design[first["path"].partition("[")[0]] = None
                continue
        role, sharded = first["role"], first["sharded"]
        found.append(Difference(first["path"], first["owner"], first["part"], values, counts, role, sharded))
        hashes.append(number)
    return found, hashes, list(by_design)


def _find_not_at_rest(reports: Sequence[Compared]) -> list[Difference]:
    """Return the paths that some ranks left in mid-operation, one difference per path."""
    by_path: dict[str, dict[int, ChangedConstant]] = {}
    for rank, report in enumerate(reports):
        for item in report["at_rest"]:
            by_path.setdefault(item["path"], {})[rank] = item
    found = []
    for path, found_on in by_path.items():
        first = next(iter(found_on.values()))
        values = {rank: item["now"] for rank, item in found_on.items()}
        found.append(Difference(path, first["owner"], first["part"], values, True, before=first["before"]))
    return found


def _select_progress(found: Findings) -> Findings:
    """Keep the differences of optimizers and the like that are at different steps.

    Other values, such as learning rates, may differ by design.
    """
    stepped = [
        (number, difference)
        for number, difference in zip(found.hashes, found.differences, strict=False)
        if difference.role in STEPPED_ROLES
    ]
    behind = {variable_of(difference.owner) for _, difference in stepped if _is_progress(difference)}
    kept = [(number, difference) for number, difference in stepped if variable_of(difference.owner) in behind]
    return Findings([difference for _, difference in kept], hashes=[number for number, _ in kept])


def _is_progress(difference: Difference) -> bool:
    is_empty = difference.path.endswith(".state#keys") and "0" in difference.values.values()
    return is_empty or difference.path.endswith(PROGRESS)


# -- messages

AFTER_FAULT, NEW_RANKS = "the ranks differ after the fault:", "the new ranks differ from the others:"
"""First lines of reports."""


def fault_text(found: Findings, size: int, why: str = AFTER_FAULT, has_revived: bool = False) -> str:
    """Return the report for the user in several lines; empty if nothing was found.

    `why`: the first line. `size`: number of ranks. `has_revived`: all ranks have rank 0's parameters already, so it
    offers no other rank.
    """
    lines = []
    if found.differences:
        lines.append(why)
        lines += _object_lines(found.differences, size)
        if found.more:
            lines.append(f"  and {found.more} more values")
        if found.first_cell:
            lines.append(NO_HISTORY)
        sharded = sorted({variable_of(difference.owner) for difference in found.differences if difference.sharded})
        if not all(difference.sharded for difference in found.differences):
            lines.append("%dipsync copies rank 0's values to the others" + OTHER_RANK * (not has_revived))
        if sharded:
            lines.append(f"{', '.join(sharded)}: each rank has its own part; load a checkpoint, or use ddip.dist_state")
    if found.at_rest:
        lines.append("these were left in the middle of an operation:")
        lines += _object_lines(found.at_rest, size)
    return "\n".join(lines)


def _object_lines(differences: Sequence[Difference], size: int) -> list[str]:
    """Return one line per object, those with the clearest evidence first."""
    ordered = _group_by_object(differences)
    lines = [f"  {_object_line(group, size)}" for group in ordered[:MOST_LINES]]
    rest = ordered[MOST_LINES:]
    if rest:
        names = sorted({variable_of(group[0].owner) for group in rest})
        lines.append(f"  and {len(rest)} more objects, in {', '.join(names[:MOST_LINES])}; %dipcheck shows them")
    return lines


def _group_by_object(differences: Sequence[Difference]) -> list[list[Difference]]:
    """Group the differences by object, those with the clearest evidence first."""
    groups: dict[tuple[str, str], list[Difference]] = {}
    for difference in differences:
        groups.setdefault((difference.owner, difference.part), []).append(difference)
    return sorted(groups.values(), key=lambda group: not any(difference.counts for difference in group))


GENERATORS = {
    "<random>": "Python's random",
    "<numpy.random>": "NumPy's global generator",
    "<torch.random>": "torch's default generator",
}
FACTS = {
    "length": ": its length",
    "keys": ": its length",
    "members": ": its length",
    "type": ": its type",
    "left": ": its position",
    "line": ": its position",
}
WHOLE_PARTS = ("parameters and buffers", "gradients", "training mode", "state")


def _object_line(group: Sequence[Difference], size: int) -> str:
    clearest = min(group, key=lambda difference: (not difference.counts, "#" in difference.path, len(difference.path)))
    owner, part = clearest.owner, clearest.part
    count = len({difference.path.partition("#")[0] for difference in group})
    if owner in GENERATORS:
        return f"{GENERATORS[owner]}: at different positions"
    if part in WHOLE_PARTS and not owner.startswith("<"):
        example = _value_text(clearest, size)
        return f"{owner}: {part} ({count} {'differs' if count == 1 else 'differ'}; {example})"
    more = f", and {count - 1} more" if count > 1 else ""
    return f"{_value_text(clearest, size)}{more}"


def _value_text(difference: Difference, size: int) -> str:
    """Describe a path and its values by rank.

    >>> _value_text(Difference("sched.last_epoch", "sched", "attributes", {0: "3", 1: "2"}, True), 2)
    'sched.last_epoch is 3 on rank 0, 2 on rank 1'
    """
    path, _, fact = difference.path.partition("#")
    path += FACTS.get(fact, "")
    by_value: dict[str, list[int]] = {}
    for rank in range(size):
        by_value.setdefault(
            difference.values.get(rank, difference.before if difference.before else "missing"), []
        ).append(rank)
    if list(by_value) == ["other values"]:
        return f"{path} differs"
    parts = [f"{value} on {ranks_text(ranks)}" for value, ranks in list(by_value.items())[:MOST_VALUES]]
    at_rest = f" (at rest {difference.before})" if difference.before else ""
    return f"{path} is {', '.join(parts)}{at_rest}"
