"""Plain data on how a group's hosts are reached: the user's request, and the facts found since."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddip.errors import GroupError

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
"""Names of the notebook's machine, which needs no ssh."""


@dataclass(frozen=True)
class Seat:
    """A host of an ipyparallel cluster, with its engines."""

    name: str
    engines: tuple[int, ...]
    python: str
    """Interpreter that its engines run with."""


@dataclass(frozen=True)
class Attachment:
    """An existing ipyparallel cluster, as it was found."""

    file: str
    """Path of its connection file for clients."""
    seats: tuple[Seat, ...]
    n: int | None
    """Requested number of ranks; None: as many as there are engines."""

    def ensure_enough(self) -> None:
        """Raise GroupError if the cluster has fewer engines than the requested ranks."""
        have = sum(len(seat.engines) for seat in self.seats)
        if self.n is not None and self.n > have:
            raise GroupError(
                f"-n {self.n}: that cluster has only {have} engine{'s' * (have != 1)}; leave out -n to use all"
            )

    def counts(self) -> list[tuple[Seat, int]]:
        """Distribute the ranks over the hosts in order, one rank per engine; leave out hosts without a rank."""
        remaining = sum(len(seat.engines) for seat in self.seats) if self.n is None else self.n
        counts = []
        for seat in self.seats:
            count = min(remaining, len(seat.engines))
            remaining -= count
            if count:
                counts.append((seat, count))
        return counts


@dataclass(frozen=True)
class Reach:
    """Settings for how ddip finds and connects to a group's hosts, and prepares ranks there.

    Set at most one of `slurm`, `here`, `cluster` and `engines`; then ddip finds the hosts, and fills in `jobs` and
    `attached`.
    """

    directory: str | None = None
    """Working directory of the ranks on every host. None means the notebook's, or the home directory on a host without
    that folder."""
    python: str = ""
    """Path of Python on the hosts. If empty, the notebook's path on hosts where that exists, else ``python3``."""
    setup: str = ""
    """A line of bash to run on each host first, such as ``module load cuda; source env/bin/activate``."""
    slurm: str = ""
    """Options of ``sbatch``, such as ``nodes=2 gpus=4 time=2:00:00``, for a job that ddip submits. The nodes of the job
    are the hosts."""
    here: bool = False
    """True to use the nodes of the Slurm allocation that this process runs in."""
    jobs: tuple[int, ...] = ()
    """Slurm job ID of each host, in the order of the hosts; filled in by ddip."""
    cluster: str = ""
    """Cluster ID, profile, or connection file of a running ipyparallel cluster, on whose engines the ranks run."""
    engines: str = ""
    """Name of an ipyparallel launcher that starts engines for the group. The hosts of these engines are the hosts."""
    profile: str = ""
    """IPython profile that configures the launcher in `engines`."""
    attached: Attachment | None = None
    """The cluster that `cluster` or `engines` means, with its engines by host; filled in by ddip."""

    @property
    def asked(self) -> Reach:
        """A copy with only the user's request, without the fields that were found."""
        return replace(self, jobs=(), attached=None)

    def moved(self, number: int, job: int) -> Reach:
        """Return a copy in which host `number` is in another `job`."""
        return replace(self, jobs=(*self.jobs[:number], job, *self.jobs[number + 1 :]))

    @property
    def finds(self) -> bool:
        """True if the hosts come from Slurm or an ipyparallel cluster, so that their names must be looked up."""
        return bool(self.slurm) or self.here or bool(self.cluster) or bool(self.engines)
