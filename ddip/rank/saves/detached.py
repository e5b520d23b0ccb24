"""Refuse to load an optimizer or scheduler that would lose the objects it was saved with.

If no loaded variable holds a parameter, it is unpickled as a copy: an optimizer with this copy would train nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Collection
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from ddip.rank.saves.save_pickler import Loading

USERS = (torch.optim.Optimizer, LRScheduler)
"""Classes of objects that use parameters or an optimizer, which other variables hold."""
APART = "{name} shares {what} with {owner}, which this load leaves out"
TOGETHER = "load them together (%dipload FOLDER {names}), or all variables (%dipload FOLDER)"
UNOWNED = "{name} uses {what} of no variable that this load could add; %dipload FOLDER loads all variables"


def ensure_connected(loading: Loading, loadable: Collection[str]) -> None:
    """Raise ValueError if an optimizer would be loaded without its parameters.

    Also raise it for a scheduler without its optimizer, and for new parameters whose optimizer stays as it is although
    a loaded variable holds it. The error names all variables that must be loaded together. `loadable`: names of the
    variables that can be chosen.
    """
    graph, names, why = _SavedGraph(loading), set(loading.chosen), ""
    while found := graph.find_split_use(names):
        user, part, owners = found
        what = "parameters" if isinstance(part, torch.Tensor) else "an optimizer"
        name = next((n for n in sorted(names) if id(user) in graph.find_reached([n], through_users=True)), "a variable")
        owners = [owner for owner in owners if owner in loadable and owner not in names]
        if not owners:
            raise ValueError(UNOWNED.format(name=name, what=what))
        why = why or APART.format(name=name, what=what, owner=owners[0])
        names.add(owners[0])
    if why:
        raise ValueError(f"{why}: {TOGETHER.format(names=' '.join(sorted(names)))}")


def find_reached(loading: Loading) -> set[int]:
    """Return the ids of the objects that the chosen variables reach."""
    return {*_SavedGraph(loading).find_reached(loading.chosen, through_users=True)}


class _SavedGraph:
    """The objects that variables would hold after a load."""

    def __init__(self, loading: Loading) -> None:
        self._states, self._values = loading.states, loading.unpickled
        self._existing = set(map(id, loading.existing.values()))

    def _is_filled(self, value: Any, names: Collection[str]) -> bool:
        return id(value) in self._states and any(key.variable in names for key in self._states[id(value)].keys)

    def find_split_use(self, names: Collection[str]) -> tuple[Any, Any, list[str]] | None:
        """Find a user of a new object such that loading `names` would load only one of the two.

        Returns the user, the object, and the variables that hold the one that would not be loaded.
        """
        owned = self.find_reached(names, through_users=False)
        for user in self.find_reached(names, through_users=True).values():
            if not issubclass(type(user), USERS):
                continue
            is_kept = id(user) in self._existing and not self._is_filled(user, names)
            for part in self._parts_used(user):
                if id(part) not in self._existing and (id(part) in owned) == is_kept:
                    if is_kept:
                        return user, part, [key.variable for key in self._states[id(user)].keys]
                    holders = [n for n in self._values if id(part) in self.find_reached([n], through_users=False)]
                    return user, part, sorted(holders, key=lambda n: not isinstance(self._values[n], torch.nn.Module))
        return None

    def _parts_used(self, user: Any) -> list[Any]:
        """Return the parameters of an optimizer, or the optimizer of a scheduler, as they were saved."""
        saved = self._states.get(id(user))
        own = vars(user) if saved is None else saved.state
        if not isinstance(own, dict) or (saved is None and id(user) in self._existing):
            return []
        if isinstance(user, torch.optim.Optimizer):
            return [parameter for group in own.get("param_groups", ()) for parameter in group["params"]]
        return [own["optimizer"]] if "optimizer" in own else []

    def find_reached(self, names: Collection[str], through_users: bool) -> dict[int, Any]:
        """Return the objects that the variables `names` would reach if they are loaded, by id."""
        found, stack = dict[int, Any](), [self._values[name] for name in names if name in self._values]
        stack += [saved.value for saved in self._states.values() if self._is_filled(saved.value, names)]
        while stack:
            value = stack.pop()
            kind = type(value)  # isinstance() would read a proxy's __class__
            if id(value) in found or issubclass(kind, ModuleType) or _is_class_of_package(value):
                continue
            found[id(value)] = value
            if issubclass(kind, USERS) and not through_users:
                continue
            if id(value) not in self._existing:
                own = value.__globals__ if kind is FunctionType else None  # reaches all of the session
                stack += [part for part in gc.get_referents(value) if part is not own]
            elif self._is_filled(value, names):
                stack.append(self._states[id(value)].state)
        return found


def _is_class_of_package(value: Any) -> bool:
    return issubclass(type(value), type) and value.__module__ != "__main__"
