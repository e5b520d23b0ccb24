"""Choose a rank's variables for a save, describe them, and pickle them with one memo."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from IPython.core.getipython import get_ipython
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler

from ddip.protocol.objects import pickling
from ddip.protocol.objects.pickling import Graph, Pickled
from ddip.rank import user_namespace
from ddip.rank.inspection import kinds
from ddip.rank.inspection.walk import PRIVATE_NAMES
from ddip.rank.objects import reducers
from ddip.rank.saves.agreement import reason_text
from ddip.rank.saves.imported import find_imported
from ddip.rank.saves.save_pickler import PARTS, Key, Keys, SavePickler, is_fully_sharded, is_of_torch
from ddip.sharded.layout import DTensor

GRADIENTS = "<gradients>"
"""Name of the list of tensors with their gradients, as a tensor is pickled without its gradient."""
BY_NAME = "only its name was saved, since it is an object of a package and cannot be copied"
UNREDUCED = "they are of micro-batches and not reduced yet, so they are not saved; save after optimizer.step()"
NUMERIC_SETTINGS = ("broadcast_buffers", "mixed_precision")
"""Attributes of a DDP wrapper that change its numbers."""
KEYED = (torch.optim.Optimizer, LRScheduler, torch.amp.GradScaler)
"""Classes of objects besides modules that a load fills in place."""


def choose_variables(names: Collection[str]) -> dict[str, Any]:
    """Return the variables `names`, or all of the user's if it is empty, in the order in which a load creates them.

    Raises LookupError if there is no variable, or none of a given name.
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
    if not chosen:
        raise LookupError("there is no variable to save")
    return dict(sorted(chosen.items(), key=lambda item: (pickling.loading_order(item[1]), item[0])))


def find_keys(variables: Mapping[str, Any]) -> dict[Key, Any]:
    """Return the objects that a load can fill in place, by key; an object may have several."""
    found: dict[Key, Any] = {}
    for variable, value in variables.items():
        if issubclass(type(value), torch.nn.Module):  # isinstance() fails for a proxy of an object that has ended
            with contextlib.suppress(Exception):  # such as a module whose constructor did not call torch's
                modules = value.named_modules(remove_duplicate=False)
                of_module = {Key(variable, "module", name): module for name, module in modules}
                found |= of_module | {Key(variable, "tensor", name): tensor for name, tensor in _tensors_of(value)}
        elif issubclass(type(value), KEYED):
            found[Key(variable, "object", "")] = value
    return found


def _tensors_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]


def group_keys(keys: Mapping[Key, Any]) -> dict[int, Keys]:
    """Return all keys of each object, by the object's id."""
    found: dict[int, Keys] = {}
    for key, value in keys.items():
        found[id(value)] = (*found.get(id(value), ()), key)
    return found


def number_objects(keys: Mapping[Key, Any]) -> dict[Key, int]:
    """Return a number for each key, which is equal for two keys of one object."""
    numbers: dict[int, int] = {}
    return {key: numbers.setdefault(id(value), len(numbers)) for key, value in keys.items()}


def with_same_objects(saved: Mapping[Key, int], now: Mapping[Key, Any], names: Collection[str]) -> set[str]:
    """Return the variables of `names` that share objects now as they did when they were saved.

    If two names are one object now but were two, or the reverse, neither can be filled in place.
    """
    chosen = set(names)
    while True:
        pairs = [(key, saved[key], id(now[key])) for key in now if key.variable in chosen and key in saved]
        by_saved, by_now = dict[int, tuple[Key, int]](), dict[int, tuple[Key, int]]()
        wrong: set[str] = set()
        for key, number, identity in pairs:
            first, other = by_saved.setdefault(number, (key, identity))
            if other != identity:
                wrong |= {first.variable, key.variable}
            first, known = by_now.setdefault(identity, (key, number))
            if known != number:
                wrong |= {first.variable, key.variable}
        if not wrong:
            return chosen
        chosen -= wrong


def structure_of(value: Any) -> str:
    """Return a text that is equal for two objects if one can take the state of the other; else "".

    A module or optimizer with hooks of the user's is another object: the hooks may hold any other objects. So is a
    tensor that cannot be written in place, and an object whose class pickles other things than its parts.
    """
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    try:
        if _has_own_reduce(value):
            return ""
        if isinstance(value, torch.nn.Module):
            return _structure_of_module(value, kind)
        if isinstance(value, torch.optim.Optimizer):
            has_hooks = any(map(vars(value).get, pickling.OPTIMIZER_HOOKS))
            return (
                "" if has_hooks else repr((kind, [[tuple(p.shape) for p in g["params"]] for g in value.param_groups]))
            )
    except Exception:  # such as a module whose parameters have no shape yet
        return ""
    return kind if isinstance(value, KEYED) else ""


def _structure_of_module(module: torch.nn.Module, kind: str) -> str:
    tensors, parts = _tensors_of(module), [*module.named_modules(remove_duplicate=False)]
    if not all(_can_be_written(tensor) for _, tensor in tensors):
        return ""
    if any(_has_own_hooks(part) or not _pickles_its_parts(part) for _, part in parts):
        return ""
    facts = [(name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad) for name, tensor in tensors]
    return repr((kind, facts, [(name, type(part).__qualname__, _settings_of(part)) for name, part in parts]))


def _settings_of(module: torch.nn.Module) -> Any:
    """Return the settings of a wrapper that change its numbers and that only its constructor sets."""
    if isinstance(module, DistributedDataParallel):
        hooks = [f"{hook.__module__}.{hook.__qualname__}" for hook, _ in module._comm_hooks]
        settings = [getattr(module, name, None) for name in NUMERIC_SETTINGS]
        return settings, hooks, reducers.builtin_hook(module)
    return module._get_fsdp_state()._mp_policy if is_fully_sharded(module) else None  # type: ignore[operator]


def _has_own_hooks(module: torch.nn.Module) -> bool:
    groups = [
        hooks for name, hooks in vars(module).items() if name.endswith(pickling.HOOKS) and isinstance(hooks, dict)
    ]
    return any(not is_of_torch(hook) for hooks in groups for hook in hooks.values() if callable(hook))


def _pickles_its_parts(module: torch.nn.Module) -> bool:
    """Return whether a module's class pickles the module's parameters, buffers and parts."""
    if _has_own_reduce(module):
        return False
    get_state = type(module).__getstate__  # type: ignore[attr-defined]
    if get_state is object.__getstate__ or isinstance(module, DistributedDataParallel):  # type: ignore[attr-defined]
        return True
    state = get_state(module)
    return isinstance(state, dict) and all(
        [(name, id(part)) for name, part in state.get(group, {}).items()]
        == [(name, id(part)) for name, part in vars(module)[group].items()]
        for group in PARTS
    )


def _has_own_reduce(value: Any) -> bool:
    """Return whether a class outside torch decides with ``__reduce__`` how `value` is created again."""
    for name in ("__reduce__", "__reduce_ex__"):
        method = getattr(type(value), name)
        if method is not getattr(object, name) and not str(method.__module__).startswith("torch."):
            return True
    return False


def _can_be_written(tensor: torch.Tensor) -> bool:
    is_expanded = tensor.layout is torch.strided and any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return not is_expanded and (tensor.is_leaf or not tensor.requires_grad)


def reshard_models(values: Iterable[Any]) -> None:
    """Free gathered parameters of ``fully_shard``, which would be found instead of the sharded ones."""
    for value in values:
        is_module = issubclass(type(value), torch.nn.Module) and "_modules" in vars(value)
        for module in value.modules() if is_module else ():
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
    keys, imported = group_keys(find_keys(variables)), find_imported(variables)
    left_out: dict[str, str] = {}
    order = list(variables)
    while True:  # a pickler cannot be used again after an error
        graph, name = Graph(lambda file, buffers: SavePickler(file, buffers, keys, imported, left_out)), ""
        rest = [name for name in order if name not in left_out]
        try:
            for name in rest:
                known = len(graph.pickler.leaves)
                graph.add(name, variables[name])
                _try_gradients(graph.pickler.leaves[known:])
        except Exception as error:
            left_out[name] = reason_text(error)
            for other in rest[rest.index(name) + 1 :]:
                try:
                    Graph(lambda file, buffers: SavePickler(file, buffers, keys, imported)).add(other, variables[other])
                except Exception as other_error:
                    left_out[other] = reason_text(other_error)
            continue
        pickler = graph.pickler
        graph.add(GRADIENTS, [(leaf, leaf.grad, of) for leaf, of in pickler.leaves if leaf.grad is not None])
        early = [name for name in rest if name in pickler.globals]
        early.sort(key=lambda name: pickling.loading_order(variables[name]))
        ordered = [*early, *(name for name in rest if name not in early)]
        if ordered == rest:
            notes = dict.fromkeys(pickler.hooked, "torch does not save them; add them again after a load")
            notes |= dict.fromkeys(pickler.unreduced, UNREDUCED)
            notes |= {name: BY_NAME for _, name in imported.values() if name in rest}
            return Packed(graph.pickled(), pickler, left_out | notes)
        order = ordered  # code of a class may read them while an object is loaded


def _try_gradients(leaves: Iterable[tuple[Any, Keys]]) -> None:
    """Raise the error of pickling a gradient of another class or layout: all are pickled as one."""
    for leaf, _ in leaves:
        if leaf.grad is not None and not kinds.is_strided(leaf.grad) and not isinstance(leaf.grad, DTensor):
            Graph(lambda file, buffers: SavePickler(file, buffers, {}, {})).add("", leaf.grad)
