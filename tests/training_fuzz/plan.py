"""Decisions of the fuzzer, without processes: which faults are drawn, and how an outcome is judged."""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FAULTS = {"raise": 6, "stop": 5, "memory": 2, "timeout": 2, "kill": 1}
"""Kind of fault -> its relative frequency."""
STRETCH = 12
"""Consecutive faults of one loop before the next loop is set up."""
CONTINUES = ("  ", "%", "these were", "no cell")
"""Beginnings of a notice's further lines."""
BAD = ("silent", "hangs", "crashed")
Look = Mapping[str, Any]
"""Answer of `state.write_digests` on one rank."""
OUTCOMES = ("equal", "named", "refuses", *BAD)
REFUSING = re.compile("FSDP|DistributedDataParallel|OptimizedModule")
"""Classes of models that refuse to run when the group has been rebuilt."""
SAYS_WHAT_TO_DO = re.compile(
    r"made again|make .* again|recreate|must be created again|wrap .* again|load a checkpoint", re.IGNORECASE
)
IS_SHARDED = re.compile("shard|another part of its parameters")
"""Words of a refused copy."""


@dataclass(frozen=True, order=True)
class Fault:
    """A fault of one loop, in the form that ``--replay`` takes."""

    loop: str
    kind: str
    victims: str
    """``0``, ``1`` or ``all``."""
    place: str
    """``torch/optim/adam.py:250|optimizer.step``"""
    nth: int
    """The fault happens at the `nth` visit of the place."""

    @property
    def part(self) -> str:
        return self.place.partition("|")[2]

    @property
    def ranks(self) -> list[int]:
        return [0, 1] if self.victims == "all" else [int(self.victims)]

    def __str__(self) -> str:
        return f"{self.loop}; {self.kind}; {self.victims}; {self.place}; {self.nth}"

    @classmethod
    def parse(cls, text: str) -> Fault:
        loop, kind, victims, place, nth = text.split("; ")
        return cls(loop, kind, victims, place, int(nth))


@dataclass
class Places:
    """The lines of one step of a loop in random order; each is used before one is used twice."""

    chance: random.Random
    counts: Mapping[str, int]
    """Place -> number of visits in two steps."""
    used: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        everything = sorted(self.counts)
        self._turns = [
            self._shuffled([place for place in everything if place.startswith("loop:")]),
            self._shuffled([place for place in everything if not place.startswith("loop:")]),
        ]

    def _shuffled(self, places: list[str]) -> Iterator[str]:
        while places:
            self.chance.shuffle(places)
            yield from [*places]

    def draw(self) -> tuple[str, int]:
        """Draw a place, and one of its visits; the loop's own lines come two times in five."""
        own, library = self._turns
        place = next(own if self.chance.random() < 0.4 else library, "") or next(own)
        return place, self.chance.randint(1, self.counts[place])


def draw_faults(seed: int, loops: Mapping[str, str], count: int) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Draw stretches of (kind, victims) on one loop.

    Their places are drawn once the loop's lines are known. `loops` has the app of each loop: loops with the same app
    follow each other, because another app means another group.
    """
    chance = random.Random(f"faults {seed}")
    each = max(2, min(STRETCH, count // max(1, len(loops))))
    while count > 0:
        order = sorted(loops)
        chance.shuffle(order)
        order.sort(key=lambda loop: loops[loop])
        for loop in order:
            length = min(each, count)
            if length > 0:
                kinds = chance.choices(list(FAULTS), weights=list(FAULTS.values()), k=length)
                yield loop, [(kind, chance.choice(["0", "1", "1", "all"])) for kind in kinds]
            count -= length


@dataclass
class Seen:
    """Facts of one trial, from the ranks and from ddip's messages."""

    fired: bool = True
    hung: str = ""
    """The cell that did not end in time."""
    good: Sequence[Look] = ()
    """Digests of all objects after good cells, per rank."""
    looks: Sequence[Look] = ()
    """Digests after the fault, before the synchronisation."""
    heard: str = ""
    """Everything that ddip printed from the fault until the digests were taken."""
    again: Sequence[Look] = ()
    """Digests after the synchronisation."""
    synced: bool = False
    refused: str = ""
    """ddip's message if a synchronisation is refused."""
    error: str = ""
    """Error of a cell that trained after the fault."""
    found: Sequence[str] = ()
    """Differences from the undisturbed run."""
    settings: Sequence[str] = ()
    """Process settings that the fault has left changed, such as disabled gradients."""
    torn: Sequence[str] = ()
    """Sharded objects that the fault has left at different steps, or within a step."""
    stale: Sequence[str] = ()
    """Models that still have gradients of a backward pass that the fault has cut off."""
    unsharded: bool = False
    """True if a sharded model has full parameters, or none, in place of shards."""
    recreated: bool = False
    """True if everything was set up again, and trained."""


def differing_objects(looks: Sequence[Look], good: Sequence[Look] = ()) -> list[str]:
    """Return the names of objects that differ between ranks.

    Leaves that also differ in `good` do not count. If the state of a rank cannot be read, the result is the name
    ``state``.
    """
    if any("error" in look for look in looks):
        return ["state"]
    by_design = _differing_leaves(good)
    return sorted({name for name, _ in _differing_leaves(looks) - by_design})


def _differing_leaves(looks: Sequence[Look]) -> set[tuple[str, str]]:
    texts = [
        {(name, path): text for name, leaves in look["digest"].items() for path, text in leaves.items()}
        for look in looks
    ]
    return {leaf for one in texts for leaf in one if len({other.get(leaf) for other in texts}) > 1}


def stale_models(fault: Fault, looks: Sequence[Look]) -> list[str]:
    """Return ``net`` if it has gradients although the fault came in a function that backward calls."""
    if fault.part != "backward" or not fault.place.startswith("loop:"):
        return []
    left = [look["digest"].get("net's gradients", {}) for look in looks if "digest" in look]
    return ["net"] if any(text != "None" for gradients in left for text in gradients.values()) else []


def torn_objects(matching: Sequence[Mapping[str, Sequence[int]]]) -> list[str]:
    """Return the sharded objects that no single number of undisturbed steps explains on all ranks.

    `matching` has, for each rank and object, the numbers of steps after which it equals the state that the fault has
    left. Objects that are within a step on all ranks do not count: those of a single process would be, too.
    """
    found = []
    for name in matching[0]:
        steps = [set(one[name]) for one in matching]
        if any(steps) and not set.intersection(*steps):
            found.append(name)
    return found


def notices_of_ddip(text: str) -> str:
    """Return ddip's notices in the notebook's stderr, recognized by their first lines."""
    notices, is_ours = [], False
    for line in text.splitlines(keepends=True):
        is_ours = line.startswith("ddip: ") or (is_ours and line.startswith(CONTINUES))
        notices.append(line if is_ours else "")
    return "".join(notices)


def mentions_difference(heard: str, names: Collection[str]) -> bool:
    """Return True if ddip has named one of these variables, or said that ranks differ."""
    return "differ" in heard or any(re.search(rf"^ +{re.escape(name)}: ", heard, re.MULTILINE) for name in names)


def unnamed_objects(names: Sequence[str], seen: Seen) -> list[str]:
    """Return the differing objects that ddip mentions neither by variable nor by class."""
    missing = []
    for name in names:
        variable = name.removesuffix("'s gradients").partition("/")[0]
        kinds = {str(look["kinds"].get(name, "")) for look in seen.looks}
        words = [variable, *kinds - {"", "int", "float"}]
        if not any(re.search(rf"(?<![\w.]){re.escape(word)}\b", seen.heard) for word in words):
            missing.append(name)
    return missing


def _class_of(seen: Seen, name: str) -> str:
    return str(seen.looks[0]["kinds"].get(name, ""))


def judge_outcome(seen: Seen) -> tuple[str, str]:
    """Return the worst outcome that the facts show, and all reasons for bad ones."""
    reasons = [*_bad_outcomes(seen)]
    for outcome in ("hangs", "silent", "crashed"):
        if any(outcome == one for one, _ in reasons):
            return outcome, "; ".join(text for _, text in reasons)
    if seen.error or seen.refused or seen.recreated:
        return "refuses", ""
    return ("named" if seen.synced else "equal"), ""


def _bad_outcomes(seen: Seen) -> Iterator[tuple[str, str]]:
    if seen.hung:
        yield "hangs", seen.hung
    if any("error" in look for look in seen.looks):
        yield "crashed", f"the state cannot be read: {[look.get('error') for look in seen.looks]}"
        return
    messages = seen.error + seen.refused
    says = bool(messages and SAYS_WHAT_TO_DO.search(messages + seen.heard) or IS_SHARDED.search(seen.refused))
    names = {*differing_objects(seen.looks, seen.good), *seen.torn}
    missing = [
        name
        for name in unnamed_objects(sorted(names), seen)
        if not name.endswith("gradients") and not (says and REFUSING.search(_class_of(seen, name)))
    ]
    if missing:
        yield "silent", f"differs and is not named: {', '.join(missing)}"
    if seen.settings and not seen.error and not re.search("gradients|autocast|dtype|mode", seen.heard):
        yield "silent", f"left in the process: {', '.join(seen.settings)}"
    if seen.stale:
        yield "silent", f"gradients of a broken backward pass are left: {', '.join(seen.stale)}"
    if seen.unsharded and not (seen.synced or says):
        yield "silent", "the parameters are not sharded as before, and no line of ddip says so"
    if seen.error or seen.refused:
        if not says:
            yield "crashed", (seen.error or seen.refused)[:300]
        elif not seen.recreated:
            yield "crashed", f"cannot be set up again after {(seen.error or seen.refused)[:200]}"
    if seen.found:
        when = "after the synchronisation" if seen.synced else "without a word from ddip"
        yield "silent", f"trains on wrong {when}: {'; '.join(seen.found)[:300]}"
    if seen.again and not says and differing_objects(seen.again, seen.good):
        yield (
            "silent",
            f"still differs after the synchronisation: {', '.join(differing_objects(seen.again, seen.good))}",
        )
