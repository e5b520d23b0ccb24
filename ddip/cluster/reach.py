"""How the hosts of a group are reached, as plain data: what the user asked for, and what was found."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ddip.errors import GroupError


@dataclass(frozen=True)
class Seat:
    """A host of a cluster."""

    name: str
    engines: tuple[int, ...]
    python: str
    """That its engines run with."""


@dataclass(frozen=True)
class Attachment:
    """A cluster as it was found."""

    file: str
    """For clients of it."""
    seats: tuple[Seat, ...]
    n: int | None
    """How many ranks were asked for; None: as many as there are engines."""

    def ensure_enough(self) -> None:
        """Raise GroupError if there are not so many engines."""
        have = sum(len(seat.engines) for seat in self.seats)
        if self.n is not None and self.n > have:
            raise GroupError(
                f"-n {self.n}: that cluster has {have} engine{'s' * (have != 1)}; leave out -n to have all"
            )

    def counts(self) -> list[tuple[Seat, int]]:
        """How many ranks each host has: as many as there are engines, or as were asked for, in the order of hosts."""
        left = sum(len(seat.engines) for seat in self.seats) if self.n is None else self.n
        counts = []
        for seat in self.seats:
            count = min(left, len(seat.engines))
            left -= count
            if count:
                counts.append((seat, count))
        return counts


@dataclass(frozen=True)
class Reach:
    """How hosts are reached, and what their ranks begin with."""

    directory: str | None = None
    """Where ranks begin, on every host; None: where the notebook is, if the host has that folder, else at home."""
    python: str = ""
    """Which Python the hosts take; empty: the notebook's, where they have it, else ``python3``."""
    setup: str = ""
    """A line of bash that prepares each host: ``module load cuda; source env/bin/activate``."""
    slurm: str = ""
    """The hosts are the nodes of a job that is submitted: ``nodes=2 gpus=4 time=2:00:00``, with sbatch's options."""
    here: bool = False
    """The hosts are those of the allocation that this process is in."""
    jobs: tuple[int, ...] = ()
    """Slurm's id of the job that each host is in, in their order; found."""
    cluster: str = ""
    """The hosts are those of the engines of this ipyparallel cluster: its id, profile, or connection file."""
    engines: str = ""
    """The hosts are those of a cluster that is started for the group, with this launcher of ipyparallel's."""
    profile: str = ""
    """Whose profile of IPython configures that launcher."""
    attached: Attachment | None = None
    """That cluster, and who is where; found."""

    @property
    def asked(self) -> Reach:
        """Without what was found."""
        return replace(self, jobs=(), attached=None)

    def moved(self, number: int, job: int) -> Reach:
        """With host `number` in another `job`."""
        return replace(self, jobs=(*self.jobs[:number], job, *self.jobs[number + 1 :]))

    @property
    def finds(self) -> bool:
        """Does it say where the hosts come from, whose names are not known yet?"""
        return bool(self.slurm) or self.here or bool(self.cluster) or bool(self.engines)
