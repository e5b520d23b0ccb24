"""How many GPUs there are, without torch and without a CUDA context."""

from __future__ import annotations

import ctypes
import os


def _count_nvidia() -> int:
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

    CUDA stops at the first entry that is no device.
    """
    if visible is None:
        return [str(i) for i in range(count)]
    names: list[str] = []
    for entry in visible.split(","):
        name = entry.strip()
        is_index = name.isdecimal() and int(name) < count
        if name in names or not (is_index or name.startswith(("GPU-", "MIG-"))):
            break
        names.append(name)
    return names


def gpu_names() -> list[str]:
    """The GPUs that the notebook sees, as ``CUDA_VISIBLE_DEVICES`` would name them; ``-g 0`` is the first of these."""
    return visible_names(os.environ.get("CUDA_VISIBLE_DEVICES"), _count_nvidia())
