"""Code that people try in their first hour: torchrun code works, and other code fails with an alternative."""

from __future__ import annotations

import re

import pytest

import ddip

INIT = """
import datetime, torch.distributed as dist
dist.init_process_group({})
dist.barrier()
assert dist.get_world_size() == 2
"""
ACCEPTED = [
    "",
    "'gloo'",
    "backend='cpu:gloo'",
    "'gloo', init_method='env://'",
    "'gloo', 'tcp://127.0.0.1:29500', world_size=world_size, rank=rank",
    "'gloo', timeout=datetime.timedelta(minutes=40)",
]
REFUSED = {
    "'nccl'": r"backend='nccl'\): .*type %makedip -g all",
    "'mpi'": r"backend='mpi'\): .*; type %makedip -b mpi$",
    "'gloo', world_size=4": r"world_size=4\): .*type %makedip -n 4$",
    "'gloo', rank=5, world_size=2": r"rank=5\): .*type rank=rank",
}
ON_RANKS = {
    "%makedip": "^ranks 0, 1: UsageError: %makedip .*notebook.*type ",
    "x = 1\n%dipull x": "UsageError: %dipull .*notebook.*type ",
    "%load_ext ddip": "BadInput: %load_ext ddip: ",
    "import ddip; ddip.Group(2)": "BadInput: ddip.Group: .*notebook",
    "%%dip -S all\nx = 1": "UsageError: %%dip ",
    "x = 1\n%dip -S all": "UsageError: %dip ",
    "breakpoint()": "UsageError: .*%dipstack",
    "import pdb; pdb.set_trace()": "%dipstack",
    "input('name? ')": r"input\(\)",
}


@pytest.mark.parametrize("arguments", ACCEPTED)
def test_usual_requests_for_the_existing_group_return_it(
    cells: ddip.Group, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("import torch.distributed as dist\nbefore = dist.group.WORLD")
    cells.run(INIT.format(arguments))
    assert capsys.readouterr().out.count("ddip has already formed the group; this call") == 1
    cells.run("assert dist.group.WORLD is before")


@pytest.mark.parametrize("arguments", REFUSED)
def test_requests_for_a_different_group_are_refused_with_advice(cells: ddip.Group, arguments: str) -> None:
    cells.run("kept = rank")
    with pytest.raises(ddip.CellError) as caught:
        cells.run(INIT.format(arguments))
    assert re.search(rf"^ranks 0, 1: ValueError: init_process_group\({REFUSED[arguments]}", str(caught.value))
    cells.run("import torch.distributed as dist\nassert kept == rank\ndist.barrier()")


def test_the_group_uses_a_requested_timeout(cells: ddip.Group) -> None:
    cells.run(INIT.format("timeout=datetime.timedelta(seconds=77)"))
    cells.run("from ddip.rank.runtime import c10d\nassert c10d.default_store().timeout.total_seconds() == 77")
    cells.run("dist.init_process_group(timeout=datetime.timedelta(minutes=30))")


def test_a_cell_can_form_a_group_after_destroying_one(cells: ddip.Group) -> None:
    cells.run("import torch.distributed as dist\nbefore = dist.group.WORLD\ndist.destroy_process_group()")
    cells.run("import torch.distributed as dist\ndist.init_process_group('gloo')\nassert dist.get_world_size() == 2")


@pytest.mark.slow
@pytest.mark.parametrize("code", ON_RANKS)
def test_unsupported_requests_on_ranks_name_an_alternative(cells: ddip.Group, code: str) -> None:
    cells.run("kept = rank")
    with pytest.raises(ddip.CellError) as caught:
        cells.run(code)
    assert re.search(ON_RANKS[code], str(caught.value)), str(caught.value)
    cells.run("assert kept == rank")
