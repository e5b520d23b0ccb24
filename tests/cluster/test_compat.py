"""Groups with libraries whose private names have changed: features that do not need them work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import ddip
from ddip.errors import GroupError
from ddip.protocol import compat_ipyparallel, compat_ipython, compat_torch

from .rank_errors import raises_on_ranks
from .variants import few

RENAME = '''
import importlib.machinery, os, re, sys

NAMES = {names!r}
FOLDERS = {folders!r}
AT_END = {at_end!r}
PATTERN = re.compile(rb"\\b(" + b"|".join(name.encode() for name in NAMES) + rb")\\b")
read = importlib.machinery.SourceFileLoader.get_data

def get_data(self, path):
    """Sources with other names, and none of their bytecode."""
    if not any(folder in path for folder in FOLDERS):
        return read(self, path)
    if path.endswith(".pyc"):
        raise OSError(path)
    return PATTERN.sub(rb"\\1_of_2030", read(self, path)) + AT_END * path.endswith("/torch/distributed/__init__.py")

importlib.machinery.SourceFileLoader.get_data = get_data
sys.dont_write_bytecode = True
'''
IN_C = {
    "_build_debug_param_to_name_mapping",
    "_device_types",
    "_get_backend",
    "_get_ddp_logging_data",
    "_get_sequence_nr",
    "_get_sequence_number_for_group",
    "_is_current_rpc_agent_set",
    "_register_builtin_comm_hook",
    "_remove_autograd_hooks",
    "_set_static_graph",
    "_unregister_all_process_groups",
}
"""Names defined in C++, which keep their names: rewriting Python sources cannot rename them."""
GONE = {compat_torch.COUNTS: b"\ndel torch._C._distributed_c10d.Backend._get_sequence_number_for_group\n"}
TRAINS = """
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
x = torch.ones(2) * (rank + 1)
dist.all_reduce(x)
assert x.tolist() == [3.0, 3.0]
net = DDP(torch.nn.Linear(2, 1))
net(x).sum().backward()
"""


def rename_in_sources(
    paths: Sequence[str],
    at_end: bytes,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    packages: Sequence[str] = ("torch",),
) -> None:
    """Make processes that start from now on see other names in the sources of these packages."""
    names = sorted({path.rpartition(".")[2] for path in paths} - IN_C) or ["no_name_of_torchs"]
    folders = [f"/{package}/" for package in packages]
    (folder / "sitecustomize.py").write_text(RENAME.format(names=names, at_end=at_end, folders=folders))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(ddip.__file__).parents[1]}")


@pytest.mark.grid
@pytest.mark.parametrize("feature", compat_torch.FEATURES)
def test_missing_names_turn_off_only_their_feature(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rename_in_sources(compat_torch.FEATURES[feature], GONE.get(feature, b""), tmp_path, monkeypatch)
    with ddip.Group(2, failure_grace=0.1, spawn=True) as group:
        assert feature in capsys.readouterr().err
        group.run(TRAINS)
        with pytest.raises(ddip.CellError, match="ValueError"):
            group.run("kept = rank\nif rank == 1: raise ValueError\ndist.barrier()")
        group.run(f"{TRAINS}\nassert kept == rank")


@pytest.mark.grid
def test_a_start_reports_missing_names_that_groups_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename_in_sources(compat_torch.CORE, b"", tmp_path, monkeypatch)
    with pytest.raises(GroupError, match="distributed_c10d._world,.*install"):
        ddip.Group(2, spawn=True)


FOR_CELLS = ("ipyparallel", "ipykernel", "IPython")
OF_RANKS = {**compat_ipython.RANK_KERNEL.features, **compat_ipython.RANK_SHELL.features}
CELLS = """
import asyncio
print("seen by rank", rank)
await asyncio.sleep(0)
dist.barrier()
"""


@pytest.mark.grid
@pytest.mark.parametrize("feature", OF_RANKS)
def test_missing_ipython_names_turn_off_only_their_feature(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rename_in_sources(OF_RANKS[feature], b"", tmp_path, monkeypatch, FOR_CELLS)
    with ddip.Group(2, failure_grace=0.1, spawn=True) as group:
        assert feature in capsys.readouterr().err
        group.run(TRAINS)
        group.run(CELLS)
        assert "seen by rank 0" in capsys.readouterr().out
        with raises_on_ranks({1: "ValueError"}, {0: "barrier"}):
            group.run("kept = rank\nif rank == 1: raise ValueError('on purpose')\ndist.barrier()")
        group.run(f"{TRAINS}\nassert kept == rank")


OF_PROCESSES = (
    "ipykernel.iostream.OutStream._schedule_flush",
    "ipyparallel.engine.app.IPEngine.complete_registration",
    "ipyparallel.controller.app.IPController.next_port",
)


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("name", few(OF_PROCESSES, OF_PROCESSES[0]))
def test_a_start_reports_missing_names_that_a_process_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename_in_sources([name], b"", tmp_path, monkeypatch, FOR_CELLS)
    library = name.partition(".")[0]
    with pytest.raises(GroupError, match=rf"{name}.*install {library} \d"):
        ddip.Group(2, spawn=True)


IN_NOTEBOOK = """
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.run_line_magic("load_ext", "ddip")
shell.run_line_magic("makedip", "-n 2")
shell.run_cell_magic("dip", "", "import torch; x = torch.ones(1); torch.distributed.all_reduce(x); print(x)")
shell.run_line_magic("makedip", "-k")
"""


@pytest.mark.grid(in_ci=True)
def test_missing_names_in_the_notebook_turn_off_only_their_feature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = {**compat_ipython.NOTEBOOK.features, **compat_ipyparallel.NOTEBOOK.features}
    rename_in_sources([name for names in features.values() for name in names], b"", tmp_path, monkeypatch, FOR_CELLS)
    done = subprocess.run([sys.executable, "-c", IN_NOTEBOOK], capture_output=True, text=True)
    assert done.returncode == 0 and "tensor([2.])" in done.stdout, done
    lines = [line for line in done.stderr.splitlines() if " lacks private names that ddip uses; " in line]
    lines = [line for line in lines if compat_ipython.MODULES not in line]  # IPython 7 lacks them on Python 3.12
    assert len(lines) == 2 and [feature for feature in features if feature not in "".join(lines)] == []


@pytest.mark.grid
def test_missing_names_in_fastai_refuse_only_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fastai")
    rename_in_sources(["fastai.text.core._tokenize_files"], b"", tmp_path, monkeypatch, ["fastai"])
    with ddip.Group(2, spawn=True, timeout=120) as group:
        with pytest.raises(GroupError, match="ImportError: .*_tokenize_files.*install fastai"):
            group.change(ddip.Request(app="fastai"))
        group.run(TRAINS)
