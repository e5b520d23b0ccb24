"""torch: its build, its backends, and whether it can use the GPUs that are here."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from typing import TypedDict

from ddip.cluster import boot, preload_client
from ddip.doctor.report import Check, failed, ok, warning

IMPORT_SECONDS = 120.0
"""After which `import torch` is given up: the first one after an installation reads gigabytes."""
LAST_LINES = 6
"""Of what a process that failed has written."""


class Facts(TypedDict):
    """What `torch_probe.py` prints."""

    version: str
    cuda: str
    """Version of CUDA that it was built for; empty: it was not."""
    hip: str
    backends: list[str]
    nccl: str
    gpus: int
    """That torch can use."""
    why_no_gpu: str
    """What torch raised when it was to use them; empty: nothing."""
    warnings: list[str]


class Probe:
    """The process in which torch is imported, while other checks run."""

    def __init__(self) -> None:
        self.has_torch = False
        """Has the import succeeded?"""
        self._process = subprocess.Popen(
            preload_client.command("ddip.doctor.torch_probe"),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **preload_client.python_path()},
            text=True,
            errors="replace",
        )

    def end(self) -> None:
        """Kill it if it has not ended."""
        self._process.kill()
        self._process.communicate()

    def result(self) -> tuple[Facts | None, str]:
        """What it has found; or None, and why not."""
        try:
            out, errors = self._process.communicate(timeout=IMPORT_SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"import torch did not end within {IMPORT_SECONDS:.0f} s"
        facts, why = read(self._process.returncode, out, errors)
        self.has_torch = facts is not None
        return facts, why


def read(code: int, out: str, errors: str) -> tuple[Facts | None, str]:
    """What the process has found that ended with exit code `code`; or None, and why not."""
    if not code:
        with contextlib.suppress(ValueError, IndexError):
            facts: Facts = json.loads(out.splitlines()[-1])
            return facts, ""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    lines = [line for line in errors.splitlines() if line.strip()][-LAST_LINES:]
    return None, "\n".join([f"import torch failed ({how})", *lines])


def check_torch(probe: Probe) -> list[Check]:
    """Wait for `probe`, and judge what it has found."""
    from ddip.cluster import devices

    facts, why = probe.result()
    return judge_torch(facts, why, len(devices.gpu_names()))


def judge_torch(facts: Facts | None, why: str, gpus: int) -> list[Check]:
    """The checks `torch` and `backends`; `gpus`: how many NVIDIA's library counts, of those that may be seen."""
    if facts is None:
        if "No module named 'torch'" in why:
            return [failed("torch", "torch is not installed", "install it: python -m pip install torch")]
        if boot.INSTEAD in why:
            return [failed("torch", why, "rename the file that the last line names, or take its folder off PYTHONPATH")]
        return [failed("torch", why, "install torch again: python -m pip install --force-reinstall torch")]
    return [_judge_build(facts, gpus), _judge_backends(facts, gpus)]


def _judge_build(facts: Facts, gpus: int) -> Check:
    build = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
    if facts["hip"]:
        build = f"built for ROCm {facts['hip']}"
    found = f"{facts['version']}, {build}"
    here = "there is 1 GPU" if gpus == 1 else f"there are {gpus} GPUs"
    if gpus and not facts["cuda"]:
        return failed("torch", f"{found}, and {here}", "install a build for CUDA: pytorch.org says which")
    if gpus and not facts["gpus"]:
        text = f"{found}; {here}, which torch cannot use: {facts['why_no_gpu'] or 'it finds none'}"
        return failed("torch", text, "update the NVIDIA driver, or install a torch for an older CUDA")
    if gpus and facts["warnings"]:
        text = "\n".join([f"{found}; torch warns:", *facts["warnings"]])
        return warning("torch", text, "install a torch that was built for these GPUs and this driver")
    can = "1 GPU" if facts["gpus"] == 1 else f"{facts['gpus']} GPUs"
    return ok("torch", f"{found}, {can if facts['gpus'] else 'no GPU'}")


def _judge_backends(facts: Facts, gpus: int) -> Check:
    names = [f"nccl {facts['nccl']}" if name == "nccl" else name for name in facts["backends"]]
    found = ", ".join(names) or "none"
    if "gloo" not in facts["backends"]:
        return failed("backends", f"{found}; gloo is missing", "install a torch with distributed and gloo, as pip's")
    if gpus and "nccl" not in facts["backends"]:
        return failed("backends", f"{found}; nccl is missing", "install a build of torch for CUDA, which has nccl")
    return ok("backends", found)
