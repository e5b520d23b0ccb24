"""The environment of every rank before its first cell, and what the group exposes on its host."""

from __future__ import annotations

import json
import os
import re
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import cast

import pytest

import ddip

from .leftovers import controllers_of, files_of, listening_addresses, processes_of, with_title


def values_on_ranks(group: ddip.Group, expression: str) -> list[object]:
    """Return the value of `expression` on every rank."""
    group.run(f"_value = {expression}", show_ranks=[])
    return [found["_value"] for found in group.pull_all(["_value"], range(group.world_size))[0]]


def test_the_ranks_are_in_one_torch_group(cells: ddip.Group) -> None:
    cells.run("""
        import torch, torch.distributed as dist
        x = torch.tensor([rank + 1.0])
        dist.all_reduce(x)
    """)
    assert values_on_ranks(cells, "x.item()") == [3.0, 3.0]
    assert values_on_ranks(cells, "dist.get_backend()") == ["gloo", "gloo"]


def test_every_rank_has_standing_names_and_torchrun_variables(cells: ddip.Group) -> None:
    assert values_on_ranks(cells, "(rank, world_size, str(device))") == [(0, 2, "cpu"), (1, 2, "cpu")]
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR"]
    assert values_on_ranks(cells, f"[__import__('os').environ[name] for name in {names}]") == [
        ["0", "0", "2", "2", "0", "127.0.0.1"],
        ["1", "1", "2", "2", "0", "127.0.0.1"],
    ]
    ports = values_on_ranks(cells, "int(__import__('os').environ['MASTER_PORT'])")
    assert ports[0] == ports[1]


# Variables by which torchrun's agent learns of failures.
AGENTS = {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
OWN = {"TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"}


def torchrun_variables(folder: Path) -> list[dict[str, str]]:
    """Return the variables that torchrun adds to the environment of two processes, by rank."""
    script = folder / "script.py"
    script.write_text(
        "import json, os, sys, torch.distributed as d\n"
        "assert d.is_torchelastic_launched() and not hasattr(sys, 'ps1')\n"
        f"json.dump(dict(os.environ), open(os.path.join({str(folder)!r}, os.environ['RANK']), 'w'))"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    found = [json.loads((folder / str(rank)).read_text()) for rank in range(2)]
    return [{name: value for name, value in each.items() if os.environ.get(name) != value} for each in found]


def variables_on_ranks(group: ddip.Group, names: set[str]) -> list[object]:
    """Return these environment variables on every rank."""
    return values_on_ranks(group, f"{{name: __import__('os').environ.get(name) for name in {sorted(names)}}}")


@pytest.mark.grid
def test_every_rank_has_all_variables_of_torchrun(cells: ddip.Group, tmp_path: Path) -> None:
    theirs = torchrun_variables(tmp_path)
    names = {name for name in theirs[0] if re.search("RANK|WORLD|ROLE|MASTER|ELASTIC", name)} - AGENTS
    assert {"GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT"} <= names
    same = names - OWN
    assert variables_on_ranks(cells, same) == [{name: each[name] for name in same} for each in theirs]
    run, *others = values_on_ranks(cells, "__import__('os').environ['TORCHELASTIC_RUN_ID']")
    assert run and others == [run]
    assert values_on_ranks(cells, "__import__('torch').distributed.is_torchelastic_launched()") == [True, True]


@pytest.mark.grid
def test_a_new_rank_has_the_same_variables_without_prompts() -> None:
    names = {"RANK", "ROLE_RANK", "ROLE_WORLD_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"}
    prompts = "[hasattr(sys, name) for name in ('ps1', 'ps2', 'ps3')] + [sys.flags.interactive]"
    with ddip.Group(2) as group:
        group.run("import sys")
        before = variables_on_ranks(group, names)
        assert values_on_ranks(group, prompts) == [[False, False, False, 0]] * 2
        with pytest.raises(ddip.CellError):
            group.run("import os\nif rank == 1: os._exit(1)")
        assert group.repair() == [1]
        group.run("import sys\n1 + 1")
        assert variables_on_ranks(group, names) == before
        assert values_on_ranks(group, prompts) == [[False, False, False, 0]] * 2
        group.change(ddip.Request(n=3))
        assert [found["ROLE_WORLD_SIZE"] for found in variables_on_ranks(group, names)] == ["3"] * 3  # type: ignore[index]


def test_no_other_process_takes_the_master_port_by_chance(cells: ddip.Group) -> None:
    port = cast(int, values_on_ranks(cells, "int(__import__('os').environ['MASTER_PORT'])")[0])
    for address in ("127.0.0.1", ""):
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((address, port))
    cells.run(f"import torch.distributed as d; store = d.TCPStore('127.0.0.1', {port}, 2, rank == 0); del store")


@pytest.mark.grid
def test_programs_started_by_ranks_can_form_their_own_group(cells: ddip.Group) -> None:
    cells.run("""
        import subprocess, sys
        code = 'import torch.distributed as d; d.init_process_group("gloo"); print(d.get_world_size())'
        size = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip()
    """)
    assert values_on_ranks(cells, "size") == ["2", "2"]


def test_the_cpu_threads_are_shared_out_before_torch_loads(cells: ddip.Group) -> None:
    share = max(1, len(os.sched_getaffinity(0)) // 2)
    assert values_on_ranks(cells, "__import__('torch').get_num_threads()") == [share, share]
    assert values_on_ranks(cells, "__import__('os').environ['OMP_NUM_THREADS']") == [str(share)] * 2
    assert values_on_ranks(cells, "__import__('os').environ['MKL_NUM_THREADS']") == [str(share)] * 2


def test_folder_and_path_equal_the_notebook(cells: ddip.Group) -> None:
    assert values_on_ranks(cells, "__import__('os').getcwd()") == [str(Path.cwd())] * 2
    assert set(sys.path) <= set(values_on_ranks(cells, "__import__('sys').path")[0])  # type: ignore[call-overload]


def test_nothing_listens_beyond_loopback(cells: ddip.Group) -> None:
    addresses = listening_addresses(processes_of(os.getpid()))
    assert addresses == ["127.0.0.1"]


def test_the_files_are_private_to_the_user(cells: ddip.Group) -> None:
    files = [Path(name) for name in files_of(os.getpid())]
    secrets = [path for path in files if path.is_dir() or path.name.endswith(("-client.json", "-engine.json", ".log"))]
    assert len(secrets) == 1 + 2  # the run folder, and two connection files
    logs = list(cells.cluster.run_folder.glob("*.log"))
    assert len(logs) == 1 + 2  # of controller and engines
    for path in [*secrets, *logs]:
        assert not path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO), f"others can read {path}"


def test_each_rank_has_one_engine_and_no_nanny(cells: ddip.Group) -> None:
    engines = with_title(processes_of(os.getpid()), "ddip rank")
    assert sorted(p.pid for p in engines) == sorted(member.pid for member in cells.members)
    others = {p.pid for p in processes_of(os.getpid())} - {p.pid for p in engines}
    (controller,) = controllers_of(os.getpid())
    assert others == {controller.pid, *(child.pid for child in controller.children() if child not in engines)}
    assert len(others) == 2  # the controller, and its heart monitor in a separate process


def test_the_table_shows_every_rank(cells: ddip.Group) -> None:
    cells.run("import time; time.sleep(0.2)")
    infos = cells.info()
    assert [info.rank for info in infos] == [0, 1]
    assert [info.pid for info in infos] == [member.pid for member in cells.members]
    assert {info.device for info in infos} == {"cpu"}
    assert {info.state for info in infos} == {"idle"}
    assert all(info.memory is not None and 50e6 < info.memory < 2e9 for info in infos)
    assert all(info.seconds is not None and 0.2 <= info.seconds < 60 for info in infos)
