"""``%dipwatch``: vitals of real ranks, and the view below a cell of a real notebook."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ddip
from ddip.group.watching import vitals
from ddip.group.watching.vitals import Sampler
from ddip.output.tables.vitals_table import RankVitals, find_stragglers

from .leftovers import wait_until
from .meanwhile import meanwhile, suspended
from .notebook import Messages, Notebook, Shown

TRAIN = """
import time, torch
import torch.distributed as dist
from pathlib import Path
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

model = DDP(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
bar = tqdm(total=10_000)
enough = torch.zeros(())
while not enough:
    if rank == 1: time.sleep(0.03)
    optimizer.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    optimizer.step()
    bar.update()
    enough = torch.tensor(float(Path({path!r}).exists()))
    dist.broadcast(enough, 0)
bar.close()
"""
"""Rank 1 is slow. The cell ends when a file exists."""


def sampled(group: ddip.Group, condition: Callable[[list[RankVitals]], object]) -> Callable[[], bool]:
    """Return a condition that samples the ranks; its attribute ``seen`` holds the last sample."""
    sampler = Sampler(group.lifecycle)

    def sample() -> bool:
        time.sleep(0.1)  # ranks need only answer
        sample.seen = sampler.look()  # type: ignore[attr-defined]
        return bool(condition(sample.seen))  # type: ignore[attr-defined]

    return sample


def second_is_the_straggler(ranks: list[RankVitals]) -> bool:
    """Return True if rank 1 is clearly the straggler and both train, which the first sample may not show."""
    first, second = (rank.waited for rank in ranks)
    steps = [rank.steps_per_second or 0.0 for rank in ranks]
    is_clear = first is not None and second is not None and second < 0.3 < 0.5 < first
    return find_stragglers(ranks) == [1] and is_clear and min(steps) > 3


def test_rates_and_waits_of_ranks_that_train_name_the_straggler(cells: ddip.Group, tmp_path: Path) -> None:
    enough = tmp_path / "enough"
    condition = sampled(cells, second_is_the_straggler)
    thread = meanwhile(condition, enough.touch)
    cells.run(TRAIN.format(path=str(enough)), show_ranks=[])
    thread.join()
    first, second = condition.seen  # type: ignore[attr-defined]
    assert first.state == second.state == "busy" and first.cell == second.cell is not None
    assert first.steps_per_second < 33 and second.steps_per_second < 33
    assert first.collectives_per_second > first.steps_per_second
    ((done, total),) = first.bars
    assert total == 10_000 and 0 < done <= first.steps
    assert first.cores is not None and first.memory > 50_000_000 and first.place.cell == first.cell
    wait_until(lambda: [one.state for one in cells.vitals()] == ["idle", "idle"])


IMPORTS = "import torch, torch.distributed as dist\nfrom torch.distributed._functional_collectives import all_reduce"
SLEEPS = """
import time
from pathlib import Path

while rank and not Path({path!r}).exists():
    time.sleep(0.05)
"""
MEET = """%%dip -q
import time, torch.distributed as dist
from pathlib import Path
from tqdm import tqdm

bar, enough = tqdm(total=10_000), [False]
while not enough[0]:
    if rank == 1: time.sleep(0.03)
    bar.update()
    enough = [Path("enough").exists()]
    dist.broadcast_object_list(enough, 0)
bar.close()
"""
BLOCKED = {
    "a call": "dist.barrier()",
    "a wait": "work = dist.all_reduce(torch.ones(3), async_op=True); work.wait()",
    "a receive": "dist.send(torch.ones(3), 0) if rank else dist.recv(torch.ones(3), 1)",
    "an object": "dist.all_gather_object([None, None], rank)",
    "a functional collective": "all_reduce(torch.ones(3), 'sum', group=dist.group.WORLD).sum()",
}


@pytest.mark.grid
@pytest.mark.parametrize("how", BLOCKED)
def test_every_kind_of_wait_except_sleep_is_shown(cells: ddip.Group, how: str, tmp_path: Path) -> None:
    cells.run(IMPORTS)  # an import takes half a second of the first cell, and is not a wait
    record_file = tmp_path / "told"
    condition = sampled(cells, first_waits_for_second)
    thread = meanwhile(condition, record_file.touch)
    cells.run(f"{SLEEPS.format(path=str(record_file))}\n{BLOCKED[how]}", timeout=60)
    thread.join()
    assert first_waits_for_second(condition.seen)  # type: ignore[attr-defined]


def first_waits_for_second(ranks: list[RankVitals]) -> bool:
    """Return True if rank 0 waits and rank 1 does not."""
    first, second = (rank.waited for rank in ranks)
    return first is not None and second is not None and second < 0.2 < 0.6 < first


def test_a_suspended_rank_is_shown_until_it_continues(cells: ddip.Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "LATE_SECONDS", 0.2)
    pid = cells.members[1].pid
    sampler = Sampler(cells.lifecycle)
    wait_until(lambda: [one.state for one in sampler.look()] == ["idle", "idle"])
    with suspended([pid]):
        wait_until(lambda: [one.state for one in sampler.look()] == ["idle", "stopped"])
        assert sampler.look()[1].doing == f"stopped (SIGSTOP); kill -CONT {pid} continues it"
    wait_until(lambda: [one.state for one in sampler.look()] == ["idle", "idle"])


def view_changes(messages: Messages) -> list[tuple[str, str, str]]:
    """Return kind, ID and text of each change of a view."""
    return [
        (kind, content["transient"]["display_id"], content["data"]["text/plain"])
        for kind, content in messages
        if kind.endswith("display_data") and content["transient"].get("display_id")
    ]


def watch_threads(notebook: Notebook) -> str:
    """Return the names of the kernel's watch threads."""
    return notebook.ok(
        "import threading; print([t.name for t in threading.enumerate() if t.name == 'ddip-watch'])"
    ).stdout


def view_id(notebook: Notebook, shown: Shown) -> str:
    """Return the ID of the view that a cell has shown."""
    ((kind, name, text),) = view_changes(shown.messages)
    assert kind == "display_data" and text.startswith("rank  state")
    return name


def test_the_view_updates_during_cells_and_ends_in_one_line(notebook: Notebook) -> None:
    began = time.monotonic()
    name = view_id(notebook, notebook.ok("%dipwatch"))
    assert time.monotonic() < began + 2
    enough = notebook.folder / "enough"
    enough.unlink(missing_ok=True)
    running = notebook.begin(MEET)
    shown = notebook.finish(running, until="rank 1 is the straggler")
    changes = view_changes(shown.messages)
    assert {(kind, view_name) for kind, view_name, _ in changes} == {("update_display_data", name)}
    assert "collectives/s" in changes[-1][2] and "/10000" in changes[-1][2]
    enough.touch()
    notebook.finish(running)
    enough.unlink()
    moved = notebook.ok("%dipwatch")
    (_, old, text), (kind, new, _) = view_changes(moved.messages)
    assert (old, kind) == (name, "display_data") and new != name
    assert text == f"ddip: %dipwatch has ended: it moved below cell [{moved.number}]"
    assert watch_threads(notebook) == "['ddip-watch']\n"
    ended = notebook.ok("%dipwatch off")
    assert view_changes(ended.messages) == [
        ("update_display_data", new, "ddip: %dipwatch has ended: it was turned off")
    ]
    assert watch_threads(notebook) == "[]\n"
    assert notebook.ok("%dipwatch off").stdout == "ddip: there is no view to end\n"


@pytest.mark.grid
def test_the_view_shows_a_killed_rank_and_survives_repair(notebook: Notebook) -> None:
    view_id(notebook, notebook.ok("%dipwatch"))
    pid = int(notebook.ok("%%dip -r 2\nimport os; print(os.getpid())").stdout)
    sleep = "print('sleeps'); import time; time.sleep(1000)"  # a cell in the notebook
    running = notebook.begin(sleep)
    notebook.finish(running, until="sleeps")  # an interrupt before the cell's code is lost
    os.kill(pid, signal.SIGKILL)
    notebook.finish(running, until="2  ended")
    notebook.interrupt()
    notebook.finish(running)
    notebook.ok("%makedip --repair")
    running = notebook.begin(sleep)
    if "2  idle" not in notebook.finish(running, until="sleeps").text:
        notebook.finish(running, until="2  idle")
    notebook.interrupt()
    notebook.finish(running)
    notebook.ok("%dipwatch off")


def test_watching_once_prints_text(notebook: Notebook) -> None:
    shown = notebook.ok("%dipwatch --once")
    assert shown.messages == [("stream", {"name": "stdout", "text": shown.stdout})]
    assert [line.split()[:2] for line in shown.stdout.splitlines()] == [
        ["rank", "state"],
        ["0", "idle"],
        ["1", "idle"],
        ["2", "idle"],
    ]
    assert watch_threads(notebook) == "[]\n"


CALLBACKS = "print({name: len(get_ipython().events.callbacks[name]) for name in ('pre_run_cell', 'post_run_cell')})"


@pytest.mark.grid
def test_the_view_ends_with_its_group(bare_notebook: Notebook) -> None:
    before = bare_notebook.ok(CALLBACKS).stdout
    bare_notebook.ok("%makedip -n 1")
    name = view_id(bare_notebook, bare_notebook.ok("%dipwatch"))
    bare_notebook.ok("%makedip -r")
    assert watch_threads(bare_notebook) == "['ddip-watch']\n"
    shown = bare_notebook.ok("%makedip -k")
    text = "ddip: %dipwatch has ended: its group has ended"
    assert view_changes(shown.messages)[-1] == ("update_display_data", name, text)
    assert watch_threads(bare_notebook) == "[]\n"
    assert bare_notebook.ok(CALLBACKS).stdout == before


@pytest.mark.grid
@pytest.mark.parametrize("how", ["%unload_ext ddip", "restart", "kill"])
def test_the_view_leaves_nothing_behind(new_notebook: Callable[[], Notebook], how: str) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 2")
    notebook.ok("%dipwatch")
    if how == "kill":
        notebook.kill()
        return
    if how == "restart":
        notebook.restart()
    else:
        text = view_changes(notebook.ok(how).messages)[-1][2]
        assert text == "ddip: %dipwatch has ended: ddip was unloaded, or the kernel has ended"
    assert watch_threads(notebook) == "[]\n"
