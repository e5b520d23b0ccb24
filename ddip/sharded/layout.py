"""Locate a rank's part in a sharded tensor (DTensor), and assemble tensors from the parts of all ranks.

FSDP2 (``fully_shard``) and tensor parallel (``parallelize_module``) use DTensors. Any other tensor is whole on each
rank.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

tensors: Any = importlib.import_module("torch.distributed.tensor")
if not hasattr(tensors, "DTensor"):  # torch 2.4
    tensors = importlib.import_module("torch.distributed._tensor")
of_tensors: Any = importlib.import_module(f"{tensors.__name__}._utils")
DTensor: Any = tensors.DTensor


@dataclass(frozen=True)
class ShardPosition:
    """The position of a part in the whole tensor."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    begin: tuple[int, ...]
    """Index at which the part begins, per dimension."""
    shape: tuple[int, ...]
    """Shape of the part."""

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that select the part in the whole tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begin, self.shape, strict=True))


@dataclass(frozen=True)
class Layout:
    """The distribution of a tensor over the ranks."""

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    placements: tuple[Any, ...] | None = None
    """DTensor placements, one per dimension of `mesh`; None for a plain tensor, which is whole on each rank."""
    mesh: Any = None

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        """Return the layout of `tensor`; raise ValueError for a DTensor with partial values."""
        if not isinstance(tensor, DTensor):
            return cls(tuple(tensor.shape))
        if any(placement.is_partial() for placement in tensor.placements):
            raise ValueError(f"a tensor with the placements {tensor.placements} has still to be reduced")
        return cls(tuple(tensor.shape), tuple(tensor.placements), tensor.device_mesh)

    @property
    def mesh_size(self) -> int:
        """Number of ranks that have a part of this tensor, 1 if it is plain."""
        return 1 if self.mesh is None else int(self.mesh.size())

    @property
    def place(self) -> ShardPosition:
        """The position of this rank's part."""
        if self.placements is None:
            return ShardPosition(self.whole, (0,) * len(self.whole), self.whole)
        shape, begin = of_tensors.compute_local_shape_and_global_offset(self.whole, self.mesh, self.placements)
        return ShardPosition(self.whole, tuple(map(int, begin)), tuple(shape))

    def tensor(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor of which this rank has `part`: a DTensor, or `part` itself if it is plain."""
        if self.placements is None:
            return part
        stride = _strides_in_order(self.whole, part)
        part = part.to(self.mesh.device_type)
        whole: torch.Tensor = DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=torch.Size(self.whole), stride=stride
        )
        return whole


def dense_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a copy of a plain `tensor` without gaps; they keep its memory format.

    >>> dense_strides(torch.empty(2, 3, 4, 4, device="meta").to(memory_format=torch.channels_last)[:, :, ::2])
    (24, 1, 12, 3)
    """
    copy = tensor if tensor.is_contiguous() else torch.empty_like(tensor, device="meta")
    strides: tuple[int, ...] = copy.stride()
    return strides


def _strides_in_order(shape: tuple[int, ...], part: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape with its dimensions in the order of `part` in memory.

    >>> _strides_in_order((2, 3, 4, 4), torch.empty(1, 3, 4, 4).to(memory_format=torch.channels_last))
    (48, 1, 12, 3)
    """
    order, strides = list(range(len(shape))), part.stride()
    if not part.is_contiguous():  # otherwise, the strides of dimensions of size 1 have no meaning
        order.sort(key=lambda dim: -strides[dim])
    memory = torch.empty([shape[dim] for dim in order], device="meta")
    found: tuple[int, ...] = memory.permute([order.index(dim) for dim in range(len(shape))]).stride()
    return found


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of `tensor`, detached; it shares the memory."""
    whole: Any = tensor.detach()
    local: torch.Tensor = whole.to_local() if isinstance(tensor, DTensor) else whole
    return local


def fill_part(part: torch.Tensor, place: ShardPosition, parts: Sequence[tuple[ShardPosition, torch.Tensor]]) -> None:
    """Fill `part`, located at `place`, from `parts` of all ranks; raise ValueError if some are missing."""
    distinct = {position: (position, tensor) for position, tensor in parts if tensor.numel()}
    if sum(tensor.numel() for _, tensor in distinct.values()) != torch.Size(place.whole).numel():
        raise ValueError("parts of it are missing")
    whole = torch.empty(place.whole, dtype=part.dtype)
    for position, tensor in distinct.values():
        whole[position.slices] = tensor
    part.copy_(whole[place.slices])


def sharded_by_id(model: torch.nn.Module) -> dict[int, torch.Tensor]:
    """Return the sharded parameters by the id of the gathered parameter that currently replaces each.

    FSDP2 gathers parameters for forward and backward passes. They stay gathered at the root module, and after a pass
    that an error has ended.
    """
    found = {}
    for module in model.modules():
        fsdp: Any = module
        state = fsdp._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for parameter in [parameter for group in groups if group is not None for parameter in group.fsdp_params]:
            info = parameter._module_info
            current = getattr(info.module, info.param_name)
            if current is not parameter.sharded_param:
                found[id(current)] = parameter.sharded_param
    return found
