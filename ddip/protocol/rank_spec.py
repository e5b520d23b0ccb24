"""A rank's place in the group, as the notebook tells it to the rank."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_GROUP = "default"
"""Stands for the name of the default group, which differs between releases of torch."""
STANDING_VARIABLES = ("rank", "world_size", "device")
"""What each rank has from the start, for its cells."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""By which the backends are told the network interface of the group's own traffic."""


def backends_of(backend: str) -> list[str]:
    """Names of the backends in ``cpu:gloo,cuda:nccl``, or in ``gloo``."""
    return [part.rpartition(":")[2] for part in backend.split(",")]


def has_nccl(backend: str) -> bool:
    """Is one of them an implementation of nccl? torch 2.15 has three."""
    return any(name.startswith("nccl") for name in backends_of(backend))


@dataclass(frozen=True)
class RankSpec:
    """Everything that a rank must know to join the group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    """Number of its host, among those of the group."""
    group_world_size: int
    """How many hosts there are."""
    run_id: str
    """Of the job, as ``torchrun --rdzv-id``: that of the ranks, also of those that join them later."""
    master_addr: str
    master_port: int
    device: str
    """``cpu``, or ``cuda:I`` as this process counts its devices."""
    backend: str
    store: str
    """Path of the file store that forms the group, or ``tcp://address:port/number`` of the TCPStore of rank 0."""
    groups: int
    """How many groups are counted as made before those of the cells: a name that a former group had, by which device
    meshes and functional collectives find theirs, must not come again for other ranks."""
    seconds: float
    """Until gloo gives up to form the group, where a stranger may have taken a rank's connection."""
    interfaces: dict[str, str]
    """Network interface of the group's own traffic, by the variable that tells a backend; empty: let them choose."""
    threads: int | None
    """For torch's operations on the CPU; None: the user has set them in the environment."""
    notebook: str
    """What to call the notebook where people look at processes."""
    collect: bool
    """Collect garbage after each cell."""
    directory: str
    """Working directory of the notebook; used before the first cell only."""
    path: tuple[str, ...]
    """``sys.path`` of the notebook; used before the first cell only."""

    @property
    def environment(self) -> dict[str, str]:
        """The variables that torchrun sets, with its meaning, but what tells how its agent handles failures.

        A count of restarts other than 0 would say that the script has begun anew: a group that is formed again has its
        variables. There is no agent that holds a store: who forms a group by ``env://`` makes its own.
        """
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.group_rank),
            "GROUP_WORLD_SIZE": str(self.group_world_size),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
            "TORCHELASTIC_RUN_ID": self.run_id,
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
            "TORCHELASTIC_USE_AGENT_STORE": "False",
        }
