"""Translate the arguments of a Trainer or Fabric for the ranks. All functions are pure and need no Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORKING = ("notebook", "fork", "spawn")
"""Words in the names of strategies that start processes themselves."""
REPLACED = {"horovod": "ddp", "dp": "ddp", "ddp2": "ddp", "bagua": "ddp", "ddp_sharded": "fsdp", "fairscale": "fsdp"}
"""Strategies from before Lightning 2, and their replacements."""
GPUS = ("gpu", "cuda")


@dataclass(frozen=True)
class RankPosition:
    """Position of this rank in the group and on its host, for the cell that makes a Trainer."""

    rank: int
    size: int
    """Number of ranks in the group."""
    local_rank: int
    local_size: int
    """Number of ranks on this host."""
    device: int | None
    """Index of the rank's GPU in this process; None: on the CPU."""
    is_everywhere: bool
    """True if all ranks run the cell."""


def constructor_arguments(what: str, asked: Mapping[str, Any], position: RankPosition) -> dict[str, Any]:
    """Return the user's arguments for `what`, with accelerator, devices and nodes set for the group.

    `what`: "Trainer" or "Fabric". `asked`: the user's arguments.
    Raises ValueError, with a hint what to type instead, for arguments that do not fit the group.

    >>> cpu = RankPosition(rank=0, size=2, local_rank=0, local_size=2, device=None, is_everywhere=True)
    >>> constructor_arguments("Trainer", {"max_epochs": 1}, cpu)
    {'max_epochs': 1, 'accelerator': 'cpu', 'devices': 2, 'num_nodes': 1}
    """
    __tracebackhide__ = True  # IPython leaves out this frame
    accelerator = _choose_accelerator(what, asked.get("accelerator", "auto"), position)
    _check_strategy(what, asked.get("strategy", "auto"), position)
    _check_number(what, asked, position)
    size = position.local_size if position.is_everywhere else 1
    nodes = position.size // position.local_size if position.is_everywhere else 1
    devices = size if position.device is None or accelerator == "cpu" else _list_gpus(position, size)
    return {**asked, "accelerator": accelerator, "devices": devices, "num_nodes": nodes}


def _choose_accelerator(what: str, asked: Any, position: RankPosition) -> Any:
    __tracebackhide__ = True  # IPython leaves out this frame
    if position.device is None and (asked in GPUS or type(asked).__name__ == "CUDAAccelerator"):
        raise ValueError(
            f"{what}(accelerator={asked!r}): the ranks of this group are on the CPU; leave it out, or type "
            "%makedip -g all first"
        )
    if asked in ("auto", None):
        return "cpu" if position.device is None else "cuda"
    return asked


def _check_strategy(what: str, asked: Any, position: RankPosition) -> None:
    __tracebackhide__ = True  # IPython leaves out this frame
    name = asked.lower() if isinstance(asked, str) else f"{type(asked).__name__}(...)"
    typed = f"{what}(strategy={asked!r})" if isinstance(asked, str) else f"{what}(strategy={name})"
    start = getattr(asked, "_start_method", None) or "popen"
    if start != "popen" or (isinstance(asked, str) and any(f"_{word}" in name for word in FORKING)):
        unused = "_find_unused_parameters_true" if name.endswith("_true") else ""
        raise ValueError(
            f"{typed}: it would start its own processes, but the ranks are running already; use strategy='ddp{unused}'"
        )
    if name in REPLACED:
        raise ValueError(f"{typed}: Lightning has removed it; use strategy={REPLACED[name]!r}")
    if position.device is None and (name.startswith("deepspeed") or name == "DeepSpeedStrategy(...)"):
        raise ValueError(
            f"{typed}: Lightning supports it on GPUs only, and the ranks of this group are on the CPU; type "
            "%makedip -g all first, or use strategy='ddp'"
        )
    if position.device is None and (name.startswith("fsdp") or name == "FSDPStrategy(...)"):
        raise ValueError(
            f"{typed}: torch's FSDP needs GPUs, and this group is on the CPU; type %makedip -g all first, or "
            f"use ModelParallelStrategy(data_parallel_size={position.size}, tensor_parallel_size=1) and fully_shard"
        )
    if not position.is_everywhere and name not in ("auto", "single_device", "SingleDeviceStrategy(...)"):
        raise ValueError(
            f"{typed}: it needs all {position.size} ranks, and this cell does not run on all of them; run it without "
            "-r, or leave this out to train on one rank alone"
        )


def _check_number(what: str, asked: Mapping[str, Any], position: RankPosition) -> None:
    """Raise ValueError unless ``devices`` times ``num_nodes`` is the number of ranks that train together."""
    __tracebackhide__ = True  # IPython leaves out this frame
    devices, nodes = asked.get("devices", "auto"), asked.get("num_nodes", 1)
    number, wanted = _count_devices(devices), position.size if position.is_everywhere else 1
    if number in (None, 0) or not isinstance(nodes, int):  # Lightning itself refuses 0
        return
    if number * nodes != wanted:
        typed = f"{what}(devices={devices!r}" + (f", num_nodes={nodes})" if nodes != 1 else ")")
        if not position.is_everywhere:
            raise ValueError(f"{typed}: this cell does not run on all ranks, and each trains alone; leave it out")
        actual = f"the group has {position.size} rank{'s' if position.size != 1 else ''}"
        raise ValueError(f"{typed}: {actual}; leave it out, or type %makedip -n {number * nodes} first")


def _count_devices(devices: Any) -> int | None:
    """Return the requested number of devices; None means all.

    >>> [_count_devices(devices) for devices in ("auto", -1, 2, "2", [0, 1], "0,1", "0,")]
    [None, None, 2, 2, 2, 2, 1]
    """
    if devices in ("auto", -1, "-1", None):
        return None
    if isinstance(devices, str):
        return len([part for part in devices.split(",") if part.strip()]) if "," in devices else int(devices)
    return int(devices) if isinstance(devices, int) else len(devices)


def _list_gpus(position: RankPosition, size: int) -> list[int]:
    """Return `size` numbers of GPUs for Lightning, which uses only one of them: this rank's own.

    It stands at the local rank if all ranks run the cell, otherwise first. The others only fill the list.

    >>> _list_gpus(RankPosition(rank=3, size=4, local_rank=1, local_size=2, device=2, is_everywhere=True), 2)
    [0, 2]
    """
    assert position.device is not None
    index = position.local_rank if position.is_everywhere else 0
    others = [gpu for gpu in range(size + 1) if gpu != position.device]
    return [*others[:index], position.device, *others[index : size - 1]]
