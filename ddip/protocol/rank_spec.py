"""Describe a rank's place in the group: the notebook sends this description to the rank."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_GROUP = "default"
"""ddip's name for the default group, as torch's own name differs between releases."""
STANDING_VARIABLES = ("rank", "world_size", "device")
"""Variables that ddip defines on each rank for its cells."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Environment variables that tell the backends which network interface carries the group's traffic."""


def backends_of(backend: str) -> list[str]:
    """Return the names of the backends in a string such as ``cpu:gloo,cuda:nccl`` or ``gloo``."""
    return [part.rpartition(":")[2] for part in backend.split(",")]


def has_nccl(backend: str) -> bool:
    """Return whether one of the backends is an implementation of NCCL; torch 2.15 has three."""
    return any(name.startswith("nccl") for name in backends_of(backend))


@dataclass(frozen=True)
class RankSpec:
    """Settings that a rank needs to join the group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    """Number of the rank's host among the hosts of the group, from 0."""
    group_world_size: int
    """Number of hosts."""
    run_id: str
    """ID of the job, like ``torchrun --rdzv-id``; ranks that join later have the same."""
    master_addr: str
    master_port: int
    device: str
    """``cpu``, or ``cuda:I`` with the index of the device in the rank's process."""
    backend: str
    store: str
    """Path of the file store that forms the group, or ``tcp://address:port/number`` of the TCPStore of rank 0."""
    groups: int
    """Initial value of torch's count of groups. torch derives group names from it, and device meshes and functional
    collectives find groups by name, so other ranks must not reuse a former group's name."""
    seconds: float
    """Timeout of forming the group over gloo, as a foreign process may have taken a rank's connection."""
    interfaces: dict[str, str]
    """Network interface of the group's traffic, by environment variable; empty: the backends choose."""
    threads: int | None
    """Threads of torch's CPU operations; None: the user has set the number in the environment."""
    notebook: str
    """Name of the notebook that lists of processes show."""
    collect: bool
    """True if the rank collects garbage after each cell."""
    directory: str
    """Working directory of the notebook; only used before the first cell."""
    path: tuple[str, ...]
    """``sys.path`` of the notebook; only used before the first cell."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that torchrun sets, without those for its agent's handling of failures.

        The restart count stays 0 when ddip rebuilds the group, since a script reads another count as a fresh start, and
        the ranks keep their variables. No agent holds a store, so code that forms a group by ``env://`` makes its own.
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
