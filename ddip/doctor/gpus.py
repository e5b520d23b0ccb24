"""Checks of NVIDIA's driver and GPUs, with ``nvidia-smi`` if it is installed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddip.doctor.doctor_report import Check, failed, ok, warning
from ddip.output.tables.tables import size_text

SMI_SECONDS = 20.0
"""Time limit of ``nvidia-smi``, which a driver that does not answer blocks indefinitely."""
FIELDS = "index,driver_version,memory.total,memory.used,name"
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""NVIDIA's PCI vendor ID, and the prefix of the PCI class of display controllers."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as ``nvidia-smi`` lists it."""

    index: int
    driver: str
    total: int
    """Memory, bytes; 0 if unknown."""
    used: int
    name: str

    @property
    def is_full(self) -> bool:
        """True if more than half of its memory is in use."""
        return 2 * self.used > self.total

    def __str__(self) -> str:
        return f"GPU {self.index}: {self.name}, {size_text(self.used)} of {size_text(self.total)} used"


def parse_table(text: str) -> list[Gpu]:
    """Parse the CSV of ``nvidia-smi`` without header and units; skip lines that are not part of the table."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",", 4)]
        if len(fields) == 5 and fields[0].isdecimal():
            total, used = (int(size) << 20 if size.isdecimal() else 0 for size in fields[2:4])
            found.append(Gpu(int(fields[0]), fields[1], total, used, fields[4]))
    return found


def query_nvidia_smi() -> list[Gpu]:
    """Run ``nvidia-smi``, and return the GPUs that it lists; none if there is no such program.

    Raises RuntimeError if it fails, or does not answer within SMI_SECONDS.
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    options = {"stdin": subprocess.DEVNULL, "timeout": SMI_SECONDS}
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", **options)  # type: ignore[call-overload]
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"nvidia-smi does not answer within {SMI_SECONDS:.0f} s") from None
    except OSError as error:
        raise RuntimeError(f"nvidia-smi cannot be started: {error}") from None
    if done.returncode:
        output = " ".join((done.stdout + done.stderr).split())
        raise RuntimeError(f"nvidia-smi failed (exit code {done.returncode}): {output}")
    return parse_table(done.stdout)


def built_in(folder: Path = PCI) -> int:
    """Count the NVIDIA GPUs on the PCI bus, with or without a driver."""
    count = 0
    for device in folder.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
            count += vendor == NVIDIA and kind.startswith(DISPLAY)
    return count


def check_gpus() -> list[Check]:
    """Check the driver and the GPUs."""
    from ddip.cluster import devices

    try:
        gpus, error = query_nvidia_smi(), ""
    except RuntimeError as raised:
        gpus, error = [], str(raised)
    return judge_gpus(gpus, error, built_in(), devices.count_nvidia(), devices.gpu_names())


def judge_gpus(gpus: Sequence[Gpu], error: str, in_machine: int, counted: int, visible: Sequence[str]) -> list[Check]:
    """Return the checks `driver` and `gpus`.

    `gpus` and `error` are from ``nvidia-smi``; `in_machine`: number on the PCI bus; `counted`: number in NVIDIA's
    library; `visible`: names of the GPUs that CUDA_VISIBLE_DEVICES leaves visible.
    """
    return [_judge_driver(gpus, error, in_machine, counted), _judge_use(gpus, counted, visible)]


def _judge_driver(gpus: Sequence[Gpu], error: str, in_machine: int, counted: int) -> Check:
    advice = "install or load NVIDIA's driver; in a container: docker run --gpus all, with the NVIDIA container toolkit"
    if error:
        return failed("driver", error, advice)
    if gpus or counted:
        return ok("driver", f"NVIDIA {gpus[0].driver}" if gpus else "NVIDIA's library is installed; nvidia-smi is not")
    if in_machine:
        return warning("driver", f"NVIDIA GPUs without a driver in this system or container: {in_machine}", advice)
    return ok("driver", "no NVIDIA driver; ranks run on the CPU")


def _judge_use(gpus: Sequence[Gpu], counted: int, visible: Sequence[str]) -> Check:
    if gpus and not counted:
        advice = "install libnvidia-ml.so.1 of the same driver, by which ddip counts GPUs"
        return failed("gpus", f"nvidia-smi lists {len(gpus)}, NVIDIA's library none", advice)
    if not counted:
        return ok("gpus", "none")
    found = "\n".join([f"{counted}, {len(visible)} visible to ddip", *map(str, gpus)])
    if not visible:
        return warning("gpus", found, "unset CUDA_VISIBLE_DEVICES, which hides them, where Jupyter is started")
    full = ", ".join(str(gpu.index) for gpu in gpus if gpu.is_full)
    if full:
        advice = f"end the processes on GPU {full} (nvidia-smi lists it), or name other GPUs: %makedip -g 0,1"
        return warning("gpus", found, advice)
    return ok("gpus", found)
