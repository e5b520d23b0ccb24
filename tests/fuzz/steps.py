"""Random steps, which know nothing of the group.

A step's references, such as a rank, are taken modulo the group's size, so a list of steps stays valid if some of them
are removed.
"""

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
    "kill the preload process": "kill, preload_process(group)",
    "freeze the preload process": "freeze, preload_process(group), 0.3",
}
"""Disturbances of a process during an action."""
ACTIONS = ("a cell", "push", "pull", "change", "repair", "restart", "info", "stacks")
"""Actions that are disturbed."""


@dataclass(frozen=True)
class Step:
    """One step of a sequence."""

    family: str
    what: str
    who: int = 0
    """A rank, taken modulo the size of the group."""
    work: str = ""
    """Key of `kinds.WORK`."""
    where: str = ""
    """Whether a fault comes before, in, or after the work."""
    all: bool = False
    """True for all ranks, False for `who` only."""
    ms: int = 0
    """Time of an event, in milliseconds."""


Draw = Callable[[random.Random], Step]


def _draw_from(family: str, names: list[str]) -> Draw:
    def draw_steps(chance: random.Random) -> Step:
        return Step(
            family,
            chance.choice(names),
            chance.randrange(12),
            chance.choice(list(kinds.WORK)),
            chance.choice(["before", "in", "after"]),
            chance.random() < 0.2,
            int(min(chance.expovariate(1 / 120), 600)),
        )

    return draw_steps


def families(known: bool = False) -> dict[str, list[str]]:
    """Return every kind of step by family; kinds with a known bug only if `known`."""
    disturbed = [f"{how} in {action}" for how in HOW for action in ACTIONS]
    kinds_by_family = {
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
    return {
        family: [name for name in names if known or name not in kinds.KNOWN]
        for family, names in kinds_by_family.items()
    }


WEIGHTS = {"work": 3, "alone": 4, "fault": 5, "stop": 3, "disturbed": 3, "push": 2, "pull": 2, "life": 2}
"""Relative frequency of a family; 1 by default."""


def draw_steps(seed: object, count: int) -> list[Step]:
    """Draw `count` steps from a random subset of families, so that rare kinds also meet."""
    chance = random.Random(str(seed))
    tables = families()
    chosen = [family for family in tables if chance.random() < 0.6] or list(tables)
    draws = {family: _draw_from(family, tables[family]) for family in chosen}
    weights = [WEIGHTS.get(family, 1) for family in chosen]
    return [draws[family](chance) for family in chance.choices(chosen, weights, k=count)]


def matching_steps(seed: object, only: str) -> list[Step]:
    """Return one step of every kind that `only` matches, including undrawn ones if it is the full name."""
    chance = random.Random(str(seed))
    found = []
    for family, names in families(known=True).items():
        for name in names:
            if only == name or (only in f"{family}: {name}" and name not in kinds.KNOWN):
                found.append(_draw_from(family, [name])(chance))
    return found
