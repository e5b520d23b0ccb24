"""A real start: a group of ranks, one all_reduce, and the end of it all.

Nothing of it stays, and it leaves alone what other notebooks have left, which the report lists.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddip.cluster import devices, preload_client
from ddip.doctor.report import Check, failed, ok, warning
from ddip.errors import DdipError
from ddip.group import stopping
from ddip.group.group import Group

CELL = """
import time, torch, torch.distributed as dist
began = time.perf_counter()
x = torch.full((1000,), rank + 1.0, device=device)
dist.all_reduce(x)
total, seconds = x.mean().item(), time.perf_counter() - began
"""
CELL_SECONDS = 60.0


class TrialGroup(Group):
    """A group that does not clear up what others have left."""

    clears_up = False


@dataclass(frozen=True)
class Trial:
    """What came of one start."""

    ranks: int
    start_seconds: float
    all_reduce_seconds: float
    """Of the slowest rank, the first use of its device included."""
    totals: tuple[float, ...]
    """What each rank has got."""
    spawned: str
    """Why the ranks were not forked, though they should be; empty if they were."""


def check_start(backend: str) -> Check:
    """Start two ranks over `backend`, ``gloo`` or ``nccl``, and end them; with one GPU, nccl has one rank."""
    gpus = None
    if backend == "nccl":
        names = devices.gpu_names()
        several = not any(name.startswith(devices.SLICE) for name in names)
        gpus = tuple(range(min(2 if several else 1, len(names))))
    try:
        trial = run(gpus)
    except DdipError as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        return judge_failure(backend, str(error))
    return judge(backend, trial)


def run(gpus: tuple[int, ...] | None) -> Trial:
    """One rank on each of `gpus`; None: two on the CPU. Raises DdipError as ``Group`` and its cells do."""
    with _surroundings(), TrialGroup(None if gpus else 2, gpus) as group:
        group.run(CELL, show_ranks=[], timeout=CELL_SECONDS)
        answers, _ = group.pull_all(["total", "seconds"], range(group.world_size))
        return Trial(
            group.world_size,
            group.seconds,
            max(answer["seconds"] for answer in answers),
            tuple(answer["total"] for answer in answers),
            group.cluster.spawned,
        )


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """The user's IPython profile if there is one, which may be what is wrong, else one that is removed afterwards.

    The warm process, and whatever it forked, is ended afterwards, too; a second Ctrl-C does not keep it from that.
    """
    former, folder = dict(os.environ), tempfile.mkdtemp(prefix="ddip-doctor-")
    try:
        os.environ.update([preload_client.ONLY_ENGINES])  # the ranks do not live long enough to use more
        if not Path(former.get("IPYTHONDIR") or "~/.ipython", "profile_default").expanduser().is_dir():
            os.environ["IPYTHONDIR"] = folder
        yield
    finally:
        with stopping.calling(lambda: None):
            preload_client.end()
            shutil.rmtree(folder, ignore_errors=True)
            os.environ.clear()
            os.environ.update(former)


def judge(backend: str, trial: Trial) -> Check:
    """Was the sum right on every rank, and were they forked where they can be?"""
    name, where = f"start-{backend}", "the CPU" if backend == "gloo" else "GPUs"
    count = "1 rank" if trial.ranks == 1 else f"{trial.ranks} ranks"
    found = f"{count} on {where} in {trial.start_seconds:.1f} s, all_reduce in {trial.all_reduce_seconds:.3f} s"
    right = trial.ranks * (trial.ranks + 1) / 2
    if any(total != right for total in trial.totals):
        got = ", ".join(f"{total:g}" for total in trial.totals)
        advice = "do not train here; report it with the versions of torch, driver and CUDA above"
        return failed(name, f"{found}, with the wrong sum: {got} instead of {right:g}", advice)
    if trial.spawned:
        return warning(name, f"{found}; spawned, not forked: {trial.spawned}", "ranks start faster without that reason")
    return ok(name, found)


def judge_failure(backend: str, error: str) -> Check:
    """`error`: what ddip says of a group that did not form, or of its cell."""
    advice = "mend what failed above first; if nothing did, run it in a fresh environment, and report both"
    if backend == "nccl":
        advice = "NCCL_DEBUG=INFO python -m ddip doctor tells more; ranks on the CPU (%makedip -n 2) need no nccl"
    return failed(f"start-{backend}", error, advice)
