"""Find parts of a training that sent variables share with variables that are not sent.

    sent                     not sent                                    described as
    opt, sched               net, trainer.model, nets["a"], w            opt holds parameters of net; opt holds w
    dec                      enc, with dec.weight is enc.weight          dec holds parameters of enc
    sched, trainer           opt, trainer.opt                            sched holds opt; sched holds a part of trainer

The receiver would train copies that only the sent variables use. Unsent variables that only use a sent object are not
named: the push of ``net`` is complete without ``opt``, and the push of ``opt`` is not complete without ``net``.
"""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.core.getipython import get_ipython

MAX_NODES, MAX_DEPTH, MAX_ITEMS = 5_000, 6, 1000
"""Limits of the search: objects in all variables together, containers within each other, and items of one."""
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
ATOMS = (str, int, float, bool, bytes, type(None), type)
"""Classes of objects that hold no others, or only those of libraries."""
HEAP_TYPE = 1 << 9
"""Flag of a class that Python code has defined."""


@dataclass
class Parts:
    """Parts of a training in pickled variables.

    Each dict has the first variable that holds a part, by the part's id.
    """

    models: dict[int, str] = field(default_factory=dict)
    optimizers: dict[int, str] = field(default_factory=dict)
    leaves: dict[int, str] = field(default_factory=dict)
    """Parameters, and other leaf tensors that require a gradient."""
    owned: set[int] = field(default_factory=set)
    """IDs of all parameters of `models`."""


def find_links(parts: Parts, sent: Mapping[str, Any], variables: Mapping[str, Any]) -> list[str]:
    """Describe which `parts` of the variables `sent` other variables hold.

    `variables`: all variables of the sender. An object that several variables hold is described for one of them,
    preferably for a module or the tensor.
    """
    if not (parts.models or parts.optimizers or parts.leaves):
        return []
    hidden, ids = getattr(get_ipython(), "user_ns_hidden", {}), {id(value) for value in sent.values()}
    unsent = {
        name: value
        for name, value in variables.items()
        if not name.startswith("_") and id(value) not in ids and hidden.get(name, parts) is not value
    }
    search = _Search(parts, sent, variables)
    torch = sys.modules["torch"]
    for kind in (torch.nn.Module, torch.Tensor, object):
        search.add({name: value for name, value in unsent.items() if kind in type(value).__mro__})
    return [*search.found.values()]


class _Search:
    """A search through the objects of unsent variables, breadth first and without user code."""

    def __init__(self, parts: Parts, sent: Mapping[str, Any], variables: Mapping[str, Any]) -> None:
        self._torch = sys.modules["torch"]
        self._parts = parts
        self._sent_models = {name for name, value in sent.items() if self._torch.nn.Module in type(value).__mro__}
        self._seen = {id(variables), *map(id, sent.values())}
        self._nodes = 0
        self.found: dict[tuple[str, str], str] = {}
        """Descriptions by the sent and the unsent variable."""

    def add(self, variables: Mapping[str, Any]) -> None:
        """Search `variables` for parts that no variable has been found to hold yet."""
        queue = collections.deque((name, value, 0, False) for name, value in variables.items())
        while queue and self._nodes < MAX_NODES:
            name, value, depth, in_model = queue.popleft()
            self._nodes += 1
            if id(value) not in self._seen:
                self._seen.add(id(value))
                if self._torch.nn.Module in type(value).__mro__:
                    queue.extend(
                        (name, part, depth + 1, True) for part in self._visit_model(name, value, depth, in_model)
                    )
                else:
                    queue.extend((name, part, depth + 1, False) for part in self._visit_other(name, value, depth))

    def _visit_model(self, name: str, model: Any, depth: int, in_model: bool) -> list[Any]:
        """Return the submodules of an unsent model that are to be searched."""
        holder = self._parts.models.get(id(model))
        if holder is not None:
            if depth == 0 or in_model or holder not in self._sent_models:  # layers = [...]; net = Sequential(*layers)
                self._note(holder, name, name if depth == 0 else f"a part of {name}")
            return []
        for parameter in list(vars(model).get("_parameters", {}).values()):
            self._seen.add(id(parameter))
            self._note(self._parts.leaves.get(id(parameter)), name, f"parameters of {name}")
        return list(vars(model).get("_modules", {}).values())

    def _visit_other(self, name: str, value: Any, depth: int) -> list[Any]:
        """Return the objects in `value` that are to be searched."""
        torch, kind = self._torch, type(value)
        if torch.Tensor in kind.__mro__:
            if id(value) not in self._parts.owned:
                what = name if depth == 0 else f"parameters of {name}"
                self._note(self._parts.leaves.get(id(value)), name, what)
        elif torch.optim.Optimizer in kind.__mro__:
            what = name if depth == 0 else f"a part of {name}"
            self._note(self._parts.optimizers.get(id(value)), name, what)
        elif (
            depth < MAX_DEPTH and torch.optim.lr_scheduler.LRScheduler not in kind.__mro__ and _is_searched(value, kind)
        ):
            return [part for part in gc.get_referents(value) if type(part) not in ATOMS]
        return []

    def _note(self, holder: str | None, name: str, what: str) -> None:
        if holder is not None:
            self.found.setdefault((holder, name), f"{holder} holds {what}")


def _is_searched(value: Any, kind: Any) -> bool:
    """Return whether `value` is a short container, or an instance of a class that Python code has defined."""
    base = next((base for base in CONTAINERS if base in kind.__mro__), None)
    if base is not None:
        return bool(base.__len__(value) <= MAX_ITEMS)
    return bool(kind.__flags__ & HEAP_TYPE) and type not in kind.__mro__
