"""Read use, memory and temperature of this rank's GPU from NVIDIA's driver, if ``nvidia-ml-py`` is installed.

A thread queries the driver, and callers get the last answer. The driver may never answer for a GPU in trouble, and the
control thread must not wait, because it aborts collectives and interrupts this rank.
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
    """Source of the driver's figures for this rank's GPU."""

    def __init__(self) -> None:
        self._figures: DeviceFigures | None = None
        self._thread: threading.Thread | None = None
        self._is_missing = False
        """True if library, driver or GPU were not found; they are not tried again."""
        self._handle: Any = None

    def figures(self) -> DeviceFigures | None:
        """Return the driver's last figures, and start the next query without waiting for it."""
        if gpu.device.type != "cuda" or self._is_missing:
            return None
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._query, name="ddip-nvml", daemon=True)
            self._thread.start()
        return self._figures

    def _query(self) -> None:
        try:
            nvml = importlib.import_module("pynvml")
            if self._handle is None:
                nvml.nvmlInit()
                name = device_name(gpu.uuid, os.environ.get("CUDA_VISIBLE_DEVICES"), gpu.device.index or 0)
                by_name = nvml.nvmlDeviceGetHandleByUUID
                self._handle = by_name(name) if isinstance(name, str) else nvml.nvmlDeviceGetHandleByIndex(name)
            self._figures = read_figures(nvml, self._handle)
        except Exception:  # no library, driver or GPU: the view omits these columns
            self._is_missing, self._figures = True, None


def device_name(uuid: str, visible: str | None, index: int) -> str | int:
    """Return the driver's name of CUDA's GPU `index`: a UUID, or its number among all GPUs of the host.

    `uuid` comes from torch ("": unknown), and `visible` is the value of ``CUDA_VISIBLE_DEVICES``.
    """
    if uuid:
        return uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    names = [name.strip() for name in visible.split(",")] if visible else []
    name = names[index] if index < len(names) else str(index)
    return int(name) if name.isdigit() else name


def read_figures(nvml: Any, handle: Any) -> DeviceFigures:
    """Return the figures of one GPU, read with the library `nvml`."""
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    temperature = None
    with contextlib.suppress(nvml.NVMLError):  # a MIG partition has none
        temperature = int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return {
        "use": nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
        "memory": int(memory.used),
        "total": int(memory.total),
        "temperature": temperature,
    }


driver = Driver()
