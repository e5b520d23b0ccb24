"""Where the hosts of a group come from, when they are not named: looked for before anything is started."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from ddip.cluster import attached, clusters, engines, slurm
from ddip.errors import GroupError
from ddip.group.placement import HostRequest, Request
from ddip.output.area import notify
from ddip.output.progress import Report

WARN_SECONDS = 600.0
"""Before the end of a job, when its user is told."""
HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
"""Variables of other schedulers, each the path of a file with a host in each line: PBS, LSF, Grid Engine."""


class Place:
    """Where a group is; `give_back` what was found for it when it has ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._job = request.reach.job
        attachment = request.reach.attached
        self._file = "" if attachment is None else attachment.file
        self._timer: threading.Timer | None = None
        self._look(first=True)

    def _look(self, first: bool = False) -> None:
        """Tell when the time of the job is nearly over; it may be changed meanwhile."""
        left = slurm.seconds_left(self._job) if self._job else None
        if left is None:
            return
        if left > WARN_SECONDS:
            self._timer = threading.Timer(left - WARN_SECONDS, self._look)
            self._timer.daemon = True
            self._timer.start()
        elif not first:
            notify(f"{self.text()}; save what you need: its ranks end with it")

    def text(self) -> str:
        """How much of its time is left; empty where it has no end."""
        left = slurm.seconds_left(self._job) if self._job else None
        return "" if left is None else f"job {self._job} of Slurm ends in {timedelta(seconds=int(left))}"

    def give_back(self) -> None:
        """The group has ended; may be called twice."""
        if self._timer is not None:
            self._timer.cancel()
        job, self._job = self._job, 0
        if job:
            slurm.give_back(job)
        file, self._file = self._file, ""
        engines.give_back(file)


def found(request: Request, progress: Report) -> Place:
    """The place of a group for `request`: with the hosts that its reach leads to, where it does not name them.

    Raises BadInput, GroupError or RequestInterrupted; nothing is left of what was begun then.
    """
    reach = request.reach
    if reach.cluster or reach.engines:
        return Place(_attached(request, progress))
    if not reach.finds or (reach.job and slurm.hold(reach.job)):
        return Place(request)
    if reach.slurm:
        return _on_nodes(request, slurm.submit(reach.slurm, progress))
    if slurm.own_job():
        return _on_nodes(request, slurm.own_job())
    return Place(replace(request, hosts=tuple(map(HostRequest, _listed()))))


def _attached(request: Request, progress: Report) -> Request:
    """On the hosts of a cluster that somebody else has started."""
    reach, former = request.reach, request.reach.attached
    n = request.n if former is None else former.n
    if reach.cluster:
        file = clusters.find(reach.cluster)
    elif former is not None and engines.hold(former.file):
        file = former.file
    else:
        file = engines.start(reach.engines, reach.profile or "default", n, progress)
    try:
        progress("ddip: asking where the engines are", 0.0)
        attachment = attached.look(file, reach.cluster or reach.engines, n)
        attachment.ensure_enough()
    except BaseException:
        engines.give_back(file)
        raise
    each = request.gpus is not None  # -g is about each host
    hosts = tuple(HostRequest(seat.name, None if each else count) for seat, count in attachment.counts())
    return replace(request, n=None, hosts=hosts, reach=replace(reach, attached=attachment))


def _on_nodes(request: Request, job: int) -> Place:
    try:
        names = slurm.nodes(job)
    except BaseException:
        slurm.give_back(job)
        raise
    if not names:
        slurm.give_back(job)
        raise GroupError(f"job {job} of Slurm does not run, so there are no nodes to be had")
    return Place(replace(request, hosts=tuple(map(HostRequest, names)), reach=replace(request.reach, job=job)))


def _listed() -> list[str]:
    """The hosts of an allocation of another scheduler; they are reached by ssh."""
    for name in HOST_FILES:
        file = os.environ.get(name)
        if file:
            try:
                lines = Path(file).read_text().splitlines()
            except OSError as error:
                raise GroupError(f"--here: {name}={file} cannot be read ({error.strerror})") from None
            return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    raise GroupError(
        "--here: this is no allocation: neither SLURM_JOB_ID nor any of " + ", ".join(HOST_FILES) + " is set; type "
        '--hosts h1,h2, or --slurm "nodes=2 time=1:00:00", which submits a job'
    )


@contextlib.contextmanager
def kept(request: Request) -> Iterator[None]:
    """Keep what was found for `request`, while the group that has it ends and another begins.

    Raises GroupError where a cluster cannot be had.
    """
    if request.reach.cluster:
        _attached(request, lambda text, share=None: None)
    there = request.reach.attached
    held = bool(request.reach.job) and slurm.hold(request.reach.job)
    file = there.file if there is not None and engines.hold(there.file) else ""
    try:
        yield
    finally:
        if held:
            slurm.give_back(request.reach.job)
        engines.give_back(file)
