"""What a Trainer or a Fabric is asked for, and what it gets on the ranks: pure functions, without Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

FORKING = ("notebook", "fork", "spawn")
"""In the names of strategies that start processes of their own."""
GONE = {"horovod": "ddp", "dp": "ddp", "ddp2": "ddp", "bagua": "ddp", "ddp_sharded": "fsdp", "fairscale": "fsdp"}
"""Strategies that the Trainer had before Lightning 2, and what replaces them."""
GPUS = ("gpu", "cuda")


@dataclass(frozen=True)
class Here:
    """The cell that makes a Trainer, on this rank."""

    rank: int
    size: int
    """Ranks of the group."""
    local_rank: int
    local_size: int
    """Ranks on this host."""
    device: int | None
    """Of the GPU, as this process counts them; None: on the CPU."""
    is_everywhere: bool
    """Do all ranks run the cell?"""


def settings(what: str, asked: Mapping[str, Any], here: Here) -> dict[str, Any]:
    """The arguments to make `what`, "Trainer" or "Fabric", with, that was `asked` for; raises ValueError, which says
    what to type instead.

    >>> cpu = Here(rank=0, size=2, local_rank=0, local_size=2, device=None, is_everywhere=True)
    >>> settings("Trainer", {"max_epochs": 1}, cpu)
    {'max_epochs': 1, 'accelerator': 'cpu', 'devices': 2, 'num_nodes': 1}
    """
    __tracebackhide__ = True  # IPython leaves out this frame
    accelerator = _accelerator(what, asked.get("accelerator", "auto"), here)
    _check_strategy(what, asked.get("strategy", "auto"), here)
    _check_number(what, asked, here)
    size = here.local_size if here.is_everywhere else 1
    nodes = here.size // here.local_size if here.is_everywhere else 1
    devices = size if here.device is None or accelerator == "cpu" else _gpus(here, size)
    return {**asked, "accelerator": accelerator, "devices": devices, "num_nodes": nodes}


def _accelerator(what: str, asked: Any, here: Here) -> Any:
    __tracebackhide__ = True  # IPython leaves out this frame
    if here.device is None and (asked in GPUS or type(asked).__name__ == "CUDAAccelerator"):
        raise ValueError(
            f"{what}(accelerator={asked!r}): the ranks of this group are on the CPU; leave it out, or type "
            "%makedip -g all first"
        )
    if asked in ("auto", None):
        return "cpu" if here.device is None else "cuda"
    return asked


def _check_strategy(what: str, asked: Any, here: Here) -> None:
    __tracebackhide__ = True  # IPython leaves out this frame
    name = asked.lower() if isinstance(asked, str) else f"{type(asked).__name__}(...)"
    typed = f"{what}(strategy={asked!r})" if isinstance(asked, str) else f"{what}(strategy={name})"
    start = getattr(asked, "_start_method", None) or "popen"
    if start != "popen" or (isinstance(asked, str) and any(f"_{word}" in name for word in FORKING)):
        unused = "_find_unused_parameters_true" if name.endswith("_true") else ""
        raise ValueError(
            f"{typed}: it would start processes of its own, and the ranks are there; use strategy='ddp{unused}'"
        )
    if name in GONE:
        raise ValueError(f"{typed}: Lightning has it no more; use strategy={GONE[name]!r}")
    if here.device is None and (name.startswith("deepspeed") or name == "DeepSpeedStrategy(...)"):
        raise ValueError(
            f"{typed}: Lightning has it on GPUs only, and the ranks of this group are on the CPU; type %makedip -g all "
            "first, or use strategy='ddp'"
        )
    if here.device is None and (name.startswith("fsdp") or name == "FSDPStrategy(...)"):
        raise ValueError(
            f"{typed}: torch's FSDP needs GPUs, and this group is on the CPU; type %makedip -g all first, or "
            f"use ModelParallelStrategy(data_parallel_size={here.size}, tensor_parallel_size=1) and fully_shard"
        )
    if not here.is_everywhere and name not in ("auto", "single_device", "SingleDeviceStrategy(...)"):
        raise ValueError(
            f"{typed}: it needs all {here.size} ranks, and this cell does not run on all of them; run it without -r, "
            "or leave this out to train on one rank alone"
        )


def _check_number(what: str, asked: Mapping[str, Any], here: Here) -> None:
    """``devices`` times ``num_nodes`` is the number of ranks, however they are put together."""
    __tracebackhide__ = True  # IPython leaves out this frame
    devices, nodes = asked.get("devices", "auto"), asked.get("num_nodes", 1)
    number, wanted = _number(devices), here.size if here.is_everywhere else 1
    if number in (None, 0) or not isinstance(nodes, int):  # 0 is refused by Lightning
        return
    if number * nodes != wanted:
        typed = f"{what}(devices={devices!r}" + (f", num_nodes={nodes})" if nodes != 1 else ")")
        if not here.is_everywhere:
            raise ValueError(f"{typed}: this cell does not run on all ranks, and each trains alone; leave it out")
        there = f"the group has {here.size} rank{'s' if here.size != 1 else ''}"
        raise ValueError(f"{typed}: {there}; leave it out, or type %makedip -n {number * nodes} first")


def _number(devices: Any) -> int | None:
    """How many devices are asked for; None: as many as there are.

    >>> [_number(devices) for devices in ("auto", -1, 2, "2", [0, 1], "0,1", "0,")]
    [None, None, 2, 2, 2, 2, 1]
    """
    if devices in ("auto", -1, "-1", None):
        return None
    if isinstance(devices, str):
        return len([part for part in devices.split(",") if part.strip()]) if "," in devices else int(devices)
    return int(devices) if isinstance(devices, int) else len(devices)


def _gpus(here: Here, size: int) -> list[int]:
    """`size` GPUs, of which the one at the place of this rank is its own: Lightning uses no other.

    >>> _gpus(Here(rank=3, size=4, local_rank=1, local_size=2, device=2, is_everywhere=True), 2)
    [0, 2]
    """
    assert here.device is not None
    place = here.local_rank if here.is_everywhere else 0
    others = [gpu for gpu in range(size + 1) if gpu != here.device]
    return [*others[:place], here.device, *others[place : size - 1]]
