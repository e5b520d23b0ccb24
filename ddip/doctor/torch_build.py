"""Check torch: its build, its backends, and whether it can use the GPUs of this machine.

torch is imported in a process of its own (`main`), so that an import that crashes or hangs breaks no other check.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import warnings
from typing import TypedDict

from ddip.cluster.processes import boot, preload_client
from ddip.doctor import private_names
from ddip.doctor.doctor_report import Check, failed, ok, warning
from ddip.doctor.private_names import NamesReport
from ddip.protocol import compat_torch

IMPORT_SECONDS = 120.0
"""Time limit of ``import torch``: the first one after an installation reads gigabytes."""
LAST_LINES = 6
"""Lines of a failed process that are shown."""


class Facts(TypedDict):
    """Facts about the installed torch, which `main` prints as one line of JSON."""

    version: str
    cuda: str
    """Version of CUDA that torch was built for, or empty."""
    hip: str
    backends: list[str]
    gpus: int
    """Number of GPUs that torch can use."""
    why_no_gpu: str
    """The error with which torch failed to use them, or empty."""
    warnings: list[str]
    names: NamesReport
    """Its private names."""


def main() -> None:
    """Import torch and print `Facts` as one line of JSON."""
    import torch
    import torch.distributed as dist

    why, gpus = "", 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.version.cuda or torch.version.hip:
            try:
                torch.cuda.init()
                gpus = torch.cuda.device_count()
                for gpu in range(gpus):
                    torch.cuda.get_device_capability(gpu)
            except Exception as error:  # RuntimeError, AssertionError, and whatever a broken driver raises
                why = _one_line(error)
    facts: Facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "backends": [name for name in ("gloo", "nccl", "mpi", "ucc") if getattr(dist, f"is_{name}_available", bool)()],
        "gpus": gpus,
        "why_no_gpu": why,
        "warnings": [_one_line(one.message) for one in caught if one.category is UserWarning],
        "names": private_names.report_missing(compat_torch.NAMES, compat_torch.NAMES.has),
    }
    print(json.dumps(facts))


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


class Probe:
    """A child process that imports torch and prints its `Facts`, while other checks run.

    The constructor starts it.
    """

    def __init__(self) -> None:
        self.has_torch = False
        """True if torch was imported."""
        self._process = subprocess.Popen(
            preload_client.module_command("ddip.doctor.torch_build"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **preload_client.python_path()},
            text=True,
            errors="replace",
        )

    def end(self) -> None:
        """Kill the process if it has not ended."""
        self._process.kill()
        self._process.communicate()

    def result(self) -> tuple[Facts | None, str]:
        """Wait for the process, at most IMPORT_SECONDS; return the facts, or None and the reason."""
        try:
            out, errors = self._process.communicate(timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"import torch did not end within {IMPORT_SECONDS:.0f} s"
        facts, why = read_facts(self._process.returncode, out, errors)
        self.has_torch = facts is not None
        return facts, why


def read_facts(code: int, out: str, errors: str) -> tuple[Facts | None, str]:
    """Return the facts on the last line of the output `out`, or None and the reason why there are none."""
    if not code:
        with contextlib.suppress(ValueError, IndexError):
            facts: Facts = json.loads(out.splitlines()[-1])
            return facts, ""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = [line for line in errors.splitlines() if line.strip()][-LAST_LINES:]
    return None, "\n".join([f"import torch failed ({how})", *lines])


def check_torch(probe: Probe) -> list[Check]:
    """Wait for `probe`, and judge its result."""
    from ddip.cluster import devices

    facts, why = probe.result()
    return judge_torch(facts, why, len(devices.gpu_names()))


def judge_torch(facts: Facts | None, why: str, gpus: int) -> list[Check]:
    """Return the checks `torch`, `backends` and `torch-names` from the probe's `facts`.

    `why`: reason why there are no facts. `gpus`: number of visible GPUs according to NVIDIA's library.
    """
    if facts is None:
        if "No module named 'torch'" in why:
            return [failed("torch", "torch is not installed", "install it: python -m pip install torch")]
        if boot.INSTEAD in why:
            return [failed("torch", why, "rename the file that the last line names, or take its folder off PYTHONPATH")]
        return [failed("torch", why, "install torch again: python -m pip install --force-reinstall torch")]
    found, missing = ", ".join(facts["backends"]) or "none", {"gloo"} - {*facts["backends"]}
    names = private_names.judge_names("torch-names", [facts["names"]])
    if gpus:
        missing = {"gloo", "nccl"} - {*facts["backends"]}
    if missing:
        text, advice = f"{found}; missing: {', '.join(sorted(missing))}", "install a torch build from pytorch.org"
        return [_judge_build(facts, gpus), failed("backends", text, advice), names]
    return [_judge_build(facts, gpus), ok("backends", found), names]


def _judge_build(facts: Facts, gpus: int) -> Check:
    build = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
    if facts["hip"]:
        build = f"built for ROCm {facts['hip']}"
    found = f"{facts['version']}, {build}, GPUs: {facts['gpus']}"
    if gpus and not facts["cuda"]:
        return failed("torch", f"{found} of {gpus}", "install a build for CUDA: pytorch.org says which")
    if gpus and not facts["gpus"]:
        text = f"{found} of {gpus}; {facts['why_no_gpu'] or 'torch finds none'}"
        return failed("torch", text, "update the NVIDIA driver, or install a torch for an older CUDA")
    if gpus and facts["warnings"]:
        text = "\n".join([f"{found}; torch warns:", *facts["warnings"]])
        return warning("torch", text, "install a torch that was built for these GPUs and this driver")
    return ok("torch", found)
