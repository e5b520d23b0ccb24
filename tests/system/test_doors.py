"""10^5 random messages of another user to all listening sockets, before, during and after cells."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

import ddip
from ddip.cluster.processes import preload_client

from ..cluster.doors import NOBODY, count_descriptors, find_listeners, send_random_messages
from ..cluster.leftovers import family_of, wait_until

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells who listens in /proc"),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can try as another user"),
]
STEP = "import torch, torch.distributed as dist; x = torch.ones(1); dist.all_reduce(x); assert x == 2; steps += 1"


@pytest.mark.timeout(600)
def test_many_random_messages_of_another_user_break_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/tmp")  # a folder that all users can enter
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with ddip.Group(2) as group, ThreadPoolExecutor(1) as stranger:
        ranks = [member.pid for member in group.members]
        group.run("steps = 0")
        group.run(STEP)
        processes = family_of(os.getpid())
        doors = find_listeners(processes)
        assert len(doors) >= 18 + 2 and {door.role for door in doors} == {"controller", "rank"}
        assert preload_client.ensure_process().asleep.wait(60)  # the preload process has files open while it imports
        before = count_descriptors(processes)
        outcomes = [send_random_messages(doors, 20_000, NOBODY, seed=1)]
        cells = 1
        during = stranger.submit(send_random_messages, doors, 60_000, NOBODY, 2, 200)
        while not during.done():
            group.run(STEP)
            cells += 1
        outcomes.append(during.result())
        outcomes.append(send_random_messages(doors, 20_000, NOBODY, seed=3))
        for _ in range(20):
            group.run(STEP)
        assert group.pull(["steps"]) == {"steps": cells + 20}
        assert [member.pid for member in group.members] == ranks
        assert group.repair() == []
        assert [sum(outcome.values()) for outcome in outcomes] == [20_000, 60_000, 20_000]
        assert {what for outcome in outcomes for what in outcome} == {"refused", "unanswered"}
        wait_until(lambda: count_descriptors(processes) == before)
        print(f"100000 messages to {len(doors)} listeners, {cells} cells meanwhile: {outcomes}")
