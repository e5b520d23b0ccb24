"""Groups with a torch in which private names have other names: what does not need them works."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

import ddip
from ddip.errors import GroupError
from ddip.protocol import compat_torch

RENAME = '''
import importlib.machinery, os, re, sys

NAMES = {names!r}
AT_END = {at_end!r}
PATTERN = re.compile(rb"\\b(" + b"|".join(name.encode() for name in NAMES) + rb")\\b")
read = importlib.machinery.SourceFileLoader.get_data

def get_data(self, path):
    """torch's sources with other names, and none of their bytecode."""
    if "/torch/" not in path:
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
"""Names of C++, or of Python and C++, which keep their names: Python's sources alone cannot rename them."""
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


def rename(paths: Sequence[str], at_end: bytes, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have processes that start from here on find other names in torch's sources."""
    names = sorted({path.rpartition(".")[2] for path in paths} - IN_C) or ["no_name_of_torchs"]
    (folder / "sitecustomize.py").write_text(RENAME.format(names=names, at_end=at_end))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(ddip.__file__).parents[1]}")


@pytest.mark.grid
@pytest.mark.parametrize("feature", compat_torch.FEATURES)
def test_without_a_features_names_the_rest_works(
    feature: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rename(compat_torch.FEATURES[feature], GONE.get(feature, b""), tmp_path, monkeypatch)
    with ddip.Group(2, failure_grace=0.1, spawn=True) as group:
        assert feature in capsys.readouterr().err
        group.run(TRAINS)
        with pytest.raises(ddip.CellError, match="ValueError"):
            group.run("kept = rank\nif rank == 1: raise ValueError\ndist.barrier()")
        group.run(f"{TRAINS}\nassert kept == rank")


@pytest.mark.grid
def test_without_a_name_that_a_group_needs_the_start_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rename(compat_torch.CORE, b"", tmp_path, monkeypatch)
    with pytest.raises(GroupError, match=r"^torch .* has no torch\.distributed\.distributed_c10d\._world, .*install"):
        ddip.Group(2, spawn=True)
