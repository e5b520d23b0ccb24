"""NVIDIA's driver and GPUs, and who uses them: what ``nvidia-smi`` says, if it is there."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddip.doctor.report import Check, failed, ok, warning
from ddip.output.sizes import size_text

SMI_SECONDS = 20.0
"""After which `nvidia-smi` is given up: a driver that does not answer keeps it for ever."""
GPU_FIELDS = "index,uuid,name,driver_version,memory.total,memory.used"
PROCESS_FIELDS = "gpu_uuid,pid,process_name,used_memory"
MIB = 1 << 20
PCI = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"
"""A PCI vendor, and how a class of devices begins."""


@dataclass(frozen=True)
class GpuUser:
    """A process that computes on a GPU."""

    pid: int
    name: str
    used: int | None
    """Bytes; None: not told, as in containers."""

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name}{f', {size_text(self.used)}' if self.used is not None else ''})"


@dataclass(frozen=True)
class Gpu:
    """One GPU."""

    index: int
    uuid: str
    name: str
    driver: str
    total: int | None
    used: int | None
    users: tuple[GpuUser, ...] = ()


@dataclass(frozen=True)
class Smi:
    """What ``nvidia-smi`` said."""

    gpus: tuple[Gpu, ...] = ()
    error: str = ""


def parse(gpu_text: str, process_text: str) -> tuple[Gpu, ...]:
    """The GPUs of two answers in CSV without header and units; a line that is none of a table is passed over.

    Names are not quoted and may have commas in them, so that fields are counted from both ends.
    """
    users: dict[str, list[GpuUser]] = {}
    for line in process_text.splitlines():
        fields = _fields(line)
        if len(fields) >= 4 and fields[1].isdecimal():
            user = GpuUser(int(fields[1]), Path(", ".join(fields[2:-1])).name or "?", _mebibytes(fields[-1]))
            users.setdefault(fields[0], []).append(user)
    gpus = []
    for line in gpu_text.splitlines():
        fields = _fields(line)
        if len(fields) >= 6 and fields[0].isdecimal():
            name, (driver, total, used) = ", ".join(fields[2:-3]), fields[-3:]
            index, uuid = int(fields[0]), fields[1]
            using = tuple(users.get(uuid, ()))
            gpus.append(Gpu(index, uuid, name, driver, _mebibytes(total), _mebibytes(used), using))
    return tuple(gpus)


def _fields(line: str) -> list[str]:
    return [field.strip() for field in line.split(",")]


def _mebibytes(text: str) -> int | None:
    """``[N/A]``, ``[Not Supported]`` and the like are None."""
    found = re.match(r"\d+", text)
    return int(found[0]) * MIB if found else None


def ask() -> Smi | None:
    """What ``nvidia-smi`` says; None: there is no such program."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        gpus = _run(program, f"--query-gpu={GPU_FIELDS}")
        found = parse(gpus, "")
        with contextlib.suppress(OSError, RuntimeError):  # the GPUs are known all the same
            found = parse(gpus, _run(program, f"--query-compute-apps={PROCESS_FIELDS}"))
    except subprocess.TimeoutExpired:
        return Smi(error=f"nvidia-smi does not answer within {SMI_SECONDS:.0f} s")
    except (OSError, RuntimeError) as error:
        return Smi(error=str(error))
    return Smi(found)


def _run(program: str, query: str) -> str:
    done = subprocess.run(
        [program, query, "--format=csv,noheader,nounits"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=SMI_SECONDS,
    )
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise RuntimeError(f"nvidia-smi failed (exit code {done.returncode}): {said}")
    return done.stdout


def built_in(folder: Path = PCI) -> int:
    """How many GPUs of NVIDIA are on the PCI bus, with or without a driver."""
    count = 0
    for device in folder.glob("*"):
        with contextlib.suppress(OSError):
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text()
            count += vendor == NVIDIA and kind.startswith(DISPLAY)
    return count


def check_gpus() -> list[Check]:
    """The driver, and the GPUs."""
    from ddip.cluster import devices

    return judge_gpus(ask(), built_in(), devices.count_nvidia(), devices.gpu_names())


def judge_gpus(smi: Smi | None, in_machine: int, counted: int, visible: Sequence[str]) -> list[Check]:
    """The checks `driver` and `gpus`.

    `in_machine`: on the PCI bus; `counted`: by NVIDIA's library; `visible`: those of them that CUDA_VISIBLE_DEVICES
    leaves.
    """
    return [_judge_driver(smi, in_machine, counted), _judge_use(smi, counted, visible)]


def _judge_driver(smi: Smi | None, in_machine: int, counted: int) -> Check:
    if smi is not None and smi.error:
        advice = "install the driver again, or load it; in a container: docker run --gpus all"
        return failed("driver", smi.error, f"{advice}, with the NVIDIA container toolkit")
    if smi is not None and smi.gpus:
        return ok("driver", f"NVIDIA {smi.gpus[0].driver}")
    if counted:
        return ok("driver", "NVIDIA's library is there; nvidia-smi is not")
    if in_machine:
        what = "1 NVIDIA GPU is" if in_machine == 1 else f"{in_machine} NVIDIA GPUs are"
        return warning(
            "driver",
            f"{what} built in, and there is no driver for this system or container",
            "install NVIDIA's driver; in a container: docker run --gpus all, with the NVIDIA container toolkit",
        )
    return ok("driver", "no NVIDIA driver; ranks run on the CPU")


def _judge_use(smi: Smi | None, counted: int, visible: Sequence[str]) -> Check:
    gpus = smi.gpus if smi is not None else ()
    if gpus and not counted:
        advice = "install libnvidia-ml.so.1 of the same driver, by which ddip counts GPUs"
        return failed("gpus", f"nvidia-smi lists {len(gpus)}, NVIDIA's library none", advice)
    if not counted:
        return ok("gpus", "none")
    lines = [f"{counted} GPU{'s' if counted > 1 else ''}, {len(visible)} visible to ddip", *map(_use_text, gpus)]
    if not visible:
        lines[0] = f"CUDA_VISIBLE_DEVICES hides all of {counted}"
        return warning("gpus", "\n".join(lines), "unset CUDA_VISIBLE_DEVICES where Jupyter is started")
    full = [gpu.index for gpu in gpus if gpu.total and gpu.used is not None and 2 * gpu.used > gpu.total]
    if full:
        text = ", ".join(map(str, full))
        advice = f"end what uses GPU {text}, or name other GPUs: %makedip -g 0,1"
        return warning("gpus", "\n".join(lines), advice)
    return ok("gpus", "\n".join(lines))


def _use_text(gpu: Gpu) -> str:
    memory = "memory unknown"
    if gpu.total and gpu.used is not None:
        memory = f"{size_text(gpu.used)} of {size_text(gpu.total)} used"
    users = f" by {', '.join(map(str, gpu.users))}" if gpu.users else ""
    return f"GPU {gpu.index}: {gpu.name}, {memory}{users}"
