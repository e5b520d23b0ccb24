"""Find the hosts of a group that does not name them: in a Slurm job, another scheduler's, or a cluster."""

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

STOPPED = "the repair was interrupted; {job}, and nothing else has changed"
HOST_FILES = ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "PE_HOSTFILE")
"""Environment variables of PBS, LSF and Grid Engine: each is the path of a file with one host per line."""


class Allocation:
    """The hosts and jobs of a group; call `give_back` when the group has ended."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self._jobs = set(request.reach.jobs)
        """The Slurm jobs to give back."""
        attachment = request.reach.attached
        self._file = "" if attachment is None else attachment.file
        self._time_left = TimeLeft()
        self._time_left.follow(self._jobs)

    def text(self) -> str:
        """Return the time left of the Slurm job as text for the user; empty if there is no limit."""
        return self._time_left.text()

    def notices(self, spec: GroupSpec, hosts: Sequence[Host]) -> list[str]:
        """Return the notices to show to the user about a group with this placement."""
        return [*filter(None, [spec.notice, wanted.folders_notice(hosts), self._unused_gpus(spec)])]

    def _unused_gpus(self, spec: GroupSpec) -> str:
        """Return a notice if a job has GPUs but the ranks run on the CPU unasked; otherwise an empty text."""
        jobs, count = self.request.reach.jobs, 0
        if jobs and self.request.n is None and not spec.on_gpus:
            with contextlib.suppress(GroupError):
                count = slurm.count_gpus(jobs[0], self.request.hosts[0].name)
        if not count:
            return ""
        notice = (
            f"the job has {count} GPU{'s' * (count > 1)} on {self.request.hosts[0].name}, and torch sees none there"
        )
        return f"{notice}, so the ranks are on the CPU; install torch for GPUs there, or name a --setup if it needs one"

    def has(self, number: int) -> bool:
        """Return whether host `number` is still a node of its Slurm job.

        Raises GroupError if Slurm does not answer.
        """
        return self.request.hosts[number].name in slurm.node_names(self.request.reach.jobs[number])

    def request_nodes(self, lost_hosts: Sequence[int], progress: Report) -> tuple[int, list[str]]:
        """Submit a Slurm job for one new node per host in `lost_hosts`, and return its ID and nodes.

        It waits until the job runs; `move` then moves the group there. Raises RequestInterrupted and GroupError, for
        example if ddip did not submit the group's job.
        """
        reach, names = self.request.reach, [host.name for host in self.request.hosts]
        if not reach.slurm:
            lost = ", ".join(names[number] for number in lost_hosts)
            raise GroupError(
                f"{lost} cannot be replaced: ddip did not submit job {reach.jobs[0]}, so the job gets no other "
                "nodes; %makedip -r restarts the group on the nodes that the job still has"
            )
        nodes_of_job = {job: slurm.node_names(job) for job in self._jobs}
        # Slurm may take minutes to notice a loss, and could otherwise place the new job on nodes that the group uses.
        excluded = [name for name, job in zip(names, reach.jobs, strict=True) if name in nodes_of_job[job]]
        job = slurm.submit_job(slurm.further_node_options(reach.slurm, len(lost_hosts), excluded), progress, STOPPED)
        self._jobs.add(job)
        return job, _node_names(job)

    def move(self, request: Request) -> None:
        """Make the hosts and jobs of `request` the group's, and give back the jobs that the group no longer uses."""
        self.request = request
        former, self._jobs = self._jobs, set(request.reach.jobs)
        for job in former - self._jobs:
            slurm.give_back(job)
        self._time_left.follow(self._jobs)

    def give_back(self) -> None:
        """Give back all jobs and clusters of a group that has ended; may be called twice."""
        self._time_left.follow(())
        jobs, self._jobs = self._jobs, set()
        for job in jobs:
            slurm.give_back(job)
        file, self._file = self._file, ""
        launcher_engines.give_back(file)


def allocate_hosts(request: Request, progress: Report) -> Allocation:
    """Return the allocation of a group for `request`, after finding its hosts if it does not name them.

    It may submit a Slurm job or start an ipyparallel cluster, and waits for it. Raises BadInput, GroupError or
    RequestInterrupted; jobs and clusters that it had begun to use are given back then.
    """
    reach = request.reach
    if reach.cluster or reach.engines:
        return Allocation(_with_cluster_hosts(request, progress))
    if not reach.finds:
        return Allocation(request)
    if reach.slurm:
        is_held = bool(reach.jobs) and slurm.hold_job(reach.jobs[0])
        return _on_nodes(request, reach.jobs[0] if is_held else slurm.submit_job(reach.slurm, progress))
    if slurm.own_job():
        return _on_nodes(request, slurm.own_job())
    return Allocation(replace(request, hosts=tuple(map(HostRequest, _hosts_in_file()))))


def _with_cluster_hosts(request: Request, progress: Report) -> Request:
    """Complete `request` with the hosts of an ipyparallel cluster, found or started by a launcher."""
    reach, former = request.reach, request.reach.attached
    n = request.n if former is None else former.n
    if reach.cluster:
        file = clusters.find_connection_file(reach.cluster)
    elif former is not None and launcher_engines.hold_cluster(former.file):
        file = former.file
    else:
        file = launcher_engines.start_cluster(reach.engines, reach.profile or "default", n, progress)
    try:
        progress("ddip: asking where the engines are", 0.0)
        attachment = attached.find_hosts(file, reach.cluster or reach.engines, n)
        attachment.ensure_enough()
    except BaseException:
        launcher_engines.give_back(file)
        raise
    per_host = request.gpus is not None  # -g applies to each host
    hosts = tuple(HostRequest(seat.name, None if per_host else count) for seat, count in attachment.counts())
    return replace(request, n=None, hosts=hosts, reach=replace(reach, attached=attachment))


def _on_nodes(request: Request, job: int) -> Allocation:
    try:
        names = _node_names(job)
    except BaseException:
        slurm.give_back(job)
        raise
    reach = replace(request.reach, jobs=(job,) * len(names))
    return Allocation(replace(request, hosts=tuple(map(HostRequest, names)), reach=reach))


def _node_names(job: int) -> list[str]:
    """Return the names of the job's nodes; raise GroupError if there are none."""
    names = slurm.node_names(job)
    if not names:
        raise GroupError(f"Slurm job {job} is not running, so it has no nodes")
    return names


def _hosts_in_file() -> list[str]:
    """Return the hosts of another scheduler's allocation, to be reached by ssh; raise GroupError if none."""
    for name in HOST_FILES:
        file = os.environ.get(name)
        if file:
            try:
                lines = Path(file).read_text(errors="replace").splitlines()
            except OSError as error:
                raise GroupError(f"--here: {name}={file} cannot be read ({error.strerror})") from None
            return list(dict.fromkeys(line.split()[0] for line in lines if line.strip()))
    raise GroupError(
        "--here: this is not an allocation: neither SLURM_JOB_ID nor any of " + ", ".join(HOST_FILES) + " is set; type "
        '--hosts h1,h2, or --slurm "nodes=2 time=1:00:00", which submits a job'
    )


def restart_request(request: Request, hosts: Sequence[Host]) -> Request:
    """Return `request` for a restart of a group that was on `hosts`; pure.

    It keeps the Slurm job that ddip submitted, unless a host is lost or there are several jobs; then the next start
    submits another one.
    """
    lost = any(host.lost for host in hosts)
    if request.reach.slurm and (lost or len(set(request.reach.jobs)) > 1):
        return replace(request, hosts=(), reach=request.reach.asked)
    return request


@contextlib.contextmanager
def hold_resources(request: Request) -> Iterator[None]:
    """Keep the jobs and cluster of `request` that ddip started until the next group has started.

    Raises GroupError, before the block, if the cluster is not available.
    """
    if request.reach.cluster:
        _with_cluster_hosts(request, lambda text, share=None: None)
    attachment = request.reach.attached
    held_jobs = [job for job in set(request.reach.jobs) if slurm.hold_job(job)]
    file = attachment.file if attachment is not None and launcher_engines.hold_cluster(attachment.file) else ""
    try:
        yield
    finally:
        for job in held_jobs:
            slurm.give_back(job)
        launcher_engines.give_back(file)
