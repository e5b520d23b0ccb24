"""The GPU of this rank as NVIDIA's driver has it: use, memory, temperature; where ``nvidia-ml-py`` is installed.

The driver is asked in a thread, and what it said last is told: of a GPU that is in trouble it may never answer, and the
control thread must go on, which releases and interrupts this rank.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from typing import Any

from ddip.protocol.reports import DeviceFigures
from ddip.rank.runtime.gpu import gpu


class Driver:
    """Asks the driver for the figures of this rank's GPU."""

    def __init__(self) -> None:
        self._figures: DeviceFigures | None = None
        self._thread: threading.Thread | None = None
        self._is_missing = False
        """Is there no library, no driver, or not this GPU? Then there will be none."""
        self._handle: Any = None

    def figures(self) -> DeviceFigures | None:
        """What it has said last; asks again, without waiting for that."""
        if gpu.device.type != "cuda" or self._is_missing:
            return None
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._ask, name="ddip-nvml", daemon=True)
            self._thread.start()
        return self._figures

    def _ask(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
            if self._handle is None:
                nvml.nvmlInit()
                name = device_name(gpu.uuid, os.environ.get("CUDA_VISIBLE_DEVICES"), gpu.device.index or 0)
                by_name = nvml.nvmlDeviceGetHandleByUUID
                self._handle = by_name(name) if isinstance(name, str) else nvml.nvmlDeviceGetHandleByIndex(name)
            self._figures = read(nvml, self._handle)
        except Exception:  # no library, no driver, no such GPU: the view is without these columns
            self._is_missing, self._figures = True, None


def device_name(uuid: str, visible: str | None, index: int) -> str | int:
    """How the driver calls the GPU that CUDA calls `index`: a UUID, or a number among all GPUs of the host.

    `uuid`: as torch tells it, if it does. `visible`: the variable ``CUDA_VISIBLE_DEVICES``.
    """
    if uuid:
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    names = [name.strip() for name in visible.split(",")] if visible else []
    name = names[index] if index < len(names) else str(index)
    return int(name) if name.isdigit() else name


def read(nvml: Any, handle: Any) -> DeviceFigures:
    """The figures of one GPU, from the library `nvml`."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    temperature = None
    with contextlib.suppress(nvml.NVMLError):  # a part of a GPU (MIG) has none
        temperature = int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return {
        "use": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory": int(memory.used),
        "total": int(memory.total),
        "temperature": temperature,
    }


driver = Driver()
