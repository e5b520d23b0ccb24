"""Find the variables that still hold an object which a load or a push has replaced."""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ddip.rank import user_namespace
from ddip.rank.inspection import kinds
from ddip.rank.inspection.walk import Path, Walk, variables_of
from ddip.rank.objects import rank_transfer


def find_holders(replaced: list[Any], variables: Mapping[str, Any], loaded: Collection[str]) -> list[str]:
    """Return the names of `variables` that hold a `replaced` object, a part of it, or its memory.

    `loaded`: names of the variables that the load has filled or set, which are not returned. Memory that they still
    use is not replaced.
    """
    if not replaced:
        return []
    own = variables_of(variables)
    walk = Walk(own, [name for name in own if name not in loaded], keep=True, process_wide=False).finish()
    graph = _ObjectGraph(walk)
    ids = {id(part) for value in replaced for part in _parts_of(value)}
    storages = set[int]()
    if not walk.is_cut:  # else memory in use might be unknown
        in_use = (walk.objects[path] for path in graph.parts_of(loaded) if path in walk.objects)
        storages = _storages_of(part for value in replaced for part in _parts_of(value)) - _storages_of(in_use)
    paths = [
        p for p, value in walk.objects.items() if id(value) in ids or not storages.isdisjoint(_storages_of([value]))
    ]
    return sorted(graph.variables_with(paths) - set(loaded))


def find_push_holders(names: list[str]) -> dict[str, list[str]]:
    """Return, for each of `names`, the variables that hold its value from before the latest push.

    Holders of a part of the value count. Tensors that only share memory with it do not, and neither do variables that
    are one of its parts: a loop over ``net.parameters()`` leaves such a variable.
    """
    replaced, own = rank_transfer.replaced_values(), variables_of(user_namespace())
    walk = Walk(own, keep=True, process_wide=False).finish()
    graph, found = _ObjectGraph(walk), dict[str, list[str]]()
    for name in names:
        ids = {id(part) for part in _parts_of(replaced[name])}
        holders = graph.variables_with([path for path, value in walk.objects.items() if id(value) in ids])
        parts = {other for other, value in own.items() if id(value) in ids and value is not replaced[name]}
        found[name] = sorted(holders - parts - replaced.keys())
    return {name: holders for name, holders in found.items() if holders}


class _ObjectGraph:
    """The objects of a complete walk, with all links between them: one object may have many holders."""

    def __init__(self, walk: Walk) -> None:
        self._holders = collections.defaultdict[Path, list[Path]](list)
        self._parts = collections.defaultdict[Path, list[Path]](list)
        self._first_paths = {name: walk.aliases.get(name, name) for name in walk.names}
        """Path by which the walk has named the value of each variable."""
        for path, (holder, _, _) in walk.links.items():
            part = walk.aliases.get(path, path)
            self._holders[part].append(holder)
            self._parts[holder].append(part)

    def parts_of(self, names: Collection[str]) -> set[Path]:
        """Return the paths of the variables `names` and of all objects that they reach."""
        return _find_reached([self._first_paths[name] for name in names if name in self._first_paths], self._parts)

    def variables_with(self, paths: list[Path]) -> set[str]:
        """Return the variables that reach an object at one of `paths`."""
        holders = _find_reached(paths, self._holders)
        return {name for name, path in self._first_paths.items() if path in holders}


def _find_reached(paths: Iterable[Path], links: Mapping[Path, list[Path]]) -> set[Path]:
    """Return `paths` and all that `links` lead to from them."""
    found, queue = set(paths), [*paths]
    while queue:
        new = set(links.get(queue.pop(), ())) - found
        found |= new
        queue.extend(new)
    return found


def _parts_of(value: Any) -> list[Any]:
    """Return an object, and the parts, parameters and buffers of a module."""
    if isinstance(value, torch.nn.Module):
        return [value, *value.modules(), *value.parameters(), *value.buffers()]
    return [value]


def _storages_of(values: Iterable[Any]) -> set[int]:
    """Return numbers of the storages of plain tensors, and of the local parts of DTensors, among `values`."""
    found = set[int]()
    for value in values:
        tensor = kinds.local_part(value) if isinstance(value, torch.Tensor) else None
        tensor = value if tensor is None else tensor
        is_readable = isinstance(tensor, torch.Tensor) and not is_lazy(tensor) and kinds.is_plain(tensor)
        if is_readable and tensor.layout is torch.strided and tensor.device.type != "meta":
            found.add(tensor.untyped_storage()._cdata)
    return found
