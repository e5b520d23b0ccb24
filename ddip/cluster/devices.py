"""Count the GPUs without torch and without a CUDA context."""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Sequence

from ddip.errors import BadInput

SLICE = "MIG-"
"""Prefix of the name of a GPU slice."""


@functools.cache
def count_nvidia() -> int:
    """Return the number of GPUs by NVIDIA's management library; 0 without a driver."""
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
    """Return the GPUs that a process sees, out of `count`, by their names (index or UUID) in `visible`.

    `visible` is the value of ``CUDA_VISIBLE_DEVICES``, read as CUDA and torch do: all entries are of the first one's
    kind, the first entry that is not a device ends the list, and an entry that occurs twice makes it empty.
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
    """Raise BadInput if `names` has several slices of GPUs (MIG): CUDA shows only the first to a process."""
    slices = [name for name in names if name.startswith(SLICE)]
    if len(slices) > 1:
        raise BadInput(
            f"{len(slices)} ranks cannot run on slices of GPUs (MIG): a process can use only one, and nccl cannot "
            "connect them; type -g 0, set CUDA_VISIBLE_DEVICES to whole GPUs, or type -n for ranks on the CPU"
        )


def gpu_names() -> list[str]:
    """Return the GPUs that this process sees, named as in ``CUDA_VISIBLE_DEVICES``; ``-g 0`` is the first."""
    return visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), count_nvidia())
