"""Bytes that are not UTF-8, in everything that other processes read from a rank."""

from __future__ import annotations

import pytest

import ddip

from .leftovers import wait_until
from .rank_errors import raises_on_ranks
from .ten_steps import TEN_STEPS

DIES = """
import os, signal, torch.distributed as dist
if rank == 1:
    os.write(2, b"\\xff\\xfe last words\\n")
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""
ODD = {
    "descriptors 1 and 2": "for number in 1, 2: os.write(number, b'one \\xff\\xfe line\\n' + bytes(range(256)))",
    "the names of the process and its threads": "open('/proc/self/comm', 'wb').write(b'\\xff) (\\xfe')",
    "a child's name": (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', "
        "\"open('/proc/self/comm', 'wb').write(b'\\xff)'); print(flush=True); input()\"],"
        " stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "child.stdout.readline()"
    ),
}


@pytest.mark.grid(in_ci=True)
def test_odd_bytes_hide_neither_a_death_nor_its_figures(cells: ddip.Group) -> None:
    """Use all kinds at once: each must pass, and every death costs a second."""
    cells.options.failure_grace = 0.1
    cells.run(TEN_STEPS)
    cells.run("result = train()")
    undisturbed = cells.pull(["result"])
    cells.run("import os\nif rank == 1:\n    " + "\n".join(ODD.values()).replace("\n", "\n    "))
    wait_until(lambda: [vitals.state for vitals in cells.vitals()] == ["idle", "idle"])
    with raises_on_ranks({1: "RankEnded"}, {0: "barrier"}) as caught:
        cells.run(DIES, timeout=30)
    assert "SIGKILL" in caught.value.by_rank[1].message
    cells.repair()
    cells.run(TEN_STEPS)
    cells.run("result = train()")
    assert cells.pull(["result"]) == undisturbed
