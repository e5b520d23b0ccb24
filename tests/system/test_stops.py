"""The stop button on a machine with ten times its load: healthy ranks are slow, and are kept."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddip
from ddip.errors import CellInterrupted
from tests.cluster.meanwhile import meanwhile, press_stop

STOPS = int(os.environ.get("STOPS", "20"))
LOAD = 20
RANKS = 4
BUSINESS = {
    "Python": "begun()\nwhile True: pass",
    "sleep": "begun()\ntime.sleep(1000)",
    "C": "x = torch.randn(300, 300)\nbegun()\nwhile True: x @ x",
    "a collective": "begun()\ndist.barrier() if rank else time.sleep(1000)",
    "torch's sources": (
        "class Slow(torch.nn.Module):\n    def forward(self, x):\n        begun()\n        while True: pass\n"
        "torch.nn.Sequential(Slow())(1)"
    ),
    "an error that is slow to tell": (
        "class Odd(Exception):\n    def __str__(self):\n        while True: pass\nbegun()\ntry: time.sleep(1000)\n"
        "finally: raise Odd"
    ),
    "await": "import asyncio\nbegun()\nawait asyncio.sleep(1000)",
}


@pytest.fixture
def busy_machine() -> Iterator[None]:
    """Start processes that compute."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(LOAD)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@pytest.mark.alone  # its load slows any test beside it
@pytest.mark.timeout(120 + 40 * STOPS)
def test_no_rank_is_lost_by_a_stop_under_load(busy_machine: None, tmp_path: Path) -> None:
    with ddip.Group(RANKS, timeout=300) as group:
        pids = [member.pid for member in group.members]
        everybody = {str(rank) for rank in range(RANKS)}
        group.run(f"""
            import pathlib, time, torch, torch.distributed as dist
            kept = rank
            def begun(): (pathlib.Path({str(tmp_path)!r}) / str(rank)).touch()
        """)
        lost: list[str] = []
        seconds = []
        for number in range(STOPS):
            name = list(BUSINESS)[number % len(BUSINESS)]
            for file in tmp_path.iterdir():
                file.unlink()
            thread = meanwhile(lambda: {file.name for file in tmp_path.iterdir()} == everybody, press_stop)
            began = time.monotonic()
            with pytest.raises(CellInterrupted) as caught:
                group.run(BUSINESS[name])
            seconds.append(time.monotonic() - began)
            thread.join()
            if "did not stop" in str(caught.value) or group.repair():
                lost.append(f"{number} {name}: {caught.value}")
            group.run("""
                assert kept == rank
                y = torch.ones(1)
                dist.all_reduce(y)
                assert y.item() == world_size
            """)
        each = f"{sum(seconds) / STOPS:.1f} s each, {max(seconds):.1f} at most"
        print(f"{STOPS} stops at load {os.getloadavg()[0]:.0f}: {each}")
        assert not lost
        assert [member.pid for member in group.members] == pids
