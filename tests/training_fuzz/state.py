"""On a rank: copy, compare and restore the state of a training loop, and train an undisturbed copy of it.

It finds the truth about the ranks without ddip and by other means: state_dicts of known objects, not a walk.
"""

from __future__ import annotations

import copy
import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

ALWAYS = {"batches": "batches", "generator": "torch.default_generator"}
"""State of every loop: the name by which ddip must mention it -> an expression."""
TOLERANCE = 1e-6

held: dict[str, Any] = {}
"""State that the harness holds between cells, outside the user's namespace."""


def _evaluate(namespace: dict[str, Any], expression: str) -> Any:
    return eval(expression, {**namespace, "torch": torch})


def copy_state(namespace: dict[str, Any], state: Mapping[str, str]) -> dict[str, Any]:
    """Copy the state of all objects: ``{name: tree}``."""
    return {name: _copy_object(_evaluate(namespace, code)) for name, code in {**state, **ALWAYS}.items()}


def _copy_object(value: Any) -> Any:
    if isinstance(value, nn.Module):
        named = dict(value.named_parameters())
        return {
            "values": {name: one.detach().clone() for name, one in [*named.items(), *value.named_buffers()]},
            "gradients": {name: None if p.grad is None else p.grad.detach().clone() for name, p in named.items()},
        }
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, torch.amp.GradScaler):
        stages = [one["stage"].name for one in value._per_optimizer_states.values()]  # type: ignore[attr-defined]
        return {"state": copy.deepcopy(value.state_dict()), "stages": [s for s in stages if s != "READY"]}
    if hasattr(value, "state_dict"):
        return copy.deepcopy(value.state_dict())
    return copy.deepcopy(value)


def load_state(namespace: dict[str, Any], state: Mapping[str, str], taken: Mapping[str, Any]) -> None:
    """Load state that `copy_state` has copied into the objects of `namespace`, in place."""
    for name, code in {**state, **ALWAYS}.items():
        _load_object(namespace, code, taken[name])


@torch.no_grad()
def _load_object(namespace: dict[str, Any], code: str, tree: Any) -> None:
    value = _evaluate(namespace, code)
    if isinstance(value, nn.Module):
        parameters = dict(value.named_parameters())
        for name, one in [*parameters.items(), *value.named_buffers()]:
            _local(one).copy_(_local(tree["values"][name]))
        for name, one in parameters.items():
            gradient = tree["gradients"][name]
            one.grad = None if gradient is None else gradient.clone()
    elif isinstance(value, torch.Generator):
        value.set_state(tree)
    elif isinstance(value, torch.amp.GradScaler):
        value.load_state_dict(tree["state"])
        value._per_optimizer_states.clear()  # type: ignore[attr-defined]
    elif hasattr(value, "load_state_dict"):
        with warnings.catch_warnings(action="ignore"):
            value.load_state_dict(copy.deepcopy(tree))
    elif "." in code:
        owner, _, attribute = code.rpartition(".")
        setattr(_evaluate(namespace, owner), attribute, copy.deepcopy(tree))
    else:
        namespace[code] = copy.deepcopy(tree)


def _local(tensor: Tensor) -> Tensor:
    return tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor


def _leaves(tree: Any, path: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping):
        pairs: Any = tree.items()
    elif isinstance(tree, list | tuple):
        pairs = enumerate(tree)
    else:
        return {path: tree}
    return {key: leaf for name, value in pairs for key, leaf in _leaves(value, f"{path}.{name}").items()}


def _is_sharded(value: Any) -> bool:
    return hasattr(value, "_local_tensor")


def differences(mine: Any, others: Any, tolerance: float = TOLERANCE) -> list[str]:
    """Return the paths at which two trees differ."""
    first, second = _leaves(mine), _leaves(others)
    found = sorted(first.keys() ^ second.keys())
    for path in first.keys() & second.keys():
        one, other = first[path], second[path]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            one, other = _local(one), _local(other)
            same = one.shape == other.shape and torch.allclose(
                one.double(), other.double(), rtol=tolerance, atol=tolerance, equal_nan=True
            )
        elif isinstance(one, float) and isinstance(other, float):
            same = one == other or abs(one - other) <= tolerance * max(abs(one), abs(other))
        else:
            same = type(one) is type(other) and one == other
        if not same:
            found.append(path)
    return sorted(found)


def digest(taken: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Return a short text for each leaf of each object.

    Gradients count as separate objects, and shards are left out.
    """
    texts = {}
    for name, tree in taken.items():
        parts = {name: tree}
        if isinstance(tree, Mapping) and tree.keys() == {"values", "gradients"}:
            parts = {name: tree["values"], f"{name}'s gradients": tree["gradients"]}
        for part, value in parts.items():
            texts[part] = {path: _digest_of_leaf(leaf) for path, leaf in _leaves(value).items()}
    return texts


def _digest_of_leaf(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return repr(leaf)
    if _is_sharded(leaf):
        return "a shard"
    return hashlib.sha256(f"{leaf.dtype} {leaf.tolist()}".encode()).hexdigest()[:16]


def flags() -> dict[str, str]:
    """Return process settings that a ``with`` statement should have restored."""
    return {
        "grad_enabled": str(torch.is_grad_enabled()),
        "autocast": str(torch.is_autocast_enabled("cpu")),
        "inference": str(torch.is_inference_mode_enabled()),
        "dtype": str(torch.get_default_dtype()),
    }


def _class_name(value: Any) -> str:
    return type(value).__name__


def write_digests(namespace: dict[str, Any], state: Mapping[str, str], file: str) -> None:
    """Write the digests of this rank to `file`, without a collective."""
    try:
        taken = held["look"] = copy_state(namespace, state)
        kinds = {name: _class_name(_evaluate(namespace, code)) for name, code in state.items()}
        answer = {"digest": digest(taken), "kinds": kinds, "flags": flags(), "shards": _sharded_paths(taken)}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    Path(file).write_text(json.dumps(answer))


def _sharded_paths(taken: Mapping[str, Any]) -> list[str]:
    """Return the paths of sharded parameters; a model between two states has full ones instead."""
    models = {name: tree["values"] for name, tree in taken.items() if isinstance(tree, Mapping) and "values" in tree}
    return [name + path for name, tree in models.items() for path, leaf in _leaves(tree).items() if _is_sharded(leaf)]


def hold(namespace: dict[str, Any], state: Mapping[str, str], key: str) -> None:
    """Hold the present state under `key` until `compare`."""
    with torch.enable_grad():
        held[key] = copy_state(namespace, state)


def compare(
    namespace: dict[str, Any], code: str, state: Mapping[str, str], calls: int, close: str, sharded: bool, file: str
) -> None:
    """Train an undisturbed copy from the state of `hold`; write its differences from the user's run.

    For sharded objects, also write after how many undisturbed calls each equals the state that the fault has left.
    """
    end, losses, before = copy_state(namespace, state), namespace["losses"], held.pop("before")
    box = [before]
    if not sharded:
        dist.broadcast_object_list(box)
    copied, twin = run_copy(namespace, code, state, box[0], [calls])[-1]
    found = [f"losses: {losses} instead of {copied}"] if differences(losses, copied) else []
    found += [f"{name}{path}" for name in end for path in differences(end[name], twin[name])]
    exec(close, held.pop("copy"))
    matching = {}
    left, start = held.pop("look", None), held.pop("start", None)
    if sharded and left is not None and start is not None:
        undisturbed = [start, *(tree for _, tree in run_copy(namespace, code, state, start, [1, 1]))]
        matching = {
            name: [steps for steps, tree in enumerate(undisturbed) if not _values_differ(left[name], tree[name])]
            for name in state
            if any(_is_sharded(leaf) for leaf in _leaves(start[name]).values())
        }
        exec(close, held.pop("copy"))
    torch.default_generator.set_state(end["generator"])
    Path(file).write_text(json.dumps({"found": found[:6], "matching": matching}))


def _values_differ(one: Any, other: Any) -> bool:
    """Compare without what a fault within a step may have changed: gradients, and learning rates."""
    for key in ("values", "state"):
        if isinstance(one, Mapping) and isinstance(other, Mapping) and key in one and key in other:
            return bool(differences(one[key], other[key]))
    return bool(differences(one, other))


def run_copy(
    namespace: dict[str, Any],
    code: str,
    state: Mapping[str, str],
    start: Mapping[str, Any],
    stretches: Sequence[int],
) -> list[tuple[list[float], dict[str, Any]]]:
    """Train a copy of the loop from `start`; return losses and state after each stretch of calls."""
    names = {name: namespace[name] for name in ("rank", "world_size")}
    other: dict[str, Any] = {**names, "__name__": "__main__"}
    held["copy"] = other
    exec(compile(code, "<undisturbed>", "exec"), other)
    load_state(other, state, start)
    return [(other["train"](calls), copy_state(other, state)) for calls in stretches]
