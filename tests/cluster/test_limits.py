"""Low system limits (``ulimit``): a start reports them at once, and a rank that reaches them still answers."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
import time

import psutil
import pytest

import ddip
from ddip.cluster.limits import A_PEERS_FILES, A_RANKS_FILES, CONTROLLER_FILES, RANK_FILES
from ddip.cluster.processes import ownership
from ddip.errors import CellError, GroupError

from .rank_errors import raises_on_ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems count and limit otherwise")
OPEN_ALL = """
kept = []
if rank == 1:
    while True:
        try: kept.append(open("/dev/null"))
        except OSError: break
"""


def start_with_limit(limit: str, code: str = "") -> str:
    """Return the output of a script that sets a `limit` and starts two ranks."""
    script = (
        "import resource, ddip, ddip.group.group\n"
        f"resource.setrlimit({limit})\n"
        "try:\n"
        "    with ddip.Group(2) as group:\n"
        "        group.run('import resource, torch.distributed as dist; dist.barrier()')\n"
        f"        {code or 'pass'}\n"
        "except Exception as error: print(type(error).__name__, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.grid
def test_a_start_with_too_few_descriptors_says_so_at_once() -> None:
    began = time.monotonic()
    output = start_with_limit("resource.RLIMIT_NOFILE, (128, 128)")
    assert output.startswith("GroupError 2 ranks: the controller opens up to") and "ulimit -n" in output
    assert time.monotonic() - began < 20


@pytest.mark.grid
def test_a_group_needs_no_more_descriptors_than_it_says() -> None:
    """The controller raises its limit to the hard limit; the ranks keep the notebook's limit."""
    soft, hard = RANK_FILES + 2 * A_PEERS_FILES, CONTROLLER_FILES + 2 * A_RANKS_FILES
    code = (
        "limit = resource.RLIMIT_NOFILE; group.run('found = resource.getrlimit(resource.RLIMIT_NOFILE)'); "
        "print(group.pull(['found'])['found'], resource.prlimit(group.cluster._ipp.controller.pid, limit))"
    )
    assert start_with_limit(f"resource.RLIMIT_NOFILE, ({soft}, {hard})", code) == f"{(soft, hard)} {(hard, hard)}"


@pytest.mark.grid
def test_a_start_with_too_little_memory_names_the_limit() -> None:
    output = start_with_limit("resource.RLIMIT_AS, (2_500_000_000,) * 2")
    assert output.startswith("GroupError an engine ended while it started (exit code 1)")
    assert re.search(r"ImportError: \S+: failed to map|MemoryError", output)
    assert output.endswith("a process may have 2.5 GB of address space (ulimit -v), which may be too little")


@pytest.mark.grid
def test_a_rank_without_free_descriptors_runs_cells_and_joins_groups(cells: ddip.Group) -> None:
    cells.run("import resource\nlimit = resource.getrlimit(resource.RLIMIT_NOFILE)")
    cells.run("resource.setrlimit(resource.RLIMIT_NOFILE, (256, limit[1]))")
    try:
        cells.run(OPEN_ALL)
        assert {info.state for info in cells.info()} == {"idle"}
        cells.run("""
            import torch.distributed as dist
            made = dist.new_group([0, 1])
            dist.barrier(made)
        """)
        with raises_on_ranks({1: "OSError"}):
            cells.run("open('/dev/null').close()")
        with pytest.raises(CellError, match="rank 0: ValueError"):  # now all rebuild the group
            cells.run("if rank == 0: raise ValueError\ndist.barrier()")
        cells.run("dist.barrier()\nassert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 256")
    finally:
        cells.run("kept = None\nresource.setrlimit(resource.RLIMIT_NOFILE, limit)")


@pytest.mark.grid
def test_a_rank_without_descriptors_for_a_group_says_so() -> None:
    with ddip.Group(2) as group:
        group.run("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))")
        group.run(OPEN_ALL)
        with pytest.raises(CellError, match=r"^rank 1: OSError: .*2\d\d of 256"):
            group.run("import torch.distributed as dist\ndist.new_group([0, 1])")
        with pytest.raises(GroupError, match=r"rank 1: OSError: .*2\d\d of 256"):
            group.run("pass")


@pytest.mark.grid
def test_an_internal_step_that_fails_on_a_rank_is_answered(cells: ddip.Group) -> None:
    """A failure in ddip's own housekeeping must not leave the notebook waiting."""
    cells.run("import ddip.rank.runtime.housekeeping as steps\nif rank == 1: steps.cells.threads = 'many'")
    with pytest.raises(CellError, match="rank 1: "):
        cells.run("pass")
    cells.run("import torch.distributed as dist\ndist.barrier()")
    assert {info.state for info in cells.info()} == {"idle"}


@pytest.mark.grid
def test_a_group_on_a_full_disk_says_so_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full for the record of the group's processes, which changes with each start of a rank."""

    def write_nowhere(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with ddip.Group(1) as group:
        processes = [group.members[0].pid, group.cluster._ipp.controller.pid]  # type: ignore[attr-defined]
        with monkeypatch.context() as full:
            full.setattr(ownership.Record, "write", write_nowhere)
            with pytest.raises(GroupError, match="no space is left in .*; free some there"):
                group.change(ddip.Request(n=2))
            group.shutdown()
    assert not any(map(psutil.pid_exists, processes))
