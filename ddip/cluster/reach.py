"""Plain data on how a group's hosts are reached: the user's request, and the facts found since."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddip.errors import GroupError


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
                f"-n {self.n}: that cluster has {have} engine{'s' * (have != 1)}; leave out -n to have all"
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
    """The way to a group's hosts, and the setup of ranks there.

    Fields marked "found" are filled in when the hosts are resolved; the user sets the others.
    """

    directory: str | None = None
    """Working directory of ranks on every host; None: the notebook's if the host has it, else the home directory."""
    python: str = ""
    """Python to run on the hosts; empty: the notebook's path if it exists there, else ``python3``."""
    setup: str = ""
    """A line of bash that prepares each host: ``module load cuda; source env/bin/activate``."""
    slurm: str = ""
    """Options of sbatch for a job to submit, whose nodes are the hosts: ``nodes=2 gpus=4 time=2:00:00``."""
    here: bool = False
    """True if the hosts are the nodes of the allocation that this process runs in."""
    jobs: tuple[int, ...] = ()
    """Slurm job ID of each host, in the hosts' order; found."""
    cluster: str = ""
    """Cluster ID, profile, or connection file of the ipyparallel cluster whose engines run on the hosts."""
    engines: str = ""
    """The ipyparallel launcher that starts a cluster for the group, whose engines' hosts are the hosts."""
    profile: str = ""
    """IPython profile that configures that launcher."""
    attached: Attachment | None = None
    """That cluster, with its engines by host; found."""

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
