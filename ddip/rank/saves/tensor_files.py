"""Write and read the tensors of a save with ``torch.distributed.checkpoint``, which redistributes sharded ones.

The parts of ``torch.distributed.checkpoint.save`` are called one by one, because only the plan is a collective: then a
thread can write the tensors while the rank trains.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from ddip.sharded.copies import from_all


class TensorWriter:
    """The writer of one save: create it on all ranks at once, then `write`, then `finish` on rank 0.

    A plain tensor that several ranks have under one name is written once.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], folder: str) -> None:
        is_first = dist.get_rank() == 0
        self._writer, self._planner, self._metadata = FileSystemWriter(folder), DefaultSavePlanner(), None
        self._planner.set_up_planner(dict(tensors), is_coordinator=is_first)
        self._writer.set_up_storage_writer(is_first)
        plans = from_all(self._writer.prepare_local_plan(self._planner.create_local_plan()))
        if is_first:
            plans, self._metadata = self._planner.create_global_plan(plans)
            plans = self._writer.prepare_global_plan(plans)
        dist.broadcast_object_list(plans)
        self._plan = self._planner.finish_plan(plans[dist.get_rank()])

    def write(self) -> list[Any]:
        """Write this rank's part, and return what `finish` needs; raises OSError."""
        return list(self._writer.write_data(self._plan, self._planner).wait())

    def finish(self, results: list[list[Any]]) -> None:
        """Write the index of all parts, on rank 0; `results`: those of `write` by rank."""
        assert self._metadata is not None
        self._writer.finish(self._metadata, results)


class TensorReader:
    """Read tensors of a save into memory that the caller provides; not a collective."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._metadata: Any = FileSystemReader(folder).read_metadata()

    def read(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Fill `tensors` from those with the same names; a DTensor gets this rank's part. Raises OSError."""
        planner, reader = DefaultLoadPlanner(), FileSystemReader(self._folder)
        planner.set_up_planner(dict(tensors), self._metadata, True)
        reader.set_up_storage_reader(self._metadata, True)
        plan = reader.prepare_local_plan(planner.create_local_plan())
        plan = reader.prepare_global_plan(planner.create_global_plan([plan]))[0]
        reader.read_data(planner.finish_plan(plan), planner).wait()

    def read_bytes(self, name: str) -> bytearray:
        """Return the bytes of a tensor of bytes."""
        memory = bytearray(int(self._metadata.state_dict_metadata[name].size.numel()))
        if memory:
            self.read({name: torch.frombuffer(memory, dtype=torch.uint8)})
        return memory
