"""A rank is killed in the middle of a large message: gloo does not notice, ddip does."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddip

from .leftovers import wait_until
from .meanwhile import meanwhile
from .rank_errors import raises_on_ranks

pytestmark = pytest.mark.native("sockets", "gloo_waits")
LARGE = "kept, large = rank, torch.zeros(1 << 25)"
"""128 MB: more than socket buffers hold."""


@pytest.fixture
def two_ranks(warmed_up: None) -> Iterator[ddip.Group]:
    with ddip.Group(2, failure_grace=0.1) as group:
        group.run(f"import os, signal, time, torch, torch.distributed as dist\n{LARGE}")
        yield group


def prove_repaired(group: ddip.Group) -> None:
    """Replace rank 1, and prove that the group works and rank 0 has kept its variables."""
    assert group.repair() == [1]
    group.run("""
        import torch, torch.distributed as dist
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one == world_size and (rank == 1 or kept == rank)
    """)


@pytest.mark.grid(in_ci=True)
def test_a_rank_with_a_half_sent_message_is_unblocked(two_ranks: ddip.Group, tmp_path: Path) -> None:
    ready = tmp_path / "ready"

    def kill_rank_1() -> None:
        wait_until(lambda: "send" in str(two_ranks.stacks()[0].place))
        os.kill(two_ranks.members[1].pid, signal.SIGKILL)

    killed = meanwhile(ready.exists, kill_rank_1)
    with raises_on_ranks({1: "RankEnded"}, {0: "send, cell "}):
        two_ranks.run(f"""
            if rank == 1:
                receiving = dist.irecv(large, 0)
                open({str(ready)!r}, "x").close()
                os.kill(os.getpid(), signal.SIGSTOP)
            while not os.path.exists({str(ready)!r}): time.sleep(0.01)
            dist.send(large, 1)
        """)
    killed.join()
    prove_repaired(two_ranks)


@pytest.mark.grid
def test_a_rank_with_a_half_received_message_is_unblocked(two_ranks: ddip.Group, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    sender = two_ranks.members[1].pid
    ended = meanwhile(
        lambda: not Path(f"/proc/{sender}").exists(), lambda: os.kill(two_ranks.members[0].pid, signal.SIGCONT)
    )
    with raises_on_ranks({1: "RankEnded"}, {0: "cell "}):
        two_ranks.run(f"""
            if rank == 0:
                receiving = dist.irecv(large, 1)
                open({str(ready)!r}, "x").close()
                os.kill(os.getpid(), signal.SIGSTOP)
                receiving.wait()
            while not os.path.exists({str(ready)!r}): time.sleep(0.01)
            sending = dist.isend(large, 0)
            os.kill(os.getpid(), signal.SIGKILL)
        """)
    ended.join()
    prove_repaired(two_ranks)


@pytest.mark.grid
def test_a_background_wait_does_not_delay_the_next_group(two_ranks: ddip.Group, tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    killed = meanwhile(
        lambda: two_ranks.info()[0].state == "idle" and ready.exists(),
        lambda: os.kill(two_ranks.members[1].pid, signal.SIGKILL),
    )
    with pytest.raises(ddip.CellError, match="^rank 1: RankEnded: "):
        two_ranks.run(f"""
            from ddip.rank.native import lost_waits
            if rank == 1:
                broadcast = dist.broadcast(large, 0, async_op=True)
                open({str(ready)!r}, "x").close()
                os.kill(os.getpid(), signal.SIGSTOP)
            while not os.path.exists({str(ready)!r}): time.sleep(0.01)
            broadcast = dist.broadcast(large, 0, async_op=True)
            while not lost_waits.find_waits(): time.sleep(0.01)
        """)
    killed.join()
    prove_repaired(two_ranks)
