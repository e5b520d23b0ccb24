"""Choose a rank's variables for a save, describe them, and pickle them with one memo."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from IPython.core.getipython import get_ipython
from torch.optim.lr_scheduler import LRScheduler

from ddip.protocol.objects import pickling
from ddip.protocol.objects.pickling import Graph, Pickled
from ddip.protocol.text import escape_surrogates
from ddip.rank import user_namespace
from ddip.rank.inspection.walk import PRIVATE_NAMES
from ddip.rank.saves.save_pickler import Key, SavePickler, is_fully_sharded

GRADIENTS = "<gradients>"
"""Name of the list of tensors with their gradients, as a tensor is pickled without its gradient."""
KEYED = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
"""Classes of objects besides modules that a load fills in place."""


def choose_variables(names: Collection[str]) -> dict[str, Any]:
    """Return the variables `names`, by default all of the user's, in the order of loading.

    Raises LookupError for a name that no variable has.
    """
    shell: Any = get_ipython()
    namespace, hidden = user_namespace(), shell.user_ns_hidden
    if unknown := [name for name in names if name not in namespace]:
        raise LookupError(f"there is no variable {', '.join(unknown)}")
    mine = [
        name
        for name, value in namespace.items()
        if not name.startswith("_") and name not in PRIVATE_NAMES and hidden.get(name, hidden) is not value
    ]
    chosen = {name: namespace[name] for name in (names or mine)}
    return dict(sorted(chosen.items(), key=lambda item: (pickling.loading_order(item[1]), item[0])))


def find_keys(variables: Mapping[str, Any]) -> dict[Key, Any]:
    """Return the objects that a load can fill in place, by key."""
    found: dict[Key, Any] = {}
    for variable, value in variables.items():
        if isinstance(value, torch.nn.Module):
            found |= {Key(variable, "module", name): module for name, module in value.named_modules()}
            found |= {Key(variable, "tensor", name): tensor for name, tensor in _tensors_of(value)}
        elif isinstance(value, KEYED):
            found[Key(variable, "object", "")] = value
    return found


def _tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def structure_of(value: Any) -> str:
    """Return a text that is equal for two objects if one can take the state of the other; "" for other objects."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, torch.nn.Module):
        tensors = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in _tensors_of(value)]
        return repr((kind, tensors, [(name, type(part).__qualname__) for name, part in value.named_modules()]))
    if isinstance(value, torch.optim.Optimizer):
        return repr((kind, [[tuple(p.shape) for p in group["params"]] for group in value.param_groups]))
    return kind if isinstance(value, KEYED) else ""


def reshard_models(values: Iterable[Any]) -> None:
    """Free the gathered parameters of models of ``fully_shard``, which would be found instead of the sharded ones."""
    for value in values:
        for module in value.modules() if isinstance(value, torch.nn.Module) else ():
            if is_fully_sharded(module):
                module.reshard()  # type: ignore[operator]


@dataclass
class Packed:
    """The pickled variables of this rank."""

    pickled: dict[str, Pickled]
    pickler: SavePickler
    left_out: dict[str, str]
    """Reasons why variables could not be pickled, by name."""


def pack_variables(variables: Mapping[str, Any]) -> Packed:
    """Pickle `variables` and their gradients with one memo, without variables that cannot be pickled."""
    keys: dict[int, Key] = {}
    for key, value in find_keys(variables).items():
        keys.setdefault(id(value), key)
    left_out: dict[str, str] = {}
    while True:  # a pickler cannot be used again after an error
        graph, name = Graph(lambda file, buffers: SavePickler(file, buffers, keys)), ""
        rest = [name for name in variables if name not in left_out]
        try:
            for name in rest:
                graph.add(name, variables[name])
            graph.add(GRADIENTS, [(leaf, leaf.grad) for leaf in graph.pickler.leaves if leaf.grad is not None])
        except Exception as error:
            left_out[name] = _reason_text(error)
            for other in rest[rest.index(name) + 1 :]:
                try:
                    Graph(lambda file, buffers: SavePickler(file, buffers, keys)).add(other, variables[other])
                except Exception as other_error:
                    left_out[other] = _reason_text(other_error)
        else:
            return Packed(graph.pickled(), graph.pickler, left_out)


def _reason_text(error: Exception) -> str:
    return escape_surrogates(f"{type(error).__name__}: {error}".partition("\n")[0])
