"""What is drawn: steps, which know nothing of the group. What a step needs of it, such as a rank, it takes modulo; so a
list of steps stays a program when some of them are left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from . import kinds

HOW = {
    "stop": "press",
    "kill": "kill, rank(group, {who})",
    "freeze": "freeze, rank(group, {who}), 0.3",
    "kill the controller": "kill, controller(group)",
    "freeze the controller": "freeze, controller(group), 0.3",
    "kill the preload process": "kill, warm(group)",
    "freeze the preload process": "freeze, warm(group), 0.3",
}
"""What happens to a process while something is under way."""
ACTIONS = ("a cell", "push", "pull", "change", "repair", "restart", "info", "stacks")
"""What is under way."""


@dataclass(frozen=True)
class Step:
    """One step of a sequence."""

    family: str
    what: str
    who: int = 0
    """A rank, modulo the size of the group."""
    work: str = ""
    """Of `kinds.WORK`."""
    where: str = ""
    """A fault is before, in, or after the work."""
    all: bool = False
    """On all ranks, and not on `who` only."""
    ms: int = 0
    """When something happens, milliseconds."""


Draw = Callable[[random.Random], Step]


def _table(family: str, names: list[str]) -> Draw:
    def draw(chance: random.Random) -> Step:
        return Step(
            family,
            chance.choice(names),
            chance.randrange(12),
            chance.choice(list(kinds.WORK)),
            chance.choice(["before", "in", "after"]),
            chance.random() < 0.2,
            int(min(chance.expovariate(1 / 120), 600)),
        )

    return draw


def families(known: bool = False) -> dict[str, list[str]]:
    """Every kind of step, by family; those that are known not to hold are left out, or not."""
    disturbed = [f"{how} in {action}" for how in HOW for action in ACTIONS]
    every = {
        "work": list(kinds.WORK),
        "alone": list(kinds.ALONE),
        "later": list(kinds.LATER),
        "fault": list(kinds.FAULTS),
        "whole": list(kinds.WHOLE),
        "stop": list(kinds.BUSINESS),
        "stop of work": list(kinds.WORK),
        "time-out": list(kinds.BUSINESS),
        "some": list(kinds.SOME),
        "push": list(kinds.PUSHED),
        "pull": list(kinds.PULLED),
        "beside": ["info", "stacks"],
        "disturbed": disturbed,
        "change": ["2", "3", "4"],
        "life": list(kinds.LIFE),
    }
    return {family: [name for name in names if known or name not in kinds.KNOWN] for family, names in every.items()}


WEIGHTS = {"work": 3, "alone": 4, "fault": 5, "stop": 3, "disturbed": 3, "push": 2, "pull": 2, "life": 2}
"""How often a family is drawn; 1 if it does not say."""


def draw(seed: object, count: int) -> list[Step]:
    """`count` steps, of some of the families: what is rare together comes together now and then."""
    chance = random.Random(str(seed))
    tables = families()
    chosen = [family for family in tables if chance.random() < 0.6] or list(tables)
    draws = {family: _table(family, tables[family]) for family in chosen}
    weights = [WEIGHTS.get(family, 1) for family in chosen]
    return [draws[family](chance) for family in chance.choices(chosen, weights, k=count)]


def each(seed: object, only: str) -> list[Step]:
    """One step of every kind of which `only` is a part; those that are not drawn, too, if it is their whole name."""
    chance = random.Random(str(seed))
    found = []
    for family, names in families(known=True).items():
        for name in names:
            if only == name or (only in f"{family}: {name}" and name not in kinds.KNOWN):
                found.append(_table(family, [name])(chance))
    return found
