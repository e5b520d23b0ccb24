"""Profiled cells, and the collective that each rank is in."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

import ddip
from ddip.output.tables.profile_report import PARTS, Profile
from ddip.protocol.location import StackLocation
from ddip.rank.process_group import flight_recorder

from .meanwhile import meanwhile, press_stop
from .notebook import Notebook
from .rank_errors import raises_on_ranks

SETUP = """
import os, time, torch, torch.distributed as dist
class Items(torch.utils.data.Dataset):
    slow = -1
    def __len__(self): return 16
    def __getitem__(self, i):
        if rank == self.slow: time.sleep(0.02)
        return torch.ones(8)
net = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 1))
opt = torch.optim.SGD(net.parameters(), 0.1)
def train(sleeper=-1):
    for x in torch.utils.data.DataLoader(Items(), batch_size=4):
        if rank == sleeper: time.sleep(0.25)
        net(x).sum().backward(); opt.step(); opt.zero_grad()
train()
"""


def last_profile(cells: ddip.Group, ranks: tuple[int, ...] = (0, 1)) -> Profile:
    """Return the last profile; the parts of each rank's time must add up."""
    profile = cells.last_profile
    assert profile is not None and tuple(profile.ranks) == ranks
    for each in profile.ranks.values():
        assert sum(getattr(each, part) for part in PARTS) == pytest.approx(each.seconds, rel=0.05)
    return profile


def traces_in(folder: Path) -> dict[str, Any]:
    """Return all files of a folder, which must be JSON."""
    return {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in folder.iterdir()}


@pytest.mark.slow
def test_a_sleeping_rank_is_named_and_every_rank_has_traces(
    cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run(SETUP)
    capsys.readouterr()
    cells.run("train(sleeper=1)", profile=str(tmp_path / "out"))
    profile = last_profile(cells)
    assert profile.slowest_rank == 1 and profile.ranks[0].waiting > 0.3 and profile.ranks[1].idle > 0.3
    assert profile.ranks[1].waiting < 0.1
    slowest = profile.slowest_collective
    assert slowest is not None and slowest.waiting > 0.05 and slowest.last == 1 and slowest.group == "the default group"
    if flight_recorder.is_available():
        assert ("all_reduce", ((9,),), "float32") in {
            (each.op, each.shapes, each.dtype) for each in profile.collectives
        }
    shown = capsys.readouterr()
    slowest_text = r"slowest: rank 1; rank 0 waited \d\.\d+ s for it, while it was idle, \d\.\d+ s more than rank 0"
    assert re.search(slowest_text, shown.out), shown.out
    assert re.search(r"slowest collective: number \d+ of the default group, ", shown.out)
    assert "USDT" not in shown.out + shown.err and "ERROR" not in shown.err
    files = traces_in(tmp_path / "out")
    merged = files.pop("all_ranks.perfetto-trace")
    assert set(files) == {f"rank_{rank}.pt.trace.json.gz" for rank in (0, 1)}
    for rank in (0, 1):  # Holistic Trace Analysis and TensorBoard identify a rank by these
        trace = files[f"rank_{rank}.pt.trace.json.gz"]
        info = trace["distributedInfo"]
        assert (info["rank"], info["world_size"], info["backend"]) == (rank, 2, "gloo")
        text = gzip.decompress((tmp_path / "out" / f"rank_{rank}.pt.trace.json.gz").read_bytes()).decode()
        assert re.search(r'"rank":\s+' + str(rank), text)
        names = [event["name"] for event in trace["traceEvents"]]
        assert {"aten::addmm", "c10d::allreduce_", "gloo:all_reduce"} <= set(names)
    rank_names = {
        event["pid"]: event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"
    }
    assert rank_names == {1: "rank 0", 2: "rank 1"}
    work = [event for event in merged["traceEvents"] if event["name"] == "gloo:all_reduce"]
    ends = [sorted(event["ts"] + event["dur"] for event in work if event["pid"] == pid) for pid in rank_names]
    apart = [abs(one - other) for one, other in zip(*ends, strict=True)]  # all, if a rank's clock is wrong
    assert min(apart) < 50_000  # microseconds: an all_reduce ends on both ranks together, unless one waits for a core


@pytest.mark.grid(in_ci=True)
def test_a_slow_loader_is_named(cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run(SETUP)
    cells.run("Items.slow = 0; train()", profile=str(tmp_path))
    profile = last_profile(cells)
    assert profile.slowest_rank == 0 and profile.ranks[0].loading > 0.25 and profile.ranks[1].loading < 0.1
    assert "slowest: rank 0; rank 1 waited" in capsys.readouterr().out
    cells.run("t = time.thread_time()\nwhile time.thread_time() < t + 0.2: pass", profile=str(tmp_path))
    profile = last_profile(cells)  # replaces the former profile
    assert all(each.python > 0.15 for each in profile.ranks.values()) and len(list(tmp_path.iterdir())) == 3


@pytest.mark.grid
@pytest.mark.native("sockets")
def test_a_failed_or_stopped_cell_is_also_profiled(cells: ddip.Group, tmp_path: Path) -> None:
    cells.run("import time, torch, torch.distributed as dist")
    with raises_on_ranks({0: "ZeroDivisionError"}, {1: "barrier"}):
        cells.run("1 / rank\ndist.barrier()", profile=str(tmp_path / "failed"))
    assert last_profile(cells).slowest_rank == 0
    stopped = meanwhile(lambda: all(on and on.place.line == 2 for on in cells.stacks().values()), press_stop)
    with pytest.raises(ddip.CellInterrupted):
        cells.run("time.sleep(0.3)\ntime.sleep(30)", profile=str(tmp_path / "stopped"))
    stopped.join()
    assert all(0.1 < each.idle < 10 for each in last_profile(cells).ranks.values())
    for folder in ("failed", "stopped"):
        assert len(traces_in(tmp_path / folder)) == 3
    cells.run("pass")
    assert last_profile(cells).ranks[0].idle > 0.1  # still the last profiled cell


@pytest.mark.grid
def test_an_ended_rank_has_no_profile(cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ddip.CellError, match="RankEnded"):
        cells.run(
            "import os, torch.distributed as dist\nif rank: os._exit(3)\ndist.barrier()", profile=str(tmp_path / "out")
        )
    assert last_profile(cells, (0,)).missing == {1: "its process has ended"}
    assert "rank 1: no profile: its process has ended" in capsys.readouterr().out
    assert set(traces_in(tmp_path / "out")) == {"rank_0.pt.trace.json.gz", "all_ranks.perfetto-trace"}
    cells.repair()


def test_a_profiler_of_the_cells_own_has_precedence(
    cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run(
        """
        import torch
        x = torch.ones(8) + 1
        if rank == 1:
            with torch.profiler.profile() as mine: torch.ones(8) * 2
            assert any(event.name == "aten::mul" for event in mine.events())
        """,
        profile=str(tmp_path),
    )
    last_profile(cells)
    out = capsys.readouterr().out
    assert re.search(r"rank 1: recorded only the first .*: a profiler that the cell has started", out)
    cells.run("left_on = torch.profiler.profile(); left_on.start()", ranks=[0])
    try:
        cells.run("pass", profile=str(tmp_path))
        assert last_profile(cells, (1,)).missing == {0: "a profiler of an earlier cell is still on"}
    finally:
        cells.run("left_on.stop()", ranks=[0])


def test_a_profiler_in_a_thread_stops_only_the_recording(cells: ddip.Group, tmp_path: Path) -> None:
    """Writing the rest of ddip's recording would crash the process."""
    cells.run(
        """
        import threading, torch
        seen = []
        def profiled():
            try:
                with torch.profiler.profile() as mine: torch.ones(8) * 2
                seen.extend(event.name for event in mine.events())
            except RuntimeError as error:  # torch 2.4 to 2.11, also without ddip: one profiler per process
                seen.append(str(error))
        thread = threading.Thread(target=profiled); thread.start(); thread.join()
        assert "aten::mul" in seen or "Can't disable Kineto profiler when it's not running" in seen
        """,
        profile=str(tmp_path / "out"),
    )
    why = "a thread of the cell has started a profiler"
    assert last_profile(cells, ()).missing == {0: why, 1: why} and not (tmp_path / "out").exists()
    cells.run("await __import__('asyncio').sleep(0.05)", profile=str(tmp_path))  # the next cell has a profile
    assert all(each.idle > 0.04 for each in last_profile(cells).ranks.values())


@pytest.mark.grid
@pytest.mark.native("profile")
def test_too_many_events_keep_the_first_and_cells_continue(
    cells: ddip.Group, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("import torch, ddip.rank.profiling.profiling as p\nkept = p.GROWTH_BYTES, p.MOST_EVENTS")
    cells.run("p.GROWTH_BYTES, p.MOST_EVENTS = 1 << 20, 2_000")
    loop = """
        n = 0
        while p._recording._profiler or n < 1000:
            torch.ones(1) + n; n += 1
        for i in range(100):
            torch.ones(1) + i; n += 1
    """
    cells.run(loop, profile=str(tmp_path), timeout=30)
    cells.run("p.GROWTH_BYTES, p.MOST_EVENTS = kept")
    profile = last_profile(cells)
    assert "events, as many as are kept" in profile.ranks[0].note
    assert "recorded only the first" in capsys.readouterr().out
    events = traces_in(tmp_path)["rank_0.pt.trace.json.gz"]["traceEvents"]
    assert 1_000 < sum(event["name"] == "aten::add" for event in events) <= cells.pull(["n"])["n"] - 100


@pytest.mark.parametrize("folder", ["file", "file/below"])
def test_an_unwritable_folder_ends_a_cell_before_it_begins(cells: ddip.Group, tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ddip.BadInput, match=f"--profile .*{folder}: "):
        cells.run("began = True", profile=str(tmp_path / folder))
    cells.run("assert 'began' not in globals()")


STUCK = """
import time, torch, torch.distributed as dist
{recorder}
x = torch.ones(4)
dist.all_reduce(x); dist.all_reduce(x)
if rank == 1: time.sleep(8)
dist.all_reduce(x)
"""
TOLD = r"(?:in|last) collective,? (\d+) of the default group: all_reduce of \(4,\) float32"
NO_RECORDER = "import ddip.rank.process_group.flight_recorder as f; f.DUMP_FUNCTIONS = ()"
RECORDER = (
    "import ddip.rank.process_group.flight_recorder as f; f.DUMP_FUNCTIONS = ('_dump_fr_trace', '_dump_nccl_trace')"
)


@pytest.mark.parametrize("recorder", ["", NO_RECORDER], ids=["flight recorder", "a torch without one"])
@pytest.mark.native("sockets")
def test_in_a_stall_each_rank_reports_its_collective(cells: ddip.Group, recorder: str) -> None:
    # The next process group has counted nothing
    cells.run("import torch.distributed as dist; dist.destroy_process_group()")

    seen: list[StackLocation] = []

    def read_places() -> list[StackLocation]:
        seen[:] = [stack.place for stack in cells.stacks().values() if stack is not None]
        return seen

    def collective_numbers() -> list[int]:
        return [int(found[1]) for place in seen if (found := re.fullmatch(TOLD, place.collective))]

    def stand_still() -> bool:
        if len(read_places()) != 2 or "sleep" not in seen[1].source or seen[0].line != 6:
            return False
        # Rank 0 has begun the third collective
        return len(collective_numbers()) == 2 and collective_numbers()[0] > collective_numbers()[1]

    stopped = meanwhile(stand_still, press_stop)
    with pytest.raises(ddip.CellInterrupted):
        cells.run(STUCK.format(recorder=recorder))
    stopped.join()
    cells.run(RECORDER)
    assert collective_numbers()[0] == collective_numbers()[1] + 1
    assert [stack.place.collective for stack in cells.stacks().values() if stack] == ["", ""]  # because no cell runs

    def all_ended() -> bool:
        # torch marks a collective as ended shortly after `all_reduce` has returned
        return ["sleep" in each.source and each.collective.startswith("last") for each in read_places()] == [True, True]

    stopped = meanwhile(all_ended, press_stop)
    with pytest.raises(ddip.CellInterrupted):  # a collective that was aborted is not reported any more
        cells.run("for i in range(5):\n    dist.all_reduce(x)\ntime.sleep(8)")
    stopped.join()
    assert all(re.fullmatch(TOLD, place.collective) for place in seen), seen


@pytest.mark.grid
def test_collectives_begun_by_ddp_are_also_reported(cells: ddip.Group) -> None:
    cells.run(f"{SETUP}\npair = dist.new_group([0, 1])")
    seen: list[str] = []

    def stand_still() -> bool:
        seen[:] = [str(stack.place.collective) for stack in cells.stacks().values() if stack is not None]
        return "in collective" in seen[0]

    stopped = meanwhile(stand_still, press_stop)
    with pytest.raises(ddip.CellInterrupted):
        cells.run("if rank == 1: time.sleep(8)\nnet(torch.ones(4, 8)).sum().backward()")
    stopped.join()
    assert re.match(r"in collective \d+ of the default group: all_reduce of \(9,\) float32", seen[0])


@pytest.mark.grid(in_ci=True)
def test_the_magics_show_the_profile(notebook: Notebook) -> None:
    notebook.ok("%%dip\nimport time, torch")
    shown = notebook.ok("%%dip --profile traces -S all\nprint(rank)\ntime.sleep(0.05)")
    (bundle,) = (data for data in shown.data if "ddip-profile" in data.get("text/html", ""))
    assert "<svg" in bundle["text/html"] and "where the time of the cell went: ranks 0-2" in bundle["text/plain"]
    assert len(list((notebook.folder / "traces").iterdir())) == 4
    notebook.ok("%%dip -r 0 --profile\nx = torch.ones(3)")
    (made,) = (notebook.folder / "ddip_profile").iterdir()
    assert {path.name for path in made.iterdir()} == {"rank_0.pt.trace.json.gz", "all_ranks.perfetto-trace"}
    for typed in ("local --profile", "--profile local", "everywhere --profile", "--profile remote"):
        assert "type %%dip --profile" in notebook.fails(f"%%dip {typed}\npass").message
