"""The stop button ends every wait for another rank that torch can end, and the group continues."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import ddip
from ddip.errors import CellInterrupted

from .meanwhile import meanwhile, press_stop
from .ten_steps import TEN_STEPS
from .variants import few

FORM = "dist.init_process_group('gloo', init_method={method!r}, rank=rank, world_size=world_size)"
STORE = "store = dist.TCPStore('127.0.0.1', {port}, 2, rank == 0)\n"
ONE = "if rank == {rank}: {wait}\nforever()"
AGREED = """
from ddip.rank.process_group import setup
own = setup._fence_after
if rank == {rank}: setup._fence_after = lambda *_: forever()
dist.destroy_process_group()
try: {form}
finally: setup._fence_after = own
"""
RPC = """
import torch.distributed.rpc as rpc
from torch.distributed.rpc import api, backend_registry
own = getattr({module}, {name!r})
if rank == {rank}: setattr({module}, {name!r}, lambda *_, **__: forever())
try: rpc.init_rpc(f"worker{{rank}}", rank=rank, world_size=2)
finally: setattr({module}, {name!r}, own)
"""
RPC_ALONE = """
dist.destroy_process_group()
import torch.distributed.rpc as rpc
options = rpc.TensorPipeRpcBackendOptions(init_method={method!r})
if rank == 0: rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
forever()
"""
FILE, PORT = "file://{folder}/store", "tcp://127.0.0.1:{port}"
WAITS = {
    "a group of one's own": "dist.destroy_process_group()\n" + ONE.format(rank=0, wait=FORM.format(method=PORT)),
    "a group, through a file, that the other began": AGREED.format(rank=1, form=FORM.format(method=FILE)),
    "a group, at a port, that the other began": AGREED.format(rank=1, form=FORM.format(method=PORT)),
    "a port that rank 0 does not serve": ONE.format(rank=1, wait="dist.TCPStore('127.0.0.1', {port}, 2, False)"),
    "get from the server": STORE + ONE.format(rank=1, wait="store.get('x')"),
    "get from one's own server": STORE + ONE.format(rank=0, wait="store.get('x')"),
    "queue_pop from the server": STORE + ONE.format(rank=1, wait="store.queue_pop('x')"),
    "multi_get from a file": ONE.format(rank=1, wait="dist.FileStore('{folder}/s', 2).multi_get(['x', 'y'])"),
    "barrier in a file": ONE.format(rank=1, wait="dist.FileStore('{folder}/s', 2).barrier('x', 2)"),
    "queue_pop from a HashStore": ONE.format(rank=1, wait="dist.HashStore().queue_pop('x')"),
    "monitored_barrier": ONE.format(rank=0, wait="dist.monitored_barrier()"),
}
IN_TCP_STORE = [
    "a group of one's own",
    "a group, at a port, that the other began",
    "get from the server",
    "get from one's own server",
    "queue_pop from the server",
    "monitored_barrier",
]
"""Waits on a connection, which end only if ddip shuts it down."""
IN_RPC = {
    "RPC, through a file": RPC_ALONE.format(method=FILE),
    "RPC, before its group": RPC.format(module="backend_registry", name="_init_process_group", rank=1),
    "RPC, in its group": RPC.format(
        module="backend_registry", name="_tensorpipe_exchange_and_check_all_device_maps", rank=1
    ),
}
TRAIN = f"{TEN_STEPS}\nimport time\ndef forever(): time.sleep(1e6)\nundisturbed = train()"


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def ranks(cells: ddip.Group) -> ddip.Group:
    cells.run(TRAIN)
    return cells


class RanksStandStill:
    """A condition: both ranks are in a cell, at the same place as a moment ago."""

    def __init__(self, group: ddip.Group) -> None:
        self._group = group
        self._places: list[str] = []

    def __call__(self) -> bool:
        time.sleep(0.05)
        if [info.state for info in self._group.info()] != ["busy", "busy"]:
            return False
        stacks = self._group.stacks().values()
        former, self._places = self._places, [str(stack and stack.place) for stack in stacks]
        return self._places == former


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize(
    "wait",
    [
        *few(
            [wait for wait in WAITS if wait not in IN_TCP_STORE],
            "a group, through a file, that the other began",
            "barrier in a file",
            "queue_pop from a HashStore",
        ),
        *(pytest.param(wait, marks=[pytest.mark.grid, pytest.mark.native("sockets")]) for wait in IN_TCP_STORE),
    ],
)
def test_the_stop_button_ends_a_wait_for_another_rank(ranks: ddip.Group, wait: str, tmp_path: Path) -> None:
    method = wait.split()[0]
    if method in ("barrier", "queue_pop") and not hasattr(dist.Store, method):
        pytest.skip(f"this torch has no Store.{method}")
    stop_in(ranks, WAITS[wait], tmp_path)


@pytest.mark.parametrize(
    "wait",
    [
        *few([wait for wait in IN_RPC if wait != "RPC, before its group"]),
        pytest.param("RPC, before its group", marks=[pytest.mark.grid, pytest.mark.native("sockets")]),
    ],
)
def test_the_stop_button_ends_rpc_waits_for_another_rank(wait: str, tmp_path: Path) -> None:
    """Use separate ranks: RPC cannot begin again in the same processes."""
    with ddip.Group(2) as ranks:
        ranks.run(TRAIN)
        stop_in(ranks, IN_RPC[wait], tmp_path)


def stop_in(ranks: ddip.Group, code: str, folder: Path) -> None:
    """Press stop while both ranks wait in `code`, and prove that training continues."""
    stopped = meanwhile(RanksStandStill(ranks), press_stop)
    with pytest.raises(CellInterrupted, match="ranks? [01, ]+$"):
        ranks.run(code.replace("{folder}", str(folder)).replace("{port}", str(free_port())))
    stopped.join()
    ranks.run("assert train() == undisturbed", timeout=30)
    leftovers = [path.name for path in folder.iterdir() if path.is_symlink() or "ddip" in path.name]
    assert leftovers == []


@pytest.mark.grid
def test_a_rank_that_cannot_stop_suggests_the_repair() -> None:
    """torch creates RPC's agent without letting other threads of the rank run; the other rank never joins."""
    code = RPC.format(module="rpc", name="TensorPipeAgent", rank=1)
    with ddip.Group(2) as ranks:
        ranks.run(TRAIN)
        stopped = meanwhile(lambda: ranks.ranks.find_unstoppable([0, 1]) == [0], press_stop)
        with pytest.raises(CellInterrupted, match="(?s)rank 0: _tensorpipe.*--repair"):
            ranks.run(code)
        stopped.join()
        ranks.repair()
        ranks.run(TRAIN, timeout=30)
