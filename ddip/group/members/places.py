"""Where the hosts of a group come from, when they are not named: looked for before anything is started."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from ddip.cluster.attach import attached, clusters
from ddip.cluster.hosts import slurm
from ddip.cluster.ipyparallel import launcher_engines
from ddip.cluster.processes.host import Host
from ddip.errors import GroupError
from ddip.group.members import wanted
from ddip.group.members.placement import GroupSpec, HostRequest, Request
from ddip.group.members.time_left import TimeLeft
from ddip.output.progress import Report

STOPPED = "the repair was interrupted; its job was cancelled, and nothing else has changed"
HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
"""Variables of other schedulers, each the path of a file with a host in each line: PBS, LSF, Grid Engine."""


class Place:
    """Where a group is; `give_back` what was found for it when it has ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._jobs = set(request.reach.jobs)
        """Those that are to be given back."""
        attachment = request.reach.attached
        self._file = "" if attachment is None else attachment.file
        self._left = TimeLeft()
        self._left.follow(self._jobs)

    def text(self) -> str:
        """How much of its time is left; empty where it has no end."""
        return self._left.text()

    def notices(self, spec: GroupSpec, hosts: Sequence[Host]) -> list[str]:
        """What is to be known of how a group lies there."""
        return [*filter(None, [spec.notice, wanted.folders_notice(hosts), self._unused_gpus(spec)])]

    def _unused_gpus(self, spec: GroupSpec) -> str:
        """What to say where a job has GPUs, and the ranks are on the CPU though nobody has said so."""
        jobs, has = self.request.reach.jobs, 0
        if jobs and self.request.n is None and not spec.on_gpus:
            with contextlib.suppress(GroupError):
                has = slurm.gpus(jobs[0], self.request.hosts[0].name)
        if not has:
            return ""
        what = f"the job has {has} GPU{'s' * (has > 1)} on {self.request.hosts[0].name}, and torch sees none there"
        return f"{what}, so the ranks are on the CPU; is its torch built for GPUs, and does it need a --setup?"

    def has(self, number: int) -> bool:
        """Is that host still a node of its job, as far as Slurm knows? Raises GroupError if it does not answer."""
        return self.request.hosts[number].name in slurm.nodes(self.request.reach.jobs[number])

    def others(self, gone: Sequence[int], progress: Report) -> tuple[int, list[str]]:
        """As many nodes as there are hosts `gone`, and the job that they are in; `move` the group there.

        Raises GroupError or RequestInterrupted.
        """
        reach, names = self.request.reach, [host.name for host in self.request.hosts]
        if not reach.slurm:
            lost = ", ".join(names[number] for number in gone)
            raise GroupError(
                f"{lost}: lost, and not to be replaced: job {reach.jobs[0]} is not ddip's, and gets no other nodes; "
                "%makedip -r starts afresh on those that Slurm still has in it"
            )
        there = {job: slurm.nodes(job) for job in self._jobs}
        # Slurm may take minutes to know of a loss, and a node that has room for this job, too, would be no other host.
        without = [name for name, job in zip(names, reach.jobs, strict=True) if name in there[job]]
        job = slurm.submit(slurm.like(reach.slurm, len(gone), without), progress, STOPPED)
        self._jobs.add(job)
        return job, _names(job)

    def move(self, request: Request) -> None:
        """The group is where `request` says from now on; jobs that it is not in any more are given back."""
        self.request = request
        former, self._jobs = self._jobs, set(request.reach.jobs)
        for job in former - self._jobs:
            slurm.give_back(job)
        self._left.follow(self._jobs)

    def give_back(self) -> None:
        """The group has ended; may be called twice."""
        self._left.follow(())
        jobs, self._jobs = self._jobs, set()
        for job in jobs:
            slurm.give_back(job)
        file, self._file = self._file, ""
        launcher_engines.give_back(file)


def found(request: Request, progress: Report) -> Place:
    """The place of a group for `request`: with the hosts that its reach leads to, where it does not name them.

    Raises BadInput, GroupError or RequestInterrupted; nothing is left of what was begun then.
    """
    reach = request.reach
    if reach.cluster or reach.engines:
        return Place(_attached(request, progress))
    if not reach.finds:
        return Place(request)
    if reach.slurm:
        again = bool(reach.jobs) and slurm.hold(reach.jobs[0])
        return _on_nodes(request, reach.jobs[0] if again else slurm.submit(reach.slurm, progress))
    if slurm.own_job():
        return _on_nodes(request, slurm.own_job())
    return Place(replace(request, hosts=tuple(map(HostRequest, _listed()))))


def _attached(request: Request, progress: Report) -> Request:
    """On the hosts of a cluster that somebody else has started."""
    reach, former = request.reach, request.reach.attached
    n = request.n if former is None else former.n
    if reach.cluster:
        file = clusters.find(reach.cluster)
    elif former is not None and launcher_engines.hold(former.file):
        file = former.file
    else:
        file = launcher_engines.start(reach.engines, reach.profile or "default", n, progress)
    try:
        progress("ddip: asking where the engines are", 0.0)
        attachment = attached.look(file, reach.cluster or reach.engines, n)
        attachment.ensure_enough()
    except BaseException:
        launcher_engines.give_back(file)
        raise
    each = request.gpus is not None  # -g is about each host
    hosts = tuple(HostRequest(seat.name, None if each else count) for seat, count in attachment.counts())
    return replace(request, n=None, hosts=hosts, reach=replace(reach, attached=attachment))


def _on_nodes(request: Request, job: int) -> Place:
    try:
        names = _names(job)
    except BaseException:
        slurm.give_back(job)
        raise
    reach = replace(request.reach, jobs=(job,) * len(names))
    return Place(replace(request, hosts=tuple(map(HostRequest, names)), reach=reach))


def _names(job: int) -> list[str]:
    """Of its nodes; raises GroupError if there are none."""
    names = slurm.nodes(job)
    if not names:
        raise GroupError(f"job {job} of Slurm does not run, so there are no nodes to be had")
    return names


def _listed() -> list[str]:
    """The hosts of an allocation of another scheduler; they are reached by ssh."""
    for name in HOST_FILES:
        file = os.environ.get(name)
        if file:
            try:
                lines = Path(file).read_text(errors="replace").splitlines()
            except OSError as error:
                raise GroupError(f"--here: {name}={file} cannot be read ({error.strerror})") from None
            return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    raise GroupError(
        "--here: this is no allocation: neither SLURM_JOB_ID nor any of " + ", ".join(HOST_FILES) + " is set; type "
        '--hosts h1,h2, or --slurm "nodes=2 time=1:00:00", which submits a job'
    )


def again(request: Request, hosts: Sequence[Host]) -> Request:
    """`request` for a group that starts afresh, and was on `hosts`: in the same job of ddip's, unless one of them is
    lost, or it was in several jobs."""
    lost = any(host.lost for host in hosts)
    if request.reach.slurm and (lost or len(set(request.reach.jobs)) > 1):
        return replace(request, hosts=(), reach=request.reach.asked)
    return request


@contextlib.contextmanager
def kept(request: Request) -> Iterator[None]:
    """Keep what was found for `request`, while the group that has it ends and another begins.

    Raises GroupError where a cluster cannot be had.
    """
    if request.reach.cluster:
        _attached(request, lambda text, share=None: None)
    there = request.reach.attached
    held = [job for job in set(request.reach.jobs) if slurm.hold(job)]
    file = there.file if there is not None and launcher_engines.hold(there.file) else ""
    try:
        yield
    finally:
        for job in held:
            slurm.give_back(job)
        launcher_engines.give_back(file)
