"""Describe a value by the tensors and numbers in it, to compare the results of two runs rank by rank."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ddip.sharded.layout import local_of

PLAIN = (bool, int, float, complex, str, type(None))


def pack_values(variables: Mapping[str, Any], names: list[str]) -> tuple[bytes, dict[str, str]]:
    """Return this rank's values of `names` and of all modules, and why a name has none."""
    modules = [name for name, value in variables.items() if isinstance(value, torch.nn.Module) and name[0] != "_"]
    flat, refused = dict[str, Any](), dict[str, str]()
    for name in dict.fromkeys([*names, *modules]):
        if name not in variables:
            refused[name] = "there is no such variable"
            continue
        try:
            flat |= dict(_flatten_value(name, variables[name]))
        except (TypeError, ValueError, RuntimeError) as error:
            refused[name] = str(error)
    file = io.BytesIO()
    torch.save(flat, file)
    return file.getvalue(), refused


def packed_names(packed: bytes) -> set[str]:
    """Return the names of the variables whose values are in `packed`."""
    flat = torch.load(io.BytesIO(packed), weights_only=True)
    return {re.split(r"[.\[]", path)[0] for path in flat}


def _flatten_value(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        if value.is_nested:
            raise TypeError("a nested tensor cannot be compared")
        local = local_of(value).detach().cpu()
        yield path, local.clone() if local.layout is torch.strided else local.to_dense()
    elif isinstance(value, torch.nn.Module):
        for kind in (value.named_parameters(), value.named_buffers()):
            for name, tensor in kind:
                yield from _flatten_value(f"{path}.{name}", tensor)
    elif type(value) in PLAIN:
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _flatten_value(f"{path}[{key!r}]", item)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _flatten_value(f"{path}[{i}]", item)
    elif hasattr(value, "state_dict"):
        yield from _flatten_value(path, value.state_dict())
    elif hasattr(value, "__array__") and type(value).__module__ == "numpy":
        yield path, torch.as_tensor(value.__array__())
    else:
        raise TypeError(f"a {type(value).__name__} has no values to compare")


def compare_values(ours: bytes, theirs: bytes) -> dict[str, float | str]:
    """Return the relative difference of each value, or a text if it cannot be compared.

    For a tensor, it is the largest difference divided by the largest absolute number in either.
    """
    first, second = (torch.load(io.BytesIO(packed), weights_only=True) for packed in (ours, theirs))
    found: dict[str, float | str] = {}
    for path in [*first, *(path for path in second if path not in first)]:
        if path not in first or path not in second:
            found[path] = "only in the script" if path in second else "missing in the script"
        else:
            found[path] = _find_difference(first[path], second[path])
    return found


def _find_difference(ours: Any, theirs: Any) -> float | str:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            return f"{tuple(ours.shape)} {ours.dtype}, in the script {tuple(theirs.shape)} {theirs.dtype}"
        differs = (ours != theirs) & ~((ours != ours) & (theirs != theirs))  # NaN equals NaN here
        if not differs.any():
            return 0.0
        if not (ours.is_floating_point() or ours.is_complex()):
            return f"{int(differs.sum())} elements differ"
        wide = torch.complex128 if ours.is_complex() else torch.float64
        ours, theirs = ours.to(wide), theirs.to(wide)
        sizes = torch.stack([ours, theirs]).abs().nan_to_num(0.0, 0.0)
        return float(((ours - theirs)[differs].abs().nan_to_num(math.inf).max() / sizes.max()).nan_to_num(math.inf))
    if isinstance(ours, float) and isinstance(theirs, float):
        return _find_difference(torch.tensor(ours, dtype=torch.float64), torch.tensor(theirs, dtype=torch.float64))
    return 0.0 if type(ours) is type(theirs) and ours == theirs else f"{ours!r}, in the script {theirs!r}"
