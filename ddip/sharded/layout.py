"""A rank's part of a sharded tensor (DTensor), as it is copied to the host, and put together with the others' parts.

Used by FSDP2 (``fully_shard``) and tensor parallel (``parallelize_module``). What is no DTensor is whole on each rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

try:
    tensors: Any = importlib.import_module("torch.distributed.tensor")
except ImportError:  # torch 2.4
    tensors = importlib.import_module("torch.distributed._tensor")
of_tensors: Any = importlib.import_module(f"{tensors.__name__}._utils")
DTensor: Any = tensors.DTensor


@dataclass(frozen=True)
class Place:
    """Of a part in its whole."""

    whole: tuple[int, ...]
    """Shape of the whole."""
    begin: tuple[int, ...]
    """Where the part begins in it."""
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begin, self.shape, strict=True))


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on the ranks."""

    whole: tuple[int, ...]
    """Its shape."""
    placements: tuple[Any, ...] | None = None
    """torch's, one for each dimension of `mesh`; None: it is a plain tensor, whole on each rank."""
    mesh: Any = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Raises ValueError for what has still to be reduced."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape))
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"a tensor with the placements {tensor.placements} has still to be reduced")
        return cls(tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh)

    @property
    def place(self) -> Place:
        """Of this rank's part."""
        if self.placements is None:
            return Place(self.whole, (0,) * len(self.whole), self.whole)
        shape, begin = of_tensors.compute_local_shape_and_global_offset(self.whole, self.mesh, self.placements)
        return Place(self.whole, tuple(map(int, begin)), tuple(shape))

    def tensor(self, part: torch.Tensor) -> torch.Tensor:
        """The whole, of which this rank has `part`."""
        if self.placements is None:
            return part
        stride = torch.empty(self.whole, device="meta").stride()
        part = part.to(self.mesh.device_type)
        whole: torch.Tensor = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.whole), stride=stride
        )
        return whole


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in the memory of `tensor`."""
    whole: Any = tensor.detach()
    local: torch.Tensor = whole.to_local() if isinstance(tensor, DTensor) else whole
    return local


def fill(part: torch.Tensor, place: Place, parts: Sequence[tuple[Place, torch.Tensor]]) -> None:
    """Fill `part`, which lies at `place`, from the `parts` of all ranks. Raises ValueError if some are missing."""
    different = {other: (other, tensor) for other, tensor in parts if tensor.numel()}
    if sum(tensor.numel() for _, tensor in different.values()) != torch.Size(place.whole).numel():
        raise ValueError("parts of it are missing")
    whole = torch.empty(place.whole, dtype=part.dtype)
    for other, tensor in different.values():
        whole[other.slices] = tensor
    part.copy_(whole[place.slices])


def gathered(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """By the ids of the parameters that FSDP2 has gathered just now: the sharded ones, whose places they take.

    It does so for a forward and a backward pass, and leaves them so at the root, and where an error ended a pass.
    """
    found = {}
    for module in model.modules():
        fsdp: Any = module
        state = fsdp._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in [one for group in groups if group is not None for one in group.fsdp_params]:
            info = parameter._module_info
            now = getattr(info.module, info.param_name)
            if now is not parameter.sharded_param:
                found[id(now)] = parameter.sharded_param
    return found
