"""Divide training state into units for ``dist_state``: a parameter, its optimizer state, a scheduler, a generator.

    units_of      return the present state by unit name
    take_apart    separate its tensors, by name, from everything else, which is pickled with holes in place of them
    put_together  do the reverse

A unit is restored as a whole or not at all, as half of a scheduler's state would be wrong. Only the unit of a sampler
loses attributes on another number of ranks (`drop_unsure_progress`).
"""

from __future__ import annotations

import copy
import io
import pickle
import random
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler

from ddip.sharded.layout import DTensor, Layout, local_of, sharded_by_id
from ddip.sharded.parameter_groups import drop_unreduced_gradients, groups_of, has_unreduced_gradients
from ddip.sharded.pending_gradients import find_pending

Units = dict[str, Any]
KINDS = "kinds"
"""Name of the unit with the class names of optimizer and others."""
BROADCAST = "broadcast"
"""Name of the unit with the names of all DDP buffers, which DDP sends from rank 0 to all before each forward pass."""
LOOSE = "parameters."
"""Prefix of the units with parameters that only an optimizer has, such as a logit scale or the weights of losses."""
GRADIENTS = "gradients."
"""Prefix of the units with gradients that no optimizer step has used yet; the rest of the name is the parameter's."""
BUCKETS = "buckets"
"""Name of the unit with the buckets of each DDP wrapper, which decide the order of its sums."""
buckets_of: Callable[[DistributedDataParallel], Any] | None = None
"""Set in ddip's ranks: returns the buckets of a wrapper between two steps; all ranks call it."""
use_buckets: Callable[[DistributedDataParallel, Any], None] | None = None
"""Set in ddip's ranks: gives a wrapper such buckets; all ranks call it."""
NUMBERS = (int, float, str, bool, type(None))
OF_THE_GROUP = ("rank", "num_replicas", "num_samples", "total_size")
"""Attributes of samplers that belong to the current group, not to the training."""
OF_THE_DATA = ("data_source", "dataset")
"""Attributes of samplers that are not positions, although a dataset may be a list of integers."""
PROGRESS = ("epoch", "seed", "initial_seed")
"""Attributes of samplers that mean the same on any number of ranks, as generators do."""
NO_STATE = (
    "dist_state: a {kind} has no state_dict() and load_state_dict(); give dist_state schedulers, scalers, samplers, "
    "generators, or your own objects with these two methods"
)
A_LOADER = (
    "dist_state: a {kind} has no state_dict(); give dist_state the loader's sampler and generator, or use "
    "torchdata's StatefulDataLoader"
)


UNREDUCED = "a gradient that fully_shard has not reduced yet (call save() only after optimizer.step())"


class Hole(NamedTuple):
    """A placeholder for the tensor that is kept under this name."""

    name: str


class _GeneratorState(NamedTuple):
    """The state of a torch generator in a sampler; a new sampler may not have created its generator yet."""

    device: str
    state: bytes
    """As bytes, because a pickled tensor contains its address, and would differ between ranks."""


class _IntegerList(NamedTuple):
    """A list of integers, which is pickled at once, since it may be as long as a dataset."""

    values: list[int]


class _Pickler(pickle.Pickler):
    has_objects = False
    """True if the value has objects that may be pickled but cannot be unpickled."""

    def reducer_override(self, value: Any) -> Any:
        """Pickle `value` as usual; raise TypeError for a DTensor, which would be pickled with its mesh."""
        if isinstance(value, DTensor):
            raise TypeError("it holds a DTensor in an object; DTensors are kept in dicts, lists and tuples")
        self.has_objects |= type(value) not in (Hole, OrderedDict)
        return NotImplemented


# -- state of the objects


def units_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Sequence[Any]) -> Units:
    """Return the state of these objects and of the process's random generators, by unit name.

    The tensors are not copied.
    """
    units = Units()
    for prefix, module in _modules_by_unit(model, others).items():
        units |= {f"{prefix}.{name}": value for name, value in module.state_dict().items()}
    names = _names_by_id(model, optimizer, others)  # after state_dict(), which reshards models
    for prefix, owner in optimizers_of(optimizer, others).items():
        units |= _optimizer_units(prefix, owner, names)
    units |= {name: _state_of(other) for name, other in _other_objects(others).items()}
    units |= loose_parameters(model, optimizer, others)
    units[KINDS] = [None if optimizer is None else kind_of(optimizer), *map(kind_of, others)]
    broadcast = {name: wrapper for name, wrapper in _ddp_wrappers(model, others).items() if wrapper.broadcast_buffers}
    if broadcast:
        units[BROADCAST] = [
            f"{prefix}.module.{name}"
            for prefix, wrapper in broadcast.items()
            for name, _ in wrapper.module.named_buffers()
        ]
    return units | {f"generators.{name}": state for name, state in process_generators().items()}


def _optimizer_units(prefix: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> Units:
    """Return an optimizer's state by the names of its parameters.

    Their order may change between runs and ranks, as that of a set does.
    """
    state = optimizer.state_dict()
    units = Units()
    for number, group in enumerate(state["param_groups"]):
        group = {key: value for key, value in group.items() if key != "param_names"}  # in the order of the parameters
        group["params"] = sorted(names[id(parameter)] for parameter in optimizer.param_groups[number]["params"])
        units[f"{prefix}.param_groups.{number}"] = group
    by_number = dict(enumerate(names[id(parameter)] for parameter in _parameters_of(optimizer)))
    units |= {f"{prefix}.state.{by_number.get(key, key)}": values for key, values in state["state"].items()}
    more = {key: value for key, value in state.items() if key not in ("param_groups", "state")}
    return units | ({f"{prefix}.more": more} if more else {})


def bucket_units(model: torch.nn.Module, others: Sequence[Any]) -> Units:
    """Return the unit with the buckets of DDP wrappers, if there are any.

    All ranks must call this, between two steps.
    """
    wrappers = _ddp_wrappers(model, others)
    if not wrappers or buckets_of is None:
        return {}
    return {BUCKETS: {name: buckets_of(wrapper) for name, wrapper in wrappers.items()}}


def gradient_units(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Sequence[Any]) -> Units:
    """Return the gradients that no optimizer step has used yet, by unit name.

    Call this after `units_of`, which reshards models.

    Raises ValueError if ``fully_shard`` has not reduced gradients yet, whose whole tensors are of each rank alone.
    """
    modules = [part for module in _modules_by_unit(model, others).values() for part in module.modules()]
    if any(has_unreduced_gradients(group) for module in modules for group in groups_of(module)):
        raise ValueError(UNREDUCED)
    pending = find_pending(_named_parameters(model, optimizer, others))
    return {f"{GRADIENTS}{name}": gradient for name, gradient in pending.items()}


def load_units(
    units: Units, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Sequence[Any]
) -> None:
    """Set the state of these objects from `units`, and clear all other gradients.

    State that `units` lacks stays as it is, except an optimizer's state per parameter, which is reset. Gradients are
    cleared because they may belong to a failed step.
    """
    for prefix, module in _modules_by_unit(model, others).items():
        state = module.state_dict()
        state.update(_units_below(prefix, units))
        module.load_state_dict(state)
    wrappers = _ddp_wrappers(model, others)
    for name, buckets in units.get(BUCKETS, {}).items():
        if use_buckets is not None and name in wrappers:
            use_buckets(wrappers[name], buckets)
    for name, parameter in loose_parameters(model, optimizer, others).items():
        if name in units:
            parameter.detach().copy_(units[name])
    _clear_gradients(model, optimizer, others)
    for name, parameter in _named_parameters(model, optimizer, others).items():
        if (gradient := units.get(f"{GRADIENTS}{name}")) is not None:
            parameter.grad = gradient.to(parameter.device)
    names = _names_by_id(model, optimizer, others)
    for prefix, owner in optimizers_of(optimizer, others).items():
        _load_optimizer(prefix, owner, units, names)
    for name, other in _other_objects(others).items():
        if name in units:
            _load_state(other, units[name])
    set_process_generators(_units_below("generators", units))


def _units_below(prefix: str, units: Units) -> Units:
    """Return the units whose names begin with `prefix` and a dot, by the rest of their names."""
    return {name.removeprefix(f"{prefix}."): value for name, value in units.items() if name.startswith(f"{prefix}.")}


def _load_optimizer(prefix: str, optimizer: torch.optim.Optimizer, units: Units, names: dict[int, str]) -> None:
    state = dict(optimizer.state_dict()) | units.get(f"{prefix}.more", {})
    state["param_groups"] = [
        units.get(f"{prefix}.param_groups.{number}", group) | {"params": group["params"]}
        for number, group in enumerate(state["param_groups"])
    ]
    saved = _units_below(f"{prefix}.state", units)
    numbers = {names[id(parameter)]: number for number, parameter in enumerate(_parameters_of(optimizer))}
    state["state"] = {numbers.get(name, name): values for name, values in saved.items()}
    optimizer.load_state_dict(state)
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        for parameter in _parameters_of(optimizer):
            name = names[id(parameter)]
            has_same_dtype = getattr(units.get(name), "dtype", parameter.dtype) == parameter.dtype
            if name in saved and has_same_dtype:
                optimizer.state[parameter] = _undo_cast(optimizer.state[parameter], saved[name])


def _undo_cast(loaded: Any, saved: Any) -> Any:
    """Return a parameter's `loaded` state, with the `saved` tensors if torch has cast them.

    torch casts all except ``step`` to the dtype of the parameter.
    """
    if isinstance(loaded, torch.Tensor) and isinstance(saved, torch.Tensor):
        return loaded if loaded.dtype == saved.dtype else saved.to(loaded.device)
    if isinstance(loaded, dict) and isinstance(saved, dict):
        return _map_items(loaded, lambda key, item: item if key == "step" else _undo_cast(item, saved.get(key)))
    if isinstance(loaded, list | tuple) and type(loaded) is type(saved):
        return _map_items(loaded, lambda number, item: _undo_cast(item, saved[number]))
    return loaded


def _clear_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Sequence[Any]) -> None:
    modules = _modules_by_unit(model, others).values()
    for parameter in _named_parameters(model, optimizer, others).values():
        parameter.grad = None
    for part in [part for module in modules for part in module.modules()]:
        for group in groups_of(part):
            drop_unreduced_gradients(group)


def _modules_by_unit(model: torch.nn.Module, others: Sequence[Any]) -> dict[str, torch.nn.Module]:
    """Return the model, and the modules among `others`, by the name of their units."""
    found = {f"others.{number}": other for number, other in enumerate(others) if isinstance(other, torch.nn.Module)}
    return {"model": model, **found}


def _ddp_wrappers(model: torch.nn.Module, others: Sequence[Any]) -> dict[str, DistributedDataParallel]:
    modules = _modules_by_unit(model, others).items()
    return {name: module for name, module in modules if isinstance(module, DistributedDataParallel)}


def _other_objects(others: Sequence[Any]) -> dict[str, Any]:
    """Return those of `others` that are neither modules nor optimizers, by the names of their units."""
    kinds = (torch.nn.Module, torch.optim.Optimizer)
    return {f"others.{number}": other for number, other in enumerate(others) if not isinstance(other, kinds)}


def optimizers_of(optimizer: torch.optim.Optimizer | None, others: Sequence[Any]) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizer, and the optimizers among `others`, by the name of their units."""
    found = {
        f"others.{number}": other for number, other in enumerate(others) if isinstance(other, torch.optim.Optimizer)
    }
    return found if optimizer is None else {"optimizer": optimizer, **found}


def _parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _names_by_id(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Sequence[Any]
) -> dict[int, str]:
    """Return the unit names of all parameters by their ids."""
    names = {id(parameter): name for name, parameter in _named_parameters(model, optimizer, others).items()}
    for module in _modules_by_unit(model, others).values():
        names |= {id(sharded): names[gathered] for gathered, sharded in sharded_by_id(module).items()}
    return names


def _named_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """Return all parameters of modules and optimizers by the names of their units."""
    of_modules = {
        f"{prefix}.{name}": parameter
        for prefix, module in _modules_by_unit(model, others).items()
        for name, parameter in module.named_parameters()
    }
    return of_modules | loose_parameters(model, optimizer, others)


def loose_parameters(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, others: Sequence[Any]
) -> dict[str, torch.Tensor]:
    """Return the parameters that an optimizer has and no module, by the name of their unit."""
    modules = _modules_by_unit(model, others).values()
    known = {id(parameter) for module in modules for parameter in module.parameters()}
    known |= {id(parameter) for module in modules for parameter in sharded_by_id(module).values()}
    found = {}
    for name, owner in optimizers_of(optimizer, others).items():
        for number, parameter in enumerate(_parameters_of(owner)):
            if id(parameter) not in known:
                known.add(id(parameter))
                found[f"{LOOSE}{name}.{number}"] = parameter
    return found


def kind_of(value: Any) -> str:
    """Return the name of an object's class."""
    return type(value).__name__


def ensure_state(others: Sequence[Any]) -> None:
    """Raise TypeError, with an alternative, if one of `others` has no state that can be kept."""
    for other in others:
        is_supported = _is_generator(other) or isinstance(other, Sampler)
        if not is_supported and not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
            raise TypeError((A_LOADER if isinstance(other, DataLoader) else NO_STATE).format(kind=kind_of(other)))


def _is_generator(value: Any) -> bool:
    """Return whether `value` is a random generator of torch, NumPy or ``random``."""
    if isinstance(value, random.SystemRandom):  # has no state
        return False
    numpy = sys.modules.get("numpy.random")
    is_numpy = numpy is not None and isinstance(value, numpy.Generator | numpy.RandomState)
    return is_numpy or isinstance(value, torch.Generator | random.Random)


def _state_of(other: Any) -> Any:
    if hasattr(other, "state_dict"):
        return other.state_dict()
    if isinstance(other, random.Random):
        return other.getstate()
    if isinstance(other, Sampler):
        return {name: _attribute_state(value) for name, value in vars(other).items() if _is_progress(name, value)}
    if isinstance(other, torch.Generator):
        return other.get_state()
    return other.bit_generator.state if hasattr(other, "bit_generator") else other.get_state(legacy=False)


def _load_state(other: Any, state: Any) -> None:
    if hasattr(other, "load_state_dict"):
        other.load_state_dict(state)
    elif isinstance(other, random.Random):
        other.setstate(state)
    elif isinstance(other, Sampler):
        for name, value in state.items():
            _load_attribute(other, name, value)
    elif hasattr(other, "bit_generator"):
        other.bit_generator.state = state
    else:
        other.set_state(state)


def _is_progress(name: str, value: Any) -> bool:
    """Return whether a sampler's attribute is part of its position, such as an epoch, an order or a generator."""
    if name in OF_THE_GROUP or name in OF_THE_DATA:
        return False
    return type(value) in NUMBERS or _is_generator(value) or isinstance(value, Sampler) or _has_integers(value)


def _has_integers(value: Any) -> bool:
    """Return whether `value` is a list, a NumPy array or a plain tensor of integers, or any NumPy number."""
    if type(value) is list:
        return set(map(type, value)) <= {int, bool}
    if is_plain(value):
        return not (value.is_floating_point() or value.is_complex())
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(value, numpy.number | numpy.bool_) or type(value) is numpy.ndarray and value.dtype.kind in "iub"


def _attribute_state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return _GeneratorState(str(value.device), bytes(value.get_state().tolist()))
    if isinstance(value, list):
        return _IntegerList(value)
    return _state_of(value) if isinstance(value, Sampler) else value


def _load_attribute(sampler: Any, name: str, value: Any) -> None:
    """Set a sampler's attribute to the saved `value`; in place if possible, since it may be shared."""
    present: Any = getattr(sampler, name, None)
    if isinstance(value, _GeneratorState):
        if not isinstance(present, torch.Generator):
            present = torch.Generator(value.device)
            setattr(sampler, name, present)
        present.set_state(torch.frombuffer(bytearray(value.state), dtype=torch.uint8))
    elif isinstance(present, Sampler):
        _load_state(present, value)
    elif _is_generator(value) and type(present) is type(value):
        _load_state(present, _state_of(value))
    elif isinstance(value, _IntegerList):
        if not isinstance(present, list):
            present = []
            setattr(sampler, name, present)
        present[:] = value.values
    elif hasattr(value, "shape") and value.shape and _fits_into(value, present):
        present[...] = value
    else:
        setattr(sampler, name, value)


def _fits_into(value: Any, present: Any) -> bool:
    is_same = type(present) is type(value) and present.shape == value.shape and present.dtype == value.dtype
    return is_same and (isinstance(present, torch.Tensor) or present.flags.writeable)


def drop_unsure_progress(units: Units, others: Sequence[Any]) -> list[str]:
    """Drop attributes of samplers that may depend on the number of ranks from `units`.

    Only epochs, seeds and generators are kept; a batch size or a count of items may depend on it. Returns the names of
    dropped attributes whose present value differs.
    """
    different: list[str] = []
    for name, other in _other_objects(others).items():
        if name in units and isinstance(other, Sampler):
            units[name] = _sure_progress(other, units[name], different)
    return different


def _sure_progress(sampler: Any, state: Any, different: list[str]) -> Any:
    if hasattr(sampler, "state_dict"):
        return state
    kept = {}
    for name, value in state.items():
        present = getattr(sampler, name, None)
        if isinstance(present, Sampler):
            kept[name] = _sure_progress(present, value, different)
        elif isinstance(value, _GeneratorState) or _is_generator(value) or name.strip("_") in PROGRESS:
            kept[name] = value
        elif _as_numbers(value) != _as_numbers(present):
            different.append(f"{kind_of(sampler)}.{name}")
    return kept


def _as_numbers(value: Any) -> Any:
    if isinstance(value, _IntegerList):
        return value.values
    return value.tolist() if hasattr(value, "tolist") else value


def unkept_positions(others: Sequence[Any]) -> list[str]:
    """Return the names of sampler attributes that are iterators, since their position is not kept."""
    found = []
    for other in others:
        if isinstance(other, Sampler) and not hasattr(other, "state_dict"):
            attributes = vars(other).items()
            found += [f"{kind_of(other)}.{name}" for name, value in attributes if hasattr(type(value), "__next__")]
            found += unkept_positions([value for _, value in attributes if isinstance(value, Sampler)])
    return found


def process_generators() -> dict[str, Any]:
    """Return the states of the process-wide random number generators by name."""
    states = {"torch": torch.get_rng_state(), "random": random.getstate()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    if "numpy.random" in sys.modules:
        states["numpy"] = sys.modules["numpy.random"].get_state(legacy=False)
    return states


def set_process_generators(states: Mapping[str, Any]) -> None:
    """Set the process-wide random number generators to states of `process_generators`."""
    if "torch" in states:
        torch.set_rng_state(states["torch"])
    if "random" in states:
        random.setstate(states["random"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    if "numpy" in states:
        import numpy

        numpy.random.set_state(states["numpy"])


# -- tensors, apart from the rest


def take_apart(units: Units) -> tuple[dict[str, torch.Tensor], bytes]:
    """Return the tensors of `units` by name, and everything else pickled.

    Raises ValueError, with the unit's name, if a unit cannot be pickled and unpickled.
    """
    tensors: dict[str, torch.Tensor] = {}
    rest = {name: _replace_tensors(name, value, tensors) for name, value in units.items()}
    try:
        return tensors, pickle_checked(rest)
    except Exception:
        for name, value in rest.items():
            try:
                pickle_checked(value)
            except Exception as error:
                raise ValueError(f"{name} ({type(error).__name__}: {error})") from error
        raise


def put_together(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Return a copy of `value` with `tensors` in place of the holes."""
    if isinstance(value, Hole):
        return tensors[value.name]
    return _map_items(value, lambda key, item: put_together(item, tensors))


def holes_in(value: Any) -> list[str]:
    """Return the names of the tensors that the placeholders (`Hole`) in `value` stand for."""
    if isinstance(value, Hole):
        return [value.name]
    found: list[str] = []
    _map_items(value, lambda key, item: found.extend(holes_in(item)))
    return found


def pickle_checked(value: Any) -> bytes:
    """Pickle `value`, after a test that it can be unpickled; raise any error of pickling or unpickling."""
    file = io.BytesIO()
    pickler = _Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dump(value)
    if pickler.has_objects:
        pickle.loads(file.getvalue())
    return file.getvalue()


def _replace_tensors(name: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, DTensor) or is_plain(value):
        while name in tensors:  # for a dict with the keys 1 and "1"
            name += "'"
        tensors[name] = value
        return Hole(name)
    return _map_items(value, lambda key, item: _replace_tensors(f"{name}.{key}", item, tensors))


def _map_items(value: Any, change: Any) -> Any:
    """Copy a dict, list or tuple with ``change(key, item)`` for each item; return other values unchanged."""
    if type(value) in (dict, OrderedDict, defaultdict):
        result = copy.copy(value)  # keeps torch's metadata, which is an attribute
        for key, item in value.items():
            result[key] = change(key, item)
        return result
    if type(value) in (list, tuple):
        return type(value)(change(number, item) for number, item in enumerate(value))
    return value


def tensors_in(units: Units) -> dict[str, torch.Tensor]:
    """Return the tensors by the names that `take_apart` gives them."""
    tensors: dict[str, torch.Tensor] = {}
    for name, value in units.items():
        _replace_tensors(name, value, tensors)
    return tensors


def layout_of(name: str, tensor: torch.Tensor) -> Layout:
    """Return the layout of a tensor; raise ValueError, with its name, if a copy could not be restored."""
    if isinstance(tensor, DTensor) and not is_plain(local_of(tensor)):
        raise ValueError(f"{name}, a DTensor of {kind_of(local_of(tensor))}s,")
    try:
        return Layout.of(tensor)
    except ValueError as error:
        raise ValueError(f"{name} ({error})") from error


def is_plain(value: Any) -> bool:
    """Return whether `value` is an ordinary strided tensor; others (sparse, quantized, nested, meta) are pickled."""
    is_tensor = type(value) in (torch.Tensor, torch.nn.Parameter) or type(value).__name__ == "Buffer"
    is_special = is_tensor and (value.is_quantized or value.is_nested or value.device.type == "meta")
    return is_tensor and not is_special and value.layout is torch.strided
