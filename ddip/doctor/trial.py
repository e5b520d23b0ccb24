"""Check a real start: start a group of ranks, run one all_reduce, and end the group.

Nothing is left behind. Leftovers of other notebooks stay: the report lists them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ddip.cluster import devices
from ddip.cluster.cluster_api import Cluster
from ddip.cluster.processes import preload_client
from ddip.doctor.doctor_report import Check, failed, ok, warning
from ddip.errors import DdipError
from ddip.group import stopping
from ddip.group.group import Group
from ddip.group.lifecycle import own_cluster
from ddip.group.members.placement import Request

CELL = """
import time, torch, torch.distributed as dist
began = time.perf_counter()
x = torch.full((1000,), rank + 1.0, device=device)
dist.all_reduce(x)
total, seconds = x.mean().item(), time.perf_counter() - began
"""
CELL_SECONDS = 60.0


class TrialGroup(Group):
    """A group that does not remove leftovers of other groups."""

    def _new_cluster(self, request: Request) -> Cluster:
        return own_cluster(request, self.options.spawn)


def check_start(backend: str) -> Check:
    """Start two ranks over `backend`, ``gloo`` or ``nccl``, and end them.

    With one GPU, nccl gets one rank.
    """
    gpus = None
    if backend == "nccl":
        names = devices.gpu_names()
        several = not any(name.startswith(devices.SLICE) for name in names)
        gpus = tuple(range(min(2 if several else 1, len(names))))
    try:
        with _trial_environment(), TrialGroup(None if gpus else 2, gpus) as group:
            group.run(CELL, show_ranks=[], timeout=CELL_SECONDS)
            answers, _ = group.pull_all(["total", "seconds"], range(group.world_size))
            begun, slowest = group.seconds, max(answer["seconds"] for answer in answers)
            return judge_start(backend, [answer["total"] for answer in answers], begun, slowest, group.cluster.spawned)
    except DdipError as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return judge_failure(backend, str(error))


@contextlib.contextmanager
def _trial_environment() -> Iterator[None]:
    """Set up the environment of the trial, and afterwards end the preload process and all its children.

    The trial uses the user's IPython profile if there is one, since that may be the cause of a fault, else a temporary
    one. A second Ctrl-C does not prevent the cleanup.
    """
    former, folder = dict(os.environ), tempfile.mkdtemp(prefix="ddip-doctor-")
    try:
        os.environ.update([preload_client.ONLY_ENGINES])  # the ranks end before they could use the rest
        if not Path(former.get("IPYTHONDIR") or "~/.ipython", "profile_default").expanduser().is_dir():
            os.environ["IPYTHONDIR"] = folder
        yield
    finally:
        with stopping.call_on_press(lambda: None):
            preload_client.end_process()
            shutil.rmtree(folder, ignore_errors=True)
            os.environ.clear()
            os.environ.update(former)


def judge_start(backend: str, totals: list[float], start_seconds: float, reduce_seconds: float, spawned: str) -> Check:
    """Judge a start of ranks over `backend`.

    `totals`: the sum on each rank; `start_seconds`, `reduce_seconds`: duration of the start and of the all_reduce;
    `spawned`: why ranks were spawned although they should be forked, or empty.
    """
    name, where, ranks = f"start-{backend}", "the CPU" if backend == "gloo" else "GPUs", len(totals)
    found = f"ranks on {where}: {ranks}, started in {start_seconds:.1f} s, all_reduce in {reduce_seconds:.3f} s"
    right = ranks * (ranks + 1) / 2
    if any(total != right for total in totals):
        got = ", ".join(f"{total:g}" for total in totals)
        advice = "do not train here; report it with the versions of torch, driver and CUDA above"
        return failed(name, f"{found}, with the wrong sum: {got} instead of {right:g}", advice)
    if spawned:
        return warning(name, f"{found}; spawned, not forked: {spawned}", "remove that cause, and ranks start faster")
    return ok(name, found)


def judge_failure(backend: str, error: str) -> Check:
    """Return a failed check for the `error` of a start over `backend`, or of its cell."""
    advice = (
        "fix the failed checks above first; if there are none, run this in a fresh environment, and report both results"
    )
    if backend == "nccl":
        advice = "NCCL_DEBUG=INFO python -m ddip doctor shows more; ranks on the CPU (%makedip -n 2) need no nccl"
    return failed(f"start-{backend}", error, advice)
