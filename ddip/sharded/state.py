"""``ddip.dist_state``: each rank's state of a training after its last complete step, in the memory of the hosts.

    save       all ranks meet; each copies its state over an older copy, and gets the copy of its partner
    restore    the newest save that is held for all ranks; each takes its own copy, and a new rank that of the rank
               whose place it has; on another number of ranks, shards and replicas are laid out again

Copies outlive the model and its process group: they are kept by name, in this module. What is exchanged needs a group
that works, and so it needs no mesh of the former one. `copies.py` says why a fault loses at most the newest save.
"""

from __future__ import annotations

import gc
import math
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddip.sharded import contents
from ddip.sharded.contents import Units
from ddip.sharded.copies import (
    STRUCTURE,
    Copy,
    Held,
    Kept,
    Outline,
    Part,
    complete_saves,
    fetch,
    fewest_copies,
    from_all,
    mirror,
    missing_ranks,
    needed_save,
)
from ddip.sharded.layout import Layout, fill

__all__ = ["DistState", "dist_state"]

NO_GROUP = "dist_state: there is no process group here; it is for cells that run on the ranks (%%dip)"
NOTHING = (
    "dist_state: nothing is kept as {name!r}; call save() after a step, or restore(default=0), which returns 0 where "
    "nothing is kept"
)
MISSING = (
    "dist_state: what is kept as {name!r} is not complete: {why}. Load the model from a checkpoint; or call forget(), "
    "and begin again"
)
CANNOT_KEEP = "dist_state: {what} could not be restored; nothing was saved"
SECOND = (
    "dist_state: {other}, which is kept as {name!r}; give each model a name: dist_state(model, name='teacher'), or "
    "name={name!r} to continue from that one"
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
LEFT_OUT = "dist_state: {then} ranks saved, and there are {now} now; not restored, since it differed by rank: {names}"
NO_REPLICA = "dist_state: each rank had a model of its own; it can be restored on the same number of ranks only"
DIFFERED = "it differed between the ranks when it was saved, and is sharded now"

BATCH = 1 << 22
"""Elements that are exchanged at once; one tensor may have more."""
UNNAMED = "state"
Problem = tuple[type[Exception], str]
Result = TypeVar("Result")
_kept: dict[str, Kept] = {}


def dist_state(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *others: Any,
    name: str | None = None,
    spare: bool = True,
) -> DistState:
    """On all ranks: keep each rank's state of a training, step by step, in the memory of the hosts, and bring it back.

    For sharded models (FSDP2, tensor parallel), DDP, and plain models, which may differ by rank::

        state = ddip.dist_state(model, optimizer)
        for step in range(state.restore(default=0), 1000):
            train(step)
            state.save(step + 1)

    The saved state outlives the model: after a fault, run the cell that makes model, optimizer and state again, and
    then this loop, which continues after the last complete step. Kept with it are the generators from which torch,
    NumPy and ``random`` draw by default.

    Parameters
    ----------
    model, optimizer
        With their parameters, persistent buffers and state, also what ``get_extra_state`` returns.
    others
        Schedulers, scalers, samplers, generators, an EMA: objects with ``state_dict`` and ``load_state_dict``, samplers
        of torch, and generators of torch, NumPy and ``random``. They may differ by rank.
    name
        For each of several models in a session. Without one, ``save`` refuses a second model while the first exists.
    spare
        Keep the state of one more rank on each: then nothing is lost if a rank ends and ``%makedip --repair`` puts a
        new one in its place, or if the group gets smaller, by half of it at most.

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
    return DistState(model, optimizer, others, name, spare)


class _Attempt(Generic[Result]):
    """A step that may fail on one rank: then all ranks raise, and none waits for another."""

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
        """Return the result, if no rank has a problem."""
        _raise_agreed(problems, self._error)
        assert self.result is not None
        return self.result


def _raise_agreed(problems: list[Problem | None], cause: Exception | None = None) -> None:
    """Raise the first of the ranks' problems, on all ranks the same."""
    first = next((problem for problem in problems if problem is not None), None)
    if first is not None:
        ranks = [str(rank) for rank, problem in enumerate(problems) if problem == first]
        where = "" if len(ranks) == len(problems) else f" (on rank {', '.join(ranks)})"
        raise first[0](f"{first[1]}{where}") from cause


class DistState:
    """What ``ddip.dist_state`` returns."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | None,
        others: tuple[Any, ...],
        name: str | None,
        spare: bool,
    ) -> None:
        self._model, self._optimizer, self._others = model, optimizer, others
        self._is_named, self._name, self._spare = name is not None, UNNAMED if name is None else name, spare

    def __repr__(self) -> str:
        memory = {
            part.values.data_ptr(): part.values.nbytes for one in self._copies.copies for part in one.parts.values()
        }
        what = "nothing kept" if self.step is None else f"step {self.step}"
        return f"<dist_state {self._name!r}: {what}, {sum(memory.values()) / 1e6:.3g} MB>"

    @property
    def step(self) -> int | None:
        """The latest step that this rank has a copy of, or None."""
        latest = max(self._copies.copies, key=lambda one: one.serial or 0, default=None)
        return None if latest is None else latest.step

    def forget(self) -> None:
        """Free the copies of this rank: the next ``restore`` finds nothing."""
        _kept.pop(self._name, None)

    @property
    def _copies(self) -> Kept:
        return _kept.setdefault(self._name, Kept())

    @property
    def _objects(self) -> tuple[Any, ...]:
        return self._model, self._optimizer, self._others

    # -- save

    def save(self, step: int | None = None) -> None:
        """On all ranks: copy everything, as it is after `step` steps (default: one more than before).

        Call it when a step is complete, and before the next one begins. Raises ValueError, on all ranks, if any rank
        has state that could not be restored, or if another model is kept without a name; then nothing is saved.
        """
        _ensure_group()
        step = (self.step or 0) + 1 if step is None else step
        kept, taken = self._copies, _Attempt(self._take)
        told = from_all((taken.problem, kept.held))
        tensors, layouts = taken.ensure_on_all([problem for problem, _ in told])
        held = [copies for _, copies in told]
        needed = needed_save(complete_saves(held), self._copies_wanted)
        serial = 1 + max((one[0] for copies in held for one in copies), default=0)
        pair = kept.pair_beside(needed)
        own = pair.own
        own.keep(tensors, layouts)
        own.step, own.rank, own.size, own.serial = step, dist.get_rank(), dist.get_world_size(), serial
        if self._spare and own.size > 1:
            pair.spare = mirror(own, pair.spare)
        kept.owner, kept.cell = weakref.ref(self._model), _running_cell()

    @property
    def _copies_wanted(self) -> int:
        return 2 if self._spare and dist.get_world_size() > 1 else 1

    def _take(self) -> tuple[dict[str, torch.Tensor], dict[str, Layout]]:
        """Return all tensors and how they lie; raises ValueError for what could not be restored."""
        self._ensure_one_model()
        try:
            tensors, rest = contents.take_apart(contents.units_of(*self._objects))
            tensors[STRUCTURE] = torch.frombuffer(bytearray(rest), dtype=torch.uint8)
            return tensors, {name: contents.layout_of(name, tensor) for name, tensor in tensors.items()}
        except ValueError as error:
            raise ValueError(CANNOT_KEEP.format(what=error)) from error

    # -- restore

    def restore(self, default: int | None = None) -> int:
        """On all ranks: bring back the newest save that is held for all ranks; returns its step.

        Each rank gets its own state, and a new rank that of the rank whose place it has. If the number of ranks has
        changed, shards are laid out again, and state that was equal on all ranks goes to all; a line names the rest.
        The model may be sharded in another way; it must have the same parameters. Returns `default`, if it is given and
        nothing is kept.

        Raises, on all ranks, LookupError if nothing is kept or a rank's state is lost, ValueError for another model.
        """
        _ensure_group()
        kept, world = self._copies, dist.get_world_size()
        told = from_all((_Attempt(self._ensure_one_model).problem, kept.held))
        _raise_agreed([problem for problem, _ in told])
        held = [copies for _, copies in told]
        saves = complete_saves(held)
        if not saves:
            return self._default(held, default)
        serial = max(saves)
        givers = {rank: rank if rank in holders else min(holders) for rank, holders in saves[serial].items()}
        mine = {one.rank: one for one in kept.copies if one.serial == serial}
        is_same = len(givers) == world
        read = _of_same_ranks(mine, givers) if is_same else _of_other_ranks(mine, givers)
        planned = _Attempt(lambda: _Plan(read(), *self._objects))
        told = from_all((planned.problem, planned.result.lacking if planned.result else {}))
        plan = planned.ensure_on_all([problem for problem, _ in told])
        lacking = {name: size for _, sizes in told for name, size in sizes.items()}
        given = [one for rank, one in mine.items() if givers[rank] == dist.get_rank()]
        plan.gather(dict(sorted(lacking.items())), given)
        contents.load_units(plan.units(), *self._objects)
        kept.drop_newer(serial)
        kept.owner, kept.cell = weakref.ref(self._model), _running_cell()
        if lacking or not is_same or fewest_copies(saves[serial]) < self._copies_wanted:
            self.save(plan.saved.step)  # as the model lies now, and with what each rank lacked
        if plan.saved.left_out and dist.get_rank() == 0:
            print(LEFT_OUT.format(then=len(givers), now=world, names=_listed(plan.saved.left_out, 20)))
        return plan.saved.step

    def _default(self, held: list[list[Held]], default: int | None) -> int:
        if any(held):
            why = f"what {missing_ranks(held)} had is gone with its process"
            raise LookupError(MISSING.format(name=self._name, why=why))
        if default is None:
            raise LookupError(NOTHING.format(name=self._name))
        return default

    # -- whose state is it?

    def _ensure_one_model(self) -> None:
        """Raise ValueError if another model is kept under this name, and the user did not choose the name.

        A model that only tracebacks and the output history hold is that of a cell that has been run again. One that the
        running cell has saved is another one even if it is gone: functions train models one after the other.
        """
        kept, owner = self._copies, self._copies.owner()
        if self._is_named or owner is self._model:
            return
        if owner is not None and _parameters(owner) == _parameters(self._model):
            return
        variable = owner is not None and _variable_that_holds(owner)
        if variable:
            raise ValueError(SECOND.format(other=f"`{variable}` holds another model", name=self._name))
        if kept.cell is not None and kept.cell == _running_cell():
            raise ValueError(SECOND.format(other="this cell has saved another model", name=self._name))


@dataclass
class _Saved:
    """The state to restore, as this rank sees it."""

    step: int
    units: Units
    """With holes in place of the tensors."""
    outline: dict[str, tuple[tuple[int, ...], Any]]
    """Shape and placements of the whole tensors."""
    copies: list[Copy]
    """From which this rank may take."""
    is_of_same_ranks: bool
    left_out: list[str] = field(default_factory=list)

    def may_take(self, one: Copy, name: str) -> bool:
        """Return whether a copy has the values of a tensor for any rank: of DDP's buffers, rank 0's."""
        is_broadcast = not self.is_of_same_ranks and name in self.units.get(contents.BROADCAST, ())
        return name in one.parts and (one.rank == 0 or not is_broadcast)


def _of_same_ranks(mine: dict[int, Copy], givers: dict[int, int]) -> Callable[[], _Saved]:
    own = fetch(mine, givers)
    outline = {name: (part.place.whole, part.placements) for name, part in own.parts.items() if name != STRUCTURE}
    return lambda: _Saved(own.step, pickle.loads(own.pickled), outline, [own], True)


def _of_other_ranks(mine: dict[int, Copy], givers: dict[int, int]) -> Callable[[], _Saved]:
    """Merge the units that are sharded, or the same on all ranks; name the others."""
    given = [one for rank, one in mine.items() if givers[rank] == dist.get_rank()]
    told = from_all({one.rank: (one.step, one.outline(), one.pickled) for one in given})

    def merged() -> _Saved:
        saved = dict(sorted((rank, header) for answer in told for rank, header in answer.items()))
        steps, outlines = [step for step, _, _ in saved.values()], [outline for _, outline, _ in saved.values()]
        units = [pickle.loads(data) for _, _, data in saved.values()]
        found, left_out = {}, []
        for name in dict.fromkeys(name for one in units for name in one):
            if _is_the_same(name, units, outlines) or name in units[0].get(contents.BROADCAST, ()):
                found[name] = units[0][name]
            elif name not in (contents.KINDS, contents.BROADCAST):
                left_out.append(name)
        if len(set(steps)) > 1:
            left_out.append(f"the step (returned is the lowest of {_listed(sorted(map(str, set(steps))))})")
        holes = contents.holes_in(found)
        outline = {name: (outlines[0][name][0].whole, outlines[0][name][1]) for name in holes}
        return _Saved(min(steps), found, outline, list(mine.values()), False, left_out)

    return merged


def _is_the_same(name: str, units: list[Units], outlines: list[Outline]) -> bool:
    """Return whether a unit is the same on all ranks, or the ranks have shards of one whole."""
    if not all(name in one for one in units) or len({pickle.dumps(one[name]) for one in units}) > 1:
        return False
    for hole in contents.holes_in(units[0][name]):
        places, placements, dtypes, fingerprints = zip(*(one[hole] for one in outlines), strict=True)
        if any(one != placements[0] for one in placements) or len(set(dtypes)) > 1:
            return False
        if len({place.whole for place in places}) > 1 or placements[0] is None and len(set(fingerprints)) > 1:
            return False
    return True


class _Plan:
    """How this rank's objects get their state: checked before anything is changed."""

    def __init__(
        self, saved: _Saved, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: tuple[Any, ...]
    ) -> None:
        """Raises ValueError for another model, optimizer or others; LookupError if no trained parameter is left."""
        self.saved = saved
        present = contents.units_of(model, optimizer, others)
        now = {name: Layout.of(tensor) for name, tensor in contents.tensors_in(present).items()}
        _ensure_same_objects(saved, present, now)
        trained = {f"model.{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
        if trained and trained <= set(saved.left_out):
            raise LookupError(NO_REPLICA)
        groups = [] if optimizer is None else optimizer.param_groups
        parameters = [Layout.of(parameter) for group in groups for parameter in group["params"]]
        self._layouts = {
            name: _layout_of(name, whole, placements, now, parameters)
            for name, (whole, placements) in saved.outline.items()
        }
        self._found = {name: values for name in self._layouts if (values := self._own_values(name)) is not None}
        self.lacking = {
            name: math.prod(layout.whole) for name, layout in self._layouts.items() if name not in self._found
        }
        """Elements of the tensors that must come from other ranks."""

    def _own_values(self, name: str) -> torch.Tensor | None:
        for one in self.saved.copies:
            if self.saved.may_take(one, name) and one.parts[name].place == self._layouts[name].place:
                return one.parts[name].values
        return None

    def gather(self, lacking: dict[str, int], given: list[Copy]) -> None:
        """Exchange the parts of tensors that any rank lacks, out of the copies that each rank gives.

        Raises, on all ranks, LookupError if some are missing, and ValueError if ranks had different values of a whole.
        """
        problem: tuple[type[Exception], str] | None = None
        for names in _batches(lacking):
            answers = from_all([[one.parts[name] for one in given if self._gives(one, name)] for name in names])
            for name, parts_of_ranks in zip(names, zip(*answers, strict=True), strict=True):
                parts = [part for parts in parts_of_ranks for part in parts]
                if name in self._layouts:
                    try:
                        self._found[name] = _joined(self._layouts[name], parts)
                    except (LookupError, ValueError) as error:
                        problem = problem or (type(error), f"dist_state: {name}: {error}")
        if lacking:
            _raise_agreed(from_all(problem))

    def _gives(self, one: Copy, name: str) -> bool:
        """Return whether a copy's part is needed: of a replica one is enough."""
        part = one.parts.get(name)
        return part is not None and (self.saved.is_of_same_ranks or part.placements is not None or one.rank == 0)

    def units(self) -> Units:
        """Return the units with their tensors, none of which shares memory with a copy that objects could keep."""
        tensors = {name: self._layouts[name].tensor(values) for name, values in self._found.items()}
        kept = {name: tensor if _is_copied_on_load(name) else tensor.clone() for name, tensor in tensors.items()}
        units: Units = contents.put_together(self.saved.units, kept)
        return units


def _is_copied_on_load(name: str) -> bool:
    return name.startswith("model.") and "_extra_state" not in name


def _joined(layout: Layout, parts: list[Part]) -> torch.Tensor:
    """Return this rank's part of a tensor out of the parts of all ranks."""
    if not parts:
        raise LookupError("parts of it are missing")
    if any(one.placements is None and not torch.equal(one.values, parts[0].values) for one in parts[1:]):
        raise ValueError(DIFFERED)
    values = torch.empty(layout.place.shape, dtype=parts[0].values.dtype)
    try:
        fill(values, layout.place, [(part.place, part.values) for part in parts])
    except ValueError as error:
        raise LookupError(str(error)) from None
    return values


def _ensure_same_objects(saved: _Saved, present: Units, now: dict[str, Layout]) -> None:
    before = _shapes(saved.units, {name: whole for name, (whole, _) in saved.outline.items()})
    after = _shapes(present, {name: layout.whole for name, layout in now.items()})
    names = sorted(name for name in before.keys() | after if before.get(name, 0) != after.get(name, 0))
    wrong = [name.removeprefix("model.") for name in names if name not in saved.left_out]
    if wrong:
        raise ValueError(OTHER.format(names=_listed(wrong)))
    kinds = present[contents.KINDS]
    if saved.units.get(contents.KINDS, kinds) != kinds:
        raise ValueError(_difference(saved.units[contents.KINDS], kinds))
    groups = {name: group for name, group in saved.units.items() if name.startswith("optimizer.param_groups.")}
    if any(
        name not in present or len(group["params"]) != len(present[name]["params"]) for name, group in groups.items()
    ):
        raise ValueError(OTHER.format(names="the optimizer's parameters"))


def _shapes(units: Units, wholes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...] | None]:
    """Return the shapes of the model's tensors; None for extra state, which may change its shape."""
    names = [name for name in units if name.startswith("model.")]
    return {name: None if "_extra_state" in name else wholes.get(name) for name in names}


def _difference(then: list[str | None], now: list[str | None]) -> str:
    """Return what differs between the kinds of optimizer and others."""
    if (then[0] is None) != (now[0] is None):
        return OTHER.format(names="no optimizer, or one too many")
    if len(then) != len(now):
        return OTHERS.format(then=_count(len(then) - 1), now=_count(len(now) - 1))
    return OTHER.format(
        names=_listed([f"{before} is {after} now" for before, after in zip(then, now, strict=True) if before != after])
    )


def _layout_of(
    name: str, whole: tuple[int, ...], placements: Any, now: dict[str, Layout], parameters: list[Layout]
) -> Layout:
    """Return how a saved tensor has to lie: as now, as its parameter, or as another tensor of its shape."""
    here = now.get(name)
    if name.startswith("model."):
        return here if here is not None and here.whole == whole else Layout(whole)
    number = name.split(".")[2] if name.startswith("optimizer.state.") else ""
    if number.isdigit() and int(number) < len(parameters):
        here = parameters[int(number)]
        if whole and whole == here.whole:
            return here
    if placements is None or here is not None and here.placements is None:
        return Layout(whole)
    if here is not None and here.whole == whole:
        return here
    sharded = [one for one in (here, *now.values()) if one is not None and one.placements is not None]
    for one in sharded:
        if one.whole == whole and one.placements == placements:
            return one
    meshes = [one.mesh for one in sharded if one.placements is not None and len(one.placements) == len(placements)]
    return Layout(whole, placements, meshes[0]) if meshes else Layout(whole)


def _batches(sizes: dict[str, int]) -> Iterator[list[str]]:
    """Yield the names of tensors that the ranks exchange at once: thousands of exchanges of small ones would take long.

    >>> list(_batches({"a": 6, "b": BATCH, "c": 1, "d": 1}))
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


def _parameters(model: torch.nn.Module) -> set[int]:
    """Return the ids of the parameters: a wrapper has those of its model."""
    return set(map(id, model.parameters()))


ELSEWHERE = ("IPython", "ipykernel", "ipyparallel", "traitlets")
SKIPPED = (types.ModuleType, types.FrameType, types.TracebackType, types.CodeType, type, BaseException)


def _variable_that_holds(target: Any) -> str | None:
    """Return the name of a variable from which `target` can be reached, of the running cell and its functions."""
    seen: set[int] = set()
    for name, value in _variables():
        todo = [value]
        while todo:
            one = todo.pop()
            if one is target:
                return name
            if id(one) not in seen and gc.is_tracked(one) and not _is_skipped(type(one)):
                seen.add(id(one))
                todo += _references(one)
    return None


def _variables() -> Iterator[tuple[str, Any]]:
    """Yield the variables of the functions that run, and of their modules; not those of IPython (`Out`, `_`)."""
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
    """Return the number of the cell that runs; None in a function of a program."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    frame: types.FrameType | None = sys._getframe()
    while shell is not None and frame is not None:
        if frame.f_globals is shell.user_ns and frame.f_code.co_name == "<module>":
            return int(shell.execution_count)
        frame = frame.f_back
    return None


def _is_skipped(kind: type) -> bool:
    return issubclass(kind, SKIPPED) or any(one.__module__.startswith(ELSEWHERE) for one in kind.__mro__)


def _references(value: Any) -> list[Any]:
    if isinstance(value, types.FunctionType):  # not its globals
        return [value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__]
    return gc.get_referents(value)


def _listed(names: list[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _count(number: int) -> str:
    return f"{number} other{'s' if number != 1 else ''}"


def _ensure_group() -> None:
    if not dist.is_initialized():
        raise RuntimeError(NO_GROUP)
