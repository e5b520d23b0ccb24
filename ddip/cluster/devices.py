"""How many GPUs there are, without torch and without a CUDA context."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

from ddip.errors import BadInput

SLICE = "MIG-"
"""With which the name of a part of a GPU begins."""


@functools.cache
def count_nvidia() -> int:
    """GPUs that NVIDIA's management library counts; 0 without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return 0
    if nvml.nvmlInit_v2():
        return 0
    try:
        count = ctypes.c_uint()
        return 0 if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) else count.value
    finally:
        nvml.nvmlShutdown()


def visible_names(visible: str | None, count: int) -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` lets a process see of `count` GPUs, in its order and by its names (index or UUID).

    As CUDA and torch read it: up to the first entry that is no device, of one kind, and nothing if one comes twice.
    """
    if visible is None:
        return [str(i) for i in range(count)]
    entries = [entry.strip() for entry in visible.split(",")]
    kind = next((prefix for prefix in ("GPU-", SLICE) if entries[0].startswith(prefix)), None)
    names: list[str] = []
    for entry in entries:
        if not (entry.startswith(kind) if kind else entry.isdecimal() and int(entry) < count):
            break
        if entry in names:
            return []
        names.append(entry)
    return names


def ensure_one_slice(names: Sequence[str]) -> None:
    """Raise BadInput if `names` of devices are several slices of GPUs (MIG): CUDA shows a process the first alone."""
    slices = [name for name in names if name.startswith(SLICE)]
    if len(slices) > 1:
        raise BadInput(
            f"{len(slices)} ranks on slices of GPUs (MIG): a process can use one slice only, and nccl joins none; type "
            "-g 0, set CUDA_VISIBLE_DEVICES to whole GPUs, or type -n for ranks on the CPU"
        )


def gpu_names() -> list[str]:
    """The GPUs that the notebook sees, as ``CUDA_VISIBLE_DEVICES`` would name them; ``-g 0`` is the first of these."""
    return visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), count_nvidia())
