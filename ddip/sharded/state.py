"""``ddip.dist_state``: a sharded model and its optimizer after their last complete step, in the memory of the hosts.

    save       all ranks meet; each copies its parts over its older copy, and gets those of its partner
    restore    the latest step of which all parts are there, on whatever ranks: each takes its own, or what the others
               have of it

Copies outlive the model and its process group: they are kept by name, in this module. At any moment all ranks have the
copy of one step in common: none writes over its older one before all have the newer one, and a copy counts when it is
complete. What is exchanged needs a group that works, and so it needs no mesh of the former one.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddip.sharded.copies import Copy, Pair, from_all, from_one, of_the_partner
from ddip.sharded.layout import Layout, fill

__all__ = ["DistState", "dist_state"]

NO_GROUP = "dist_state: there is no process group here; it is for cells that run on the ranks (%%dip)"
NOTHING = (
    "dist_state: nothing is kept as {name!r}; call save() after a step, or restore(default=0), which returns 0 where "
    "nothing is kept"
)
MISSING = (
    "dist_state: what is kept as {name!r} is not complete: {why}. Load the model from a checkpoint; or call forget(), "
    "and begin anew"
)
FSDP1 = "dist_state: FullyShardedDataParallel (FSDP1) keeps its parameters in its own way; take fully_shard (FSDP2)"
ZERO = (
    "dist_state: ZeroRedundancyOptimizer divides its state by itself; call its consolidate_state_dict() and keep its "
    "state_dict() on rank 0, or take fully_shard (FSDP2), whose optimizer is sharded with the model"
)
OTHER = "dist_state: the model or its optimizer is another one than the one that was saved: {names}"
OTHERS = (
    "dist_state: {then} besides model and optimizer when it was saved (schedulers, say), and {now} now; give "
    "dist_state the same"
)


BATCH = 1 << 22
"""Elements that are exchanged at once; one tensor may have more."""
_kept: dict[str, tuple[Pair, Pair]] = {}


def dist_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *others: Any,
    name: str = "state",
    spare: bool = True,
) -> DistState:
    """On all ranks: keep `model` and `optimizer`, step by step, in the memory of the hosts, and bring them back.

    For models whose parameters are sharded: FSDP2 (``fully_shard``), tensor parallel (``parallelize_module``), or both;
    DDP and plain models work, too::

        state = ddip.dist_state(model, optimizer)
        for step in range(state.restore(default=0), 1000):
            train(step)
            state.save(step + 1)

    What was kept under `name` is there until `save` replaces it, also when the model is made again: after a fault, run
    the cell that makes model, optimizer and state once more, and then this loop, which goes on where the last complete
    step ended.

    Parameters
    ----------
    model, optimizer
        With their parameters, persistent buffers and state, also what ``get_extra_state`` returns.
    others
        What has ``state_dict`` and ``load_state_dict``, and is the same on all ranks, such as a scheduler.
    name
        One for each of several states in a session.
    spare
        Keep the parts of one more rank on each: then nothing is lost when a rank ends and ``%makedip --repair`` puts a
        new one in its place, or when the group gets smaller, by half of it at most.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError(FSDP1)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise TypeError(ZERO)
    return DistState(model, optimizer, others, name, spare)


class DistState:
    """What ``ddip.dist_state`` returns."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        others: tuple[Any, ...],
        name: str,
        spare: bool,
    ) -> None:
        self._model, self._optimizer, self._others = model, optimizer, others
        self._name, self._spare = name, spare

    def __repr__(self) -> str:
        step, size = self.step, sum(part.values.nbytes for one in self._copies() for part in one.parts.values())
        return f"<dist_state {self._name!r}: {'nothing kept' if step is None else f'step {step}'}, {size / 1e6:.3g} MB>"

    @property
    def step(self) -> int | None:
        """The latest step that this rank has a copy of, or None."""
        latest = max(self._copies(), key=lambda one: one.serial or 0, default=None)
        return None if latest is None else latest.step

    def forget(self) -> None:
        """Free the copies of this rank: the model begins anew."""
        _kept.pop(self._name, None)

    def _copies(self) -> list[Copy]:
        return [one for pair in _kept.get(self._name, ()) for one in pair.copies]

    # -- save

    def save(self, step: int | None = None) -> None:
        """On all ranks: copy everything, as it is after `step` steps (default: one more than before).

        Call it when a step is complete, and before the next one begins.
        """
        _ensure_group()
        step = (self.step or 0) + 1 if step is None else step
        pairs = _kept.setdefault(self._name, (Pair(), Pair()))
        # when all ranks have come here, all have the newer copy: the older one can go
        serial = 1 + max(from_all(max(pair.serial for pair in pairs)))
        pair = min(pairs, key=lambda pair: pair.serial)
        own = pair.own
        own.serial = pair.spare.serial = None
        tensors, own.rest = self._contents()
        own.keep(tensors)
        own.step, own.rank, own.size, own.serial = step, dist.get_rank(), dist.get_world_size(), serial
        if self._spare and own.size > 1:
            pair.spare = of_the_partner(own, pair.spare)

    def _contents(self) -> tuple[dict[str, torch.Tensor], Any]:
        """All tensors by name, and the rest."""
        model = self._model.state_dict()
        tensors = {f"model.{name}": value for name, value in model.items() if _is_tensor(value)}
        extra = {name: value for name, value in model.items() if not _is_tensor(value)}  # of get_extra_state
        groups = None
        if self._optimizer is not None:
            state = self._optimizer.state_dict()
            groups = {"param_groups": state["param_groups"], "state": {}}
            for number, values in state["state"].items():
                groups["state"][number] = {key: None if _is_tensor(value) else value for key, value in values.items()}
                tensors |= {f"optimizer.{number}.{key}": value for key, value in values.items() if _is_tensor(value)}
        return tensors, copy.deepcopy((extra, groups, [other.state_dict() for other in self._others]))

    # -- restore

    def restore(self, default: int | None = None) -> int:
        """On all ranks: bring back the latest step of which everything is there; returns its number.

        The ranks may be others than those that saved, and more or fewer of them; the model, which may be sharded in
        another way, must have the same parameters. Returns `default`, if it is given, where nothing is kept.

        Raises LookupError if nothing is kept, or parts are missing; ValueError for another model.
        """
        _ensure_group()
        serial, holders = self._choose(from_all([(one.serial, one.rank, one.size) for one in self._copies()]))
        if serial is None:
            if default is None:
                raise LookupError(NOTHING.format(name=self._name))
            return default
        for one in self._copies():
            if one.serial != serial:
                one.serial = None
        mine = {one.rank: one for one in self._copies()}
        told = None
        if mine:
            one = next(iter(mine.values()))
            told = one.step, {name: (part.place.whole, part.placements) for name, part in one.parts.items()}, one.rest
        step, saved, (extra, groups, others) = copy.deepcopy(from_one(min(holders.values()), told))
        layouts = self._layouts(saved, groups)
        if len(others) != len(self._others):
            raise ValueError(OTHERS.format(then=_count(len(others)), now=_count(len(self._others))))
        found = self._found(layouts, mine, holders)
        self._load({name: layouts[name].tensor(part) for name, part in found.items()}, extra, groups)
        for other, state in zip(self._others, others, strict=True):
            other.load_state_dict(state)
        self.save(step)  # as the model lies now, and with what each rank lacked
        return int(step)

    def _choose(self, held: list[list[tuple[int, int, int]]]) -> tuple[int | None, dict[int, int]]:
        """The copies to restore, by their serial, and which rank of this group has that of which one that saved."""
        why = ""
        for serial in sorted({one[0] for copies in held for one in copies}, reverse=True):
            holders: dict[int, int] = {}
            size = 0
            for holder, copies in enumerate(held):
                for number, rank, size_then in copies:
                    if number == serial:
                        size = size_then
                        if rank not in holders or rank == holder:  # best the rank itself
                            holders[rank] = holder
            lacking = [str(rank) for rank in range(size) if rank not in holders]
            if not lacking:
                return serial, holders
            why = why or f"what rank {', '.join(lacking)} of {size} had is gone with its process"
        if why:
            raise LookupError(MISSING.format(name=self._name, why=why))
        return None, {}

    def _layouts(self, saved: dict[str, tuple[Any, Any]], groups: Any) -> dict[str, Layout]:
        """How each tensor has to lie that was `saved`; raises ValueError if it was another model, or optimizer."""
        model = {f"model.{name}": value for name, value in self._model.state_dict().items() if _is_tensor(value)}
        layouts = {name: Layout.of(value) for name, value in model.items()}
        before = {name: whole for name, (whole, _) in saved.items() if name.startswith("model.")}
        now = {name: layout.whole for name, layout in layouts.items()}
        others = sorted(
            name.removeprefix("model.") for name in before.keys() | now if before.get(name) != now.get(name)
        )
        if others:
            raise ValueError(OTHER.format(names=", ".join(others[:5]) + (", ..." if len(others) > 5 else "")))
        if (groups is None) != (self._optimizer is None):
            raise ValueError(OTHER.format(names="no optimizer, or one too many"))
        if self._optimizer is not None:
            parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
            if len(parameters) != sum(len(group["params"]) for group in groups["param_groups"]):
                raise ValueError(OTHER.format(names="the optimizer's parameters"))
            for name, (whole, placements) in saved.items():
                if name not in now:
                    parameter = Layout.of(parameters[int(name.split(".")[1])])
                    layouts[name] = _layout_of_state(whole, placements, parameter)
        return layouts

    def _found(
        self, layouts: dict[str, Layout], mine: dict[int, Copy], holders: dict[int, int]
    ) -> dict[str, torch.Tensor]:
        """This rank's part of each tensor: its own copy, or out of those of all ranks if any rank lacks its part."""
        own = mine.get(dist.get_rank())
        places = {name: layout.place for name, layout in layouts.items()}
        lacking = {name for name, place in places.items() if own is None or own.parts[name].place != place}
        lacking = set().union(*from_all(lacking))
        told = [one for rank, one in mine.items() if holders[rank] == dist.get_rank()]
        found = {name: own.parts[name].values for name in places if name not in lacking and own is not None}
        for names in _batches({name: layouts[name].whole for name in places if name in lacking}):
            answers = from_all([[one.parts[name] for one in told] for name in names])
            for name, parts_of_ranks in zip(names, zip(*answers, strict=True), strict=True):
                parts = [part for parts in parts_of_ranks for part in parts]
                found[name] = torch.empty(places[name].shape, dtype=parts[0].values.dtype)
                try:
                    fill(found[name], places[name], [(part.place, part.values) for part in parts])
                except ValueError as error:
                    raise LookupError(MISSING.format(name=self._name, why=f"{name}: {error}")) from None
        return found

    def _load(self, tensors: dict[str, torch.Tensor], extra: dict[str, Any], groups: Any) -> None:
        model = {**self._model.state_dict(), **extra}
        self._model.load_state_dict({name: tensors.get(f"model.{name}", value) for name, value in model.items()})
        if self._optimizer is not None:
            for number, values in groups["state"].items():
                for key in values:
                    if f"optimizer.{number}.{key}" in tensors:
                        values[key] = tensors[f"optimizer.{number}.{key}"].clone()  # steps change it in place
            self._optimizer.load_state_dict(groups)


def _batches(shapes: dict[str, tuple[int, ...]]) -> Iterator[list[str]]:
    """Names of tensors that the ranks exchange at once: of thousands that are small each exchange would take its time.

    >>> list(_batches({"a": (2, 3), "b": (BATCH,), "c": (1,), "d": ()}))
    [['a'], ['b'], ['c', 'd']]
    """
    names, size = list[str](), 0
    for name, shape in shapes.items():
        if names and size + math.prod(shape) > BATCH:
            yield names
            names, size = [], 0
        names.append(name)
        size += math.prod(shape)
    if names:
        yield names


def _layout_of_state(whole: Any, placements: Any, parameter: Layout) -> Layout:
    """Of a tensor of the optimizer's state: as its `parameter` now, if it is of the same shape."""
    if placements is None or parameter.placements is None:
        return Layout(whole)
    if whole == parameter.whole:
        return parameter
    return Layout(whole, placements, parameter.mesh)


def _count(number: int) -> str:
    return f"{number} other{'s' if number != 1 else ''}"


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _ensure_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError(NO_GROUP)
