"""Ranks that wait in a store, possibly a cell's own: an abort or an interrupt ends the wait."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddip
from ddip.errors import CellInterrupted

from .meanwhile import StderrText, meanwhile, press_stop
from .rank_errors import raises_on_ranks
from .variants import few

FORM = "dist.init_process_group('gloo', init_method={method!r}, rank=rank, world_size=world_size)"
MADE = "store = {store}\nstore.wait(['nobody sets it'])"
WAITS = {
    "init_process_group, of a file": f"dist.destroy_process_group()\n{FORM.format(method='file://{folder}/new')}",
    "init_process_group, of a port": f"dist.destroy_process_group()\n{FORM.format(method='tcp://127.0.0.1:{port}')}",
    "FileStore": MADE.format(store="dist.FileStore('{folder}/store', 2)"),
    "FileStore.get": "dist.FileStore('{folder}/store', 2).get('nobody sets it')",
    "HashStore": MADE.format(store="dist.HashStore()"),
    "TCPStore": MADE.format(store="dist.TCPStore('127.0.0.1', {port}, 2, False)"),
}


@pytest.fixture(autouse=True)
def short_time_limits(group: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group.options, "failure_grace", 0.1)
    monkeypatch.setattr(group.options, "stall_timeout", 1.0)


@pytest.fixture
def folder_and_port(tmp_path: Path) -> Iterator[dict[str, object]]:
    """Return a folder, and a port on which nothing listens."""
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        yield {"folder": tmp_path, "port": reserved.getsockname()[1]}


@pytest.mark.parametrize("wait", few(WAITS, "init_process_group, of a port", "FileStore", "HashStore"))
def test_a_rank_that_waits_in_a_store_is_unblocked(
    cells: ddip.Group, wait: str, folder_and_port: dict[str, object]
) -> None:
    cells.run("import torch.distributed as dist")
    with raises_on_ranks({0: "ValueError"}, {1: ""}):
        cells.run(f"if rank == 0: raise ValueError\n{WAITS[wait].format(**folder_and_port)}", timeout=30)
    cells.run("dist.barrier()")


def test_ranks_waiting_in_a_store_of_a_cell_are_unblocked(cells: ddip.Group, tmp_path: Path) -> None:
    form = FORM.format(method=f"file://{tmp_path}/store")
    cells.run(f"import torch.distributed as dist\ndist.destroy_process_group()\n{form}\nformed = dist.group.WORLD")
    with raises_on_ranks({0: "ValueError"}, {1: "new_group, cell"}):
        cells.run("assert dist.group.WORLD is formed\nif rank == 0: raise ValueError\ndist.new_group()", timeout=30)
    cells.run("dist.barrier()")


def test_an_interrupt_ends_a_wait_in_a_store(cells: ddip.Group) -> None:
    code = "import os, signal, threading, torch.distributed as dist\npid, number = os.getpid(), signal.SIGINT\n"
    with raises_on_ranks(dict.fromkeys((0, 1), "KeyboardInterrupt")):
        cells.run(
            f"{code}threading.Timer(0.1, os.kill, (pid, number)).start()\ndist.HashStore().wait(['x'])", timeout=30
        )


@pytest.mark.grid
def test_a_rank_that_waits_in_a_store_makes_no_progress(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    stderr_text = StderrText(capsys)
    thread = meanwhile(lambda: "the cell keeps waiting" in stderr_text.text(), press_stop)
    with pytest.raises(CellInterrupted):
        cells.run("import torch.distributed as dist\ndist.HashStore().wait(['nobody sets it'])")
    thread.join()
    assert "no rank has made progress for 1 s" in stderr_text.text()


OTHERWISE = """
import torch.distributed as dist
from datetime import timedelta
soon = timedelta(milliseconds=50)

def fails(kind, do, *args, **kwargs):
    try:
        do(*args, **kwargs)
    except kind as error:
        assert "imeout" in str(error) or "timed out" in str(error), error
    else:
        raise AssertionError("it did not fail")

for store in dist.HashStore(), dist.FileStore("{folder}/%d" % rank, 1):
    nested = dist.PrefixStore("a", dist.PrefixStore("b", store))
    nested.set("key", "value")
    assert nested.get("key") == b"value" and nested.wait(["key"]) is None
    fails(RuntimeError, nested.wait, ["missing"], soon)
    nested.set_timeout(soon)
    fails(RuntimeError, nested.get, "missing")
fails(RuntimeError, dist.TCPStore, "127.0.0.1", {port}, 2, timeout=soon)
"""


@pytest.mark.grid
def test_waiting_in_a_store_otherwise_behaves_as_in_torch(
    cells: ddip.Group, folder_and_port: dict[str, object]
) -> None:
    cells.run(OTHERWISE.format(**folder_and_port), timeout=30)
