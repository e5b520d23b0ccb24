"""A rank's place in the group, as the notebook tells it to the rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """Everything that a rank must know to join the group."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    group_rank: int
    master_addr: str
    master_port: int
    device: str
    """``cpu``, or ``cuda:I`` as this process counts its devices."""
    backend: str
    store: str
    """Path of the file store that forms the group."""
    interface: str
    """Network interface of the group's own traffic; empty: let the backend choose."""
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
        """The variables that torchrun sets, with its meaning."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.group_rank),
            "MASTER_ADDR": self.master_addr,
            "MASTER_PORT": str(self.master_port),
        }
