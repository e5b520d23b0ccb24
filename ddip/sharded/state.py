"""Implement ``ddip.dist_state``: keep each rank's training state after its last complete step in host memory.

    save       Collective: each rank copies its state over an older copy, and gets the copy of its partner.
    restore    Collective: load the newest save that is complete. Each rank loads its own copy, and a new rank loads
               that of the rank it replaces. On another number of ranks, shards and replicas are redistributed.

Copies are kept by name in this module, so they outlive the model and its process group. Exchanges use the current
default group, not the mesh of a former one. `copies.py` explains why a fault loses at most the newest save.
"""

from __future__ import annotations

import gc
import math
import pickle
import re
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel

from ddip.sharded import contents
from ddip.sharded.contents import Units
from ddip.sharded.copies import (
    STRUCTURE,
    Copy,
    CopyStore,
    Held,
    Outline,
    Part,
    complete_saves,
    fetch_copy,
    fewest_copies,
    from_all,
    mirror_copy,
    missing_ranks,
    needed_save,
)
from ddip.sharded.layout import Layout, fill_part
from ddip.sharded.pending_gradients import watch_steps
from ddip.sharded.save_order import SaveOrder

with warnings.catch_warnings(record=True):  # torch 2.4 warns of TorchScript as soon as this is imported
    from torch.distributed.optim import ZeroRedundancyOptimizer

__all__ = ["DistState", "dist_state"]

NO_GROUP = "dist_state: there is no process group here; it is for cells that run on the ranks (%%dip)"
NOTHING = (
    "dist_state: nothing is saved as {name!r}; call save() after a step, or restore(default=0), which returns 0 if "
    "nothing is saved"
)
MISSING = (
    "dist_state: the state saved as {name!r} is incomplete: {why}. Load the model from a checkpoint, or call forget() "
    "and start again"
)
CANNOT_KEEP = "dist_state: {what} could not be restored; nothing was saved"
SECOND = (
    "dist_state: {other}, which is saved as {name!r}; give each model a name: dist_state(model, name='teacher'), or "
    "name={name!r} to continue from that one; give models that one loop trains to one "
    "dist_state(model, optimizer, model2, optimizer2)"
)
FSDP1 = "dist_state: FullyShardedDataParallel (FSDP1) is not supported; use fully_shard (FSDP2, torch 2.6 or newer)"
ZERO = (
    "dist_state: ZeroRedundancyOptimizer shards its own state; call its consolidate_state_dict() and keep its "
    "state_dict() on rank 0, or use fully_shard (FSDP2, torch 2.6 or newer), whose optimizer is sharded with the model"
)
OTHER = "dist_state: the model or its optimizer differs from the saved one: {names}"
OTHERS = (
    "dist_state: saved with {then} besides model and optimizer (such as schedulers), and called with {now}; "
    "give dist_state the same"
)
ITERATOR = (
    "dist_state: {name} is an iterator, whose position is not kept; give the sampler state_dict() and load_state_dict()"
)
OTHER_STEP = (
    "dist_state: {name!r} is restored at step {step}, but {peer!r} at step {other}, since a fault came between their "
    "saves; give models that one loop trains to one dist_state(model, optimizer, model2, optimizer2)"
)
LEFT_OUT = "dist_state: {then} ranks saved, and there are {now} now; not restored, since it differed by rank: {names}"
UNSURE = (
    "dist_state: {then} ranks saved, and there are {now} now; these attributes of samplers may depend on that, and "
    "keep the values of the new sampler: {names}"
)
LOADED_ALONE = "its copies were of the values before the load and are deleted; call save(step) to continue at a step"
NO_REPLICA = "dist_state: each rank saved its own model, which can be restored only on the same number of ranks"
DIFFERED = "it differed between the ranks when it was saved, and is sharded now"

BATCH = 1 << 22
"""Limit of elements per exchange of tensors; a single larger tensor is exchanged alone."""
UNNAMED = "state"
Problem = tuple[type[Exception], str]
Result = TypeVar("Result")
_kept: dict[str, CopyStore] = {}
"""Copies of this rank by the name of their `DistState`."""
_order = SaveOrder()
"""The saves of all names on this rank."""


def dist_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *others: Any,
    name: str | None = None,
    spare: bool = True,
) -> DistState:
    """Keep each rank's training state in host memory after each step, to restore it after a fault.

    Call it on all ranks. It supports sharded models (FSDP2, tensor parallel), DDP, and plain models, which may differ
    between ranks::

        state = ddip.dist_state(model, optimizer)
        for step in range(state.restore(default=0), 1000):
            train(step)
            state.save(step + 1)

    The saved state outlives the model. After a fault, rerun the cell that creates model, optimizer and state, then this
    loop, which continues after the last complete step. The state includes the default random number generators of
    torch, NumPy and ``random``, and gradients that no optimizer step has used yet.

    Parameters
    ----------
    model
        Model whose parameters, persistent buffers and ``get_extra_state`` values are saved.
    optimizer
        Optimizer of the model, whose state is saved, with its parameters that are not in the model.
    others
        Further objects to save: objects with ``state_dict`` and ``load_state_dict``, such as a scheduler, a scaler, an
        EMA, or another model and its optimizer; samplers of torch; and generators of torch, NumPy and ``random``.
        Their state may differ between ranks.
    name
        Name of the saved state; required if a session trains several models. Without a name, ``save`` refuses a second
        model while the first exists.
    spare
        Also keep a copy of another rank's state on each rank. Then nothing is lost if a rank dies and
        ``%makedip --repair`` replaces it, or if the group shrinks to no less than half its size.

    Returns
    -------
    DistState
        Object that saves and restores the state.

    Raises
    ------
    TypeError
        For FSDP1, ``ZeroRedundancyOptimizer``, and `others` without a state.
    """
    for module in model.modules():
        if isinstance(module, FullyShardedDataParallel):
            raise TypeError(FSDP1)
    if isinstance(optimizer, ZeroRedundancyOptimizer):
        raise TypeError(ZERO)
    contents.ensure_state(others)
    watch_steps()
    return DistState(model, optimizer, others, name, spare)


class _Attempt(Generic[Result]):
    """The outcome of a step that may fail on one rank; then all ranks raise, and none waits for another."""

    def __init__(self, step: Callable[[], Result]) -> None:
        self.problem: Problem | None = None
        self._error: Exception | None = None
        self.result: Result | None = None
        try:
            self.result = step()
        except Exception as error:
            kind = LookupError if type(error) is LookupError else ValueError
            text = str(error) if str(error).startswith("dist_state") else f"dist_state: {type(error).__name__}: {error}"
            self._error, self.problem = error, (kind, text)

    def ensure_on_all(self, problems: list[Problem | None]) -> Result:
        """Return the step's result, or raise the first of all ranks' `problems` if there is one."""
        _raise_agreed(problems, self._error)
        assert self.result is not None
        return self.result


def _raise_agreed(problems: list[Problem | None], cause: Exception | None = None) -> None:
    """Raise the first of the ranks' problems, the same on all ranks; do nothing if there is none."""
    first = next((problem for problem in problems if problem is not None), None)
    if first is not None:
        ranks = [str(rank) for rank, problem in enumerate(problems) if problem == first]
        where = "" if len(ranks) == len(problems) else f" (on rank {', '.join(ranks)})"
        raise first[0](f"{first[1]}{where}") from cause


class DistState:
    """Saved training state of a model and its optimizer; `dist_state` creates it.

    Each rank keeps its copies in host memory.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        others: tuple[Any, ...],
        name: str | None,
        spare: bool,
    ) -> None:
        self._model, self._optimizer, self._others = model, optimizer, others
        self._reported: set[str] = set()
        self._is_named, self._name, self._spare = name is not None, UNNAMED if name is None else name, spare

    def __repr__(self) -> str:
        memory = {
            part.values.data_ptr(): part.values.nbytes for copy in self._copies.copies for part in copy.parts.values()
        }
        what = "nothing kept" if self.step is None else f"step {self.step}"
        return f"<dist_state {self._name!r}: {what}, {sum(memory.values()) / 1e6:.3g} MB>"

    @property
    def step(self) -> int | None:
        """Number of completed steps in the latest copy on this rank; None without a copy."""
        latest = max(self._copies.copies, key=lambda copy: copy.serial or 0, default=None)
        return None if latest is None else latest.step

    def forget(self) -> None:
        """Free the copies on this rank; the next `restore` does not find them."""
        _forget_copies(self._name)

    @property
    def _copies(self) -> CopyStore:
        return _kept.setdefault(self._name, CopyStore())

    @property
    def _objects(self) -> tuple[Any, ...]:
        return self._model, self._optimizer, self._others

    # -- save

    def save(self, step: int | None = None) -> None:
        """Copy the current state into host memory. Call it on all ranks, after a step and before the next one.

        Parameters
        ----------
        step
            Number of completed steps. Default: one more than at the last save, on all ranks.

        Raises
        ------
        ValueError
            On all ranks, if a rank has state that could not be restored, or if an unnamed state of another model is
            kept. Then nothing is saved.
        RuntimeError
            If there is no process group.
        """
        _ensure_group()
        step = self._save_copies(step)
        _order.record_save(self._name, step)
        self._report_iterators()

    def _save_copies(self, step: int | None) -> int:
        """Save the state after `step`, and return the step.

        Default: one more than the last step that any rank has saved.
        """
        kept, attempt = self._copies, _Attempt(self._collect_tensors)
        answers = from_all((attempt.problem, kept.held, self.step or 0))
        tensors, layouts = attempt.ensure_on_all([problem for problem, _, _ in answers])
        held = [copies for _, copies, _ in answers]
        step = 1 + max(last for _, _, last in answers) if step is None else step
        needed = needed_save(complete_saves(held), self._copies_wanted)
        serial = 1 + max((number for copies in held for number, _, _ in copies), default=0)
        pair = kept.pair_to_overwrite(needed)
        own = pair.own
        own.keep(tensors, layouts)
        own.step, own.rank, own.size, own.serial = step, dist.get_rank(), dist.get_world_size(), serial
        if self._spare and own.size > 1:
            pair.spare = mirror_copy(own, pair.spare)
        kept.owner, kept.cell = weakref.ref(self._model), _running_cell()
        return step

    def _report_iterators(self) -> None:
        """Print once which state of samplers is not kept."""
        for name in contents.unkept_positions(self._others):
            if name not in self._reported and dist.get_rank() == 0:
                print(ITERATOR.format(name=name))
            self._reported.add(name)

    @property
    def _copies_wanted(self) -> int:
        return 2 if self._spare and dist.get_world_size() > 1 else 1

    def _collect_tensors(self) -> tuple[dict[str, torch.Tensor], dict[str, Layout]]:
        """Return all tensors and their layouts; raise ValueError for state that could not be restored."""
        self._ensure_one_model()
        try:
            units = contents.units_of(*self._objects) | contents.bucket_units(self._model, self._others)
            units |= contents.gradient_units(*self._objects)
            tensors, rest = contents.take_apart(units)
            tensors[STRUCTURE] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
            return tensors, {name: contents.layout_of(name, tensor) for name, tensor in tensors.items()}
        except ValueError as error:
            raise ValueError(CANNOT_KEEP.format(what=error)) from error

    # -- restore

    def restore(self, default: int | None = None) -> int:
        """Load the latest save that still has the state of every rank, and return its step.

        Call it on all ranks. Each rank loads its own state, and a new rank the state of the rank that it replaces. If
        the number of ranks has changed, ddip redistributes shards, loads state that was equal on all ranks everywhere,
        and prints which state it did not restore. The model may be sharded in another way, but must have the same
        parameters.

        Parameters
        ----------
        default
            Value to return if nothing is kept. None: raise LookupError then.

        Returns
        -------
        int
            Number of completed steps in the loaded state, or `default`.

        Raises
        ------
        LookupError
            On all ranks, if the state of a rank is lost, or if nothing is kept and `default` is None.
        ValueError
            On all ranks, if the model, the optimizer or the other objects do not match the saved ones.
        RuntimeError
            If there is no process group.
        """
        _ensure_group()
        kept, world = self._copies, dist.get_world_size()
        answers = from_all((_Attempt(self._ensure_one_model).problem, kept.held, _order.peers_of(self._name)))
        _raise_agreed([problem for problem, _, _ in answers])
        held = [copies for _, copies, _ in answers]
        peers = sorted({peer for _, _, peers_on_rank in answers for peer in peers_on_rank})  # a new rank has none
        saves = complete_saves(held)
        if not saves:
            return self._default_or_raise(held, default)
        serial = max(saves)
        givers = {rank: rank if rank in holders else min(holders) for rank, holders in saves[serial].items()}
        copies = {copy.rank: copy for copy in kept.copies if copy.serial == serial}
        is_same = len(givers) == world
        read = _read_same_ranks(copies, givers) if is_same else _read_other_ranks(copies, givers)
        planned = _Attempt(lambda: _Plan(read(), *self._objects))
        plans = from_all((planned.problem, planned.result.lacking if planned.result else {}))
        plan = planned.ensure_on_all([problem for problem, _ in plans])
        lacking = {name: size for _, sizes in plans for name, size in sizes.items()}
        given = [copy for rank, copy in copies.items() if givers[rank] == dist.get_rank()]
        plan.gather(dict(sorted(lacking.items())), given)
        units = plan.units()
        unsure = [] if is_same else contents.drop_unsure_progress(units, self._others)
        contents.load_units(units, *self._objects)
        kept.drop_newer(serial)
        kept.owner, kept.cell = weakref.ref(self._model), _running_cell()
        if lacking or not is_same or fewest_copies(saves[serial]) < self._copies_wanted:
            self._save_copies(plan.saved.step)  # in the current layout, with the state that ranks lacked
        if plan.saved.left_out and dist.get_rank() == 0:
            print(LEFT_OUT.format(then=len(givers), now=world, names=_group_names(plan.saved.left_out)))
        if unsure and dist.get_rank() == 0:
            print(UNSURE.format(then=len(givers), now=world, names=_shorten_list(unsure, 20)))
        for peer, other in _order.record_restore(self._name, plan.saved.step, peers):
            if dist.get_rank() == 0:
                print(OTHER_STEP.format(name=self._name, step=plan.saved.step, peer=peer, other=other))
        return plan.saved.step

    def _default_or_raise(self, held: list[list[Held]], default: int | None) -> int:
        if any(held):
            why = f"the state of {missing_ranks(held)} was lost with its process"
            raise LookupError(MISSING.format(name=self._name, why=why))
        if default is None:
            raise LookupError(NOTHING.format(name=self._name))
        return default

    # -- identity of the model

    def _ensure_one_model(self) -> None:
        """Raise ValueError if another model is kept under this name, unless the user has chosen the name.

        A kept model that no variable holds belongs to a cell that was rerun, and does not count. If the running cell
        has saved it, it counts even after it was freed, because functions train models one after the other.
        """
        kept, owner = self._copies, self._copies.owner()
        if self._is_named or owner is self._model:
            return
        if owner is not None and _parameter_ids(owner) == _parameter_ids(self._model):
            return
        variable = owner is not None and _variable_that_holds(owner)
        if variable:
            raise ValueError(SECOND.format(other=f"`{variable}` holds another model", name=self._name))
        if kept.cell is not None and kept.cell == _running_cell():
            raise ValueError(SECOND.format(other="this cell has saved another model", name=self._name))


def renew_copies(
    loaded: list[tuple[DistState, int | None]], changed: Collection[int], unchanged: Collection[int]
) -> dict[str, str]:
    """Copy the values of loaded states, and delete former copies of loaded models. A collective.

    `loaded`: states with the step of their newest copy when they were saved. `changed` and `unchanged` have the ids of
    existing parameters: a state that was loaded without its model keeps its copies. Returns why a state has no copies,
    by name.
    """
    steps = {state._name: (state, step) for state, step in loaded if _parameter_ids(state._model).isdisjoint(unchanged)}
    replaced = [
        name
        for name, store in _kept.items()
        if store.copies and (owner := store.owner()) is not None and not _parameter_ids(owner).isdisjoint(changed)
    ]
    for name in {*replaced, *steps}:
        _forget_copies(name)
    problems = {f"dist_state {name!r}": LOADED_ALONE for name in replaced if name not in steps}
    names = from_all([name for name, (_, step) in steps.items() if step is not None])
    for name in names[0]:
        if all(name in of_rank for of_rank in names):
            try:
                steps[name][0].save(steps[name][1])
            except ValueError as error:
                problems[f"dist_state {name!r}"] = str(error)
    return problems


def _forget_copies(name: str) -> None:
    _kept.pop(name, None)
    _order.forget(name)


@dataclass
class _Saved:
    """The state to restore on this rank."""

    step: int
    units: Units
    """Units with holes in place of the tensors."""
    outline: dict[str, tuple[tuple[int, ...], Any]]
    """Shapes and placements of the whole tensors by name."""
    copies: list[Copy]
    """Copies on this rank from which it may load."""
    is_of_same_ranks: bool
    """True if the save is of the same number of ranks."""
    left_out: list[str] = field(default_factory=list)
    """Names of units that are not restored, because they differed between ranks."""

    def may_load(self, copy: Copy, name: str) -> bool:
        """Return whether this rank may load a tensor from `copy`.

        If the number of ranks has changed, DDP's buffers must be those of rank 0.
        """
        is_broadcast = not self.is_of_same_ranks and name in self.units.get(contents.BROADCAST, ())
        return name in copy.parts and (copy.rank == 0 or not is_broadcast)


def _read_same_ranks(copies: dict[int, Copy], givers: dict[int, int]) -> Callable[[], _Saved]:
    """Fetch this rank's copy, and return a function that unpickles it."""
    own = fetch_copy(copies, givers)
    outline = {name: (part.place.whole, part.placements) for name, part in own.parts.items() if name != STRUCTURE}
    return lambda: _Saved(own.step, pickle.loads(own.pickled), outline, [own], True)


def _read_other_ranks(copies: dict[int, Copy], givers: dict[int, int]) -> Callable[[], _Saved]:
    """Exchange the headers of copies, and return a function that merges their units.

    Units that are sharded or equal on all ranks are merged. The others are left out, and listed by name.
    """
    given = [copy for rank, copy in copies.items() if givers[rank] == dist.get_rank()]
    answers = from_all({copy.rank: (copy.step, copy.outline(), copy.pickled) for copy in given})

    def merge_answers() -> _Saved:
        saved = dict(sorted((rank, header) for answer in answers for rank, header in answer.items()))
        steps, outlines = [step for step, _, _ in saved.values()], [outline for _, outline, _ in saved.values()]
        units = [pickle.loads(data) for _, _, data in saved.values()]
        found, left_out = {}, []
        for name in dict.fromkeys(name for units_of_rank in units for name in units_of_rank):
            if _can_be_merged(name, units, outlines) or name in units[0].get(contents.BROADCAST, ()):
                found[name] = units[0][name]
            elif name not in (contents.KINDS, contents.BROADCAST):
                left_out.append(name)
        if len(set(steps)) > 1:
            left_out.append(f"the step (returned is the lowest of {_shorten_list(sorted(map(str, set(steps))))})")
        holes = contents.holes_in(found)
        outline = {name: (outlines[0][name].place.whole, outlines[0][name].placements) for name in holes}
        return _Saved(min(steps), found, outline, list(copies.values()), False, left_out)

    return merge_answers


def _can_be_merged(name: str, units: list[Units], outlines: list[Outline]) -> bool:
    """Return whether a unit is equal on all ranks, or its tensors are shards of the same whole."""
    if not all(name in of_rank for of_rank in units) or len({pickle.dumps(of_rank[name]) for of_rank in units}) > 1:
        return False
    for hole in contents.holes_in(units[0][name]):
        headers = [outline[hole] for outline in outlines]
        kinds = [(header.placements, header.dtype, header.place.whole, header.mesh_size) for header in headers]
        if any(kind != kinds[0] for kind in kinds):
            return False
        values = {(header.place, header.fingerprint) for header in headers}
        if headers[0].mesh_size < len(headers) and len(values) > len({place for place, _ in values}):
            return False
    return True


class _Plan:
    """A checked plan to load a save into this rank's objects; nothing is changed before it is complete."""

    def __init__(
        self, saved: _Saved, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: tuple[Any, ...]
    ) -> None:
        """Plan the load; the objects must match those that were saved.

        Raises ValueError for another model, optimizer or others, and LookupError if no trained parameter can be loaded.
        """
        self.saved = saved
        present = contents.units_of(model, optimizer, others)
        layouts = {name: Layout.of(tensor) for name, tensor in contents.tensors_in(present).items()}
        _ensure_same_objects(saved, present, layouts, list(contents.optimizers_of(optimizer, others)))
        trained = {f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
        if trained and trained <= set(saved.left_out):
            raise LookupError(NO_REPLICA)
        self._layouts = {
            name: _choose_layout(name, whole, placements, layouts)
            for name, (whole, placements) in saved.outline.items()
        }
        self._found = {name: values for name in self._layouts if (values := self._own_values(name)) is not None}
        self.lacking = {
            name: math.prod(layout.whole) for name, layout in self._layouts.items() if name not in self._found
        }
        """Number of elements of each tensor that must come from other ranks, by name."""

    def _own_values(self, name: str) -> torch.Tensor | None:
        for copy in self.saved.copies:
            if self.saved.may_load(copy, name) and copy.parts[name].place == self._layouts[name].place:
                return copy.parts[name].values
        return None

    def gather(self, lacking: dict[str, int], given: list[Copy]) -> None:
        """Exchange the parts of the tensors that any rank is `lacking`; this rank sends those in `given`.

        All ranks must call this with the same `lacking`. Raises on all ranks: LookupError if parts are missing,
        ValueError if a tensor to be sharded differed between ranks.
        """
        problem: tuple[type[Exception], str] | None = None
        for names in _exchange_batches(lacking):
            answers = from_all([[copy.parts[name] for copy in given if self._must_send(copy, name)] for name in names])
            for name, parts_of_ranks in zip(names, zip(*answers, strict=True), strict=True):
                parts = [part for parts in parts_of_ranks for part in parts]
                if name in self._layouts:
                    try:
                        self._found[name] = _assemble_part(self._layouts[name], parts)
                    except (LookupError, ValueError) as error:
                        problem = problem or (type(error), f"dist_state: {name}: {error}")
        if lacking:
            _raise_agreed(from_all(problem))

    def _must_send(self, copy: Copy, name: str) -> bool:
        """Return whether a copy's part is needed; only rank 0's is if all ranks have replicas."""
        part = copy.parts.get(name)
        return part is not None and (self.saved.is_of_same_ranks or part.placements is not None or copy.rank == 0)

    def units(self) -> Units:
        """Return the units with their tensors, cloned if loading would let objects keep a copy's memory."""
        tensors = {name: self._layouts[name].tensor(values) for name, values in self._found.items()}
        safe = {name: tensor if _is_copied_on_load(name) else tensor.clone() for name, tensor in tensors.items()}
        units: Units = contents.put_together(self.saved.units, safe)
        return units


def _is_copied_on_load(name: str) -> bool:
    return name.startswith("model.") and "_extra_state" not in name


def _assemble_part(layout: Layout, parts: list[Part]) -> torch.Tensor:
    """Return this rank's part of a tensor, assembled from the parts of all ranks."""
    if not parts:
        raise LookupError("parts of it are missing")
    if any(part.placements is None and not torch.equal(part.values, parts[0].values) for part in parts[1:]):
        raise ValueError(DIFFERED)
    values = torch.empty(layout.place.shape, dtype=parts[0].values.dtype)
    if parts[0].values.shape == values.shape:
        values = torch.empty_like(parts[0].values)  # keeps the memory format
    try:
        fill_part(values, layout.place, [(part.place, part.values) for part in parts])
    except ValueError as error:
        raise LookupError(str(error)) from None
    return values


def _ensure_same_objects(saved: _Saved, present: Units, layouts: dict[str, Layout], optimizers: list[str]) -> None:
    """Raise ValueError if the present model, optimizer or others do not match the saved ones.

    `optimizers` has the prefixes of the units of all optimizers.
    """
    before = _model_shapes(saved.units, {name: whole for name, (whole, _) in saved.outline.items()})
    after = _model_shapes(present, {name: layout.whole for name, layout in layouts.items()})
    names = sorted(name for name in before.keys() | after if before.get(name, 0) != after.get(name, 0))
    different = [name.removeprefix("model.") for name in names if name not in saved.left_out]
    if different:
        raise ValueError(OTHER.format(names=_shorten_list(different)))
    kinds = present[contents.KINDS]
    if saved.units.get(contents.KINDS, kinds) != kinds:
        raise ValueError(_kinds_difference(saved.units[contents.KINDS], kinds))
    prefixes = tuple(f"{name}.param_groups." for name in optimizers)
    for name, group in saved.units.items():
        if name.startswith(prefixes) and group["params"] != (now := present.get(name, {"params": []})["params"]):
            parameters = sorted(set(group["params"]).symmetric_difference(now))
            raise ValueError(OTHER.format(names=f"{name} ({_shorten_list(parameters)})"))


def _model_shapes(units: Units, wholes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the model's tensors, and of the optimizer's loose parameters, by name.

    None stands for extra state, whose shape may change.
    """
    names = [name for name in units if name.startswith(("model.", contents.LOOSE))]
    return {name: None if "_extra_state" in name else wholes.get(name) for name in names}


def _kinds_difference(then: list[str | None], now: list[str | None]) -> str:
    """Return a message about the difference between the saved and present classes of optimizer and others."""
    if (then[0] is None) != (now[0] is None):
        return OTHER.format(names="no optimizer, or one too many")
    if len(then) != len(now):
        return OTHERS.format(then=_others_text(len(then) - 1), now=_others_text(len(now) - 1))
    return OTHER.format(
        names=_shorten_list(
            [f"{before} is {after} now" for before, after in zip(then, now, strict=True) if before != after]
        )
    )


def _choose_layout(name: str, whole: tuple[int, ...], placements: Any, layouts: dict[str, Layout]) -> Layout:
    """Return the layout to load a saved tensor with.

    It is the present layout of the tensor, of its parameter, or of a similar tensor. `layouts` has the present layouts
    by name.
    """
    is_gradient = name.startswith(contents.GRADIENTS)
    present = layouts.get(name.removeprefix(contents.GRADIENTS))
    if name.startswith("model.") or is_gradient and present is not None:
        return present if present is not None and present.whole == whole else Layout(whole)
    parameter = _parameter_layout(name, layouts)
    if parameter is not None:
        present = parameter
        if whole and whole == present.whole:
            return present
    if placements is None or present is not None and present.placements is None:
        return Layout(whole)
    if present is not None and present.whole == whole:
        return present
    candidates = [present, *layouts.values()]
    sharded = [layout for layout in candidates if layout is not None and layout.placements is not None]
    for layout in sharded:
        if layout.whole == whole and layout.placements == placements:
            return layout
    meshes = [
        layout.mesh for layout in sharded if layout.placements is not None and len(layout.placements) == len(placements)
    ]
    return Layout(whole, placements, meshes[0]) if meshes else Layout(whole)


def _parameter_layout(name: str, layouts: dict[str, Layout]) -> Layout | None:
    """Return the present layout of the parameter to which a tensor in an optimizer's state belongs."""
    of_state = re.match(r"(?:optimizer|others\.\d+)\.state\.(.+)", name)
    parameter = of_state[1] if of_state else ""
    while parameter and parameter not in layouts:
        parameter = parameter.rpartition(".")[0]
    return layouts.get(parameter)


def _exchange_batches(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Yield lists of names of tensors to exchange at once, since one exchange per tensor would take long.

    >>> list(_exchange_batches({"a": 6, "b": BATCH, "c": 1, "d": 1}))
    [['a'], ['b'], ['c', 'd']]
    """
    names, total = list[str](), 0
    for name, size in sizes.items():
        if names and total + size > BATCH:
            yield names
            names, total = [], 0
        names.append(name)
        total += size
    if names:
        yield names


def _parameter_ids(model: torch.nn.Module) -> set[int]:
    """Return the ``id()`` of each parameter; the set is the same for a model and its wrapper."""
    return set(map(id, model.parameters()))


ELSEWHERE = ("IPython", "ipykernel", "ipyparallel", "traitlets")
SKIPPED = (types.ModuleType, types.FrameType, types.TracebackType, types.CodeType, type, BaseException)


def _variable_that_holds(target: Any) -> str | None:
    """Return the name of a variable from which `target` can be reached, or None.

    Variables are those of the running cell and of the functions that it runs.
    """
    seen: set[int] = set()
    for name, value in _visible_variables():
        todo = [value]
        while todo:
            candidate = todo.pop()
            if candidate is target:
                return name
            if id(candidate) not in seen and gc.is_tracked(candidate) and not _is_skipped_type(type(candidate)):
                seen.add(id(candidate))
                todo += _followed_references(candidate)
    return None


def _visible_variables() -> Iterator[tuple[str, Any]]:
    """Yield the variables of running functions and their modules, without IPython's (`Out`, `_`)."""
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith((*ELSEWHERE, "ddip.rank")):
            return
        if not module.startswith("ddip."):
            for namespace in (frame.f_locals, frame.f_globals):
                for name, value in list(namespace.items()):
                    if not name.startswith("_") and name not in ("In", "Out"):
                        yield name, value
        frame = frame.f_back


def _running_cell() -> int | None:
    """Return the number of the cell that runs this code; None if no cell does."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    frame: types.FrameType | None = sys._getframe()
    while shell is not None and frame is not None:
        if frame.f_globals is shell.user_ns and frame.f_code.co_name == "<module>":
            return int(shell.execution_count)
        frame = frame.f_back
    return None


def _is_skipped_type(kind: type) -> bool:
    return issubclass(kind, SKIPPED) or any(base.__module__.startswith(ELSEWHERE) for base in kind.__mro__)


def _followed_references(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):  # its globals are not followed
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)


def _shorten_list(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _group_names(names: list[str]) -> str:
    """Return a text with the names of units; the model's come last.

    If one object has many units, the text has their number and two of the names.

    >>> _group_names(["model.weight", *(f"others.0.{n}" for n in range(9)), "others.1", "generators.torch"])
    'generators.torch, 9 of others.0 (0, 1, ...), others.1, model.weight'
    """
    groups: dict[str, list[str]] = {}
    for name in names:
        object_name = re.match(r"model|gradients|parameters|others\.\d+(\.state)?|optimizer\.state", name)
        groups.setdefault(object_name[0] if object_name else "", []).append(name)
    texts = []
    for group, members in sorted(groups.items(), key=lambda item: (item[0] == "model", item[0])):
        rest = [name.removeprefix(f"{group}.") for name in members]
        is_long = group and len(members) > 5
        texts.append(f"{len(members)} of {group} ({_shorten_list(rest, 2)})" if is_long else ", ".join(members))
    return ", ".join(texts)


def _others_text(number: int) -> str:
    return f"{number} object{'s' if number != 1 else ''}"


def _ensure_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError(NO_GROUP)
