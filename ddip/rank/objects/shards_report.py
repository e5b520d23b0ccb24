"""Report which part of each parameter and buffer of a model this rank holds, for ``%dipshards``."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from ddip.protocol.reports import ShardsReport, TensorReport
from ddip.rank import user_namespace
from ddip.sharded.layout import DTensor, local_of, sharded_by_id


def describe_shards(name: str) -> ShardsReport:
    """Describe the tensors of the model in the variable `name`, or of a part such as ``model.encoder``.

    Sends nothing to other ranks. ``is_there`` is False if there is no such object, and ``tensors`` is None if it is not
    a module.
    """
    first, *rest = name.split(".")
    variables = user_namespace()
    if first not in variables:
        return {"kind": "", "is_there": False, "tensors": None}
    value = variables[first]
    for part in rest:
        parts = (
            value._modules if isinstance(value, torch.nn.Module) else getattr(value, "__dict__", {})
        )  # ``trainer.model`` works, too
        if parts.get(part) is None:
            return {"kind": "", "is_there": False, "tensors": None}
        value = parts[part]
    kind = type(value).__name__
    return {
        "kind": kind,
        "is_there": True,
        "tensors": _describe_tensors(value) if isinstance(value, torch.nn.Module) else None,
    }


def _describe_tensors(model: torch.nn.Module) -> list[TensorReport]:
    averaged = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, DistributedDataParallel)
        for parameter in module.parameters()
    }
    sharded = sharded_by_id(model)
    found = [
        _describe_tensor(name, sharded.get(id(parameter), parameter), "DDP" if id(parameter) in averaged else "plain")
        for name, parameter in model.named_parameters()
    ]
    return [*found, *(_describe_tensor(name, buffer, "plain, buffer") for name, buffer in model.named_buffers())]


def _describe_tensor(name: str, tensor: torch.Tensor, otherwise: str) -> TensorReport:
    """Describe a parameter or buffer; `otherwise` is the placement to report if it is not a DTensor."""
    if is_lazy(tensor):
        return {
            "name": name,
            "shape": [],
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "placement": "lazy, not made yet",
            "local": [],
            "bytes": 0,
            "whole_bytes": 0,
        }
    if type(tensor).__name__ == "FlatParameter":
        otherwise = "FSDP1, flat"
    local = local_of(tensor)
    return {
        "name": name,
        "shape": list(tensor.shape),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "placement": _placements_text(tensor) if isinstance(tensor, DTensor) else otherwise,
        "local": list(local.shape),
        "bytes": local.numel() * local.element_size(),
        "whole_bytes": tensor.numel() * tensor.element_size(),
    }


def _placements_text(tensor: Any) -> str:
    """Return the placements as torch writes them, with the mesh dimensions' names if they have some."""
    names = tensor.device_mesh.mesh_dim_names or [""] * len(tensor.placements)
    return ", ".join(
        f"{name}: {_placement_text(placement)}" if name else _placement_text(placement)
        for name, placement in zip(names, tensor.placements, strict=True)
    )


def _placement_text(placement: Any) -> str:
    if placement.is_replicate():
        return "Replicate()"
    dim = getattr(placement, "dim", None)
    return type(placement).__name__.removeprefix("_") + ("()" if dim is None else f"({dim})")
