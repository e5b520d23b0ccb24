"""Background cells on real engines, in a real kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import ddip

from .leftovers import wait_until
from .meanwhile import suspended
from .notebook import Messages, Notebook
from .rank_errors import raises_on_ranks

UNTIL = "import time\nfrom pathlib import Path\nwhile not Path({path!r}).exists(): time.sleep(0.01)"
"""A cell that waits for a file."""
REDUCE = "import torch, torch.distributed as dist\nx = torch.ones(2)\ndist.all_reduce(x)"


@pytest.fixture
def notebook(notebook: Notebook) -> Iterator[Notebook]:
    """Return the shared notebook once all cells of earlier tests have ended."""
    notebook.run("%dipwait")
    yield notebook
    notebook.run("%dipstop")  # a failed test may leave a cell running


def begin_in_background(notebook: Notebook, cell: str, options: str = "") -> str:
    """Start a cell in the background; return the ID of its request."""
    message = notebook.begin(f"%%dip --bg {options}\n{cell}")
    assert notebook.finish(message).status == "ok"
    return message


def text_of(messages: Messages) -> str:
    return "\n".join(content.get("data", {}).get("text/plain", "") for _, content in messages)


def wait_for_words(notebook: Notebook, message: str, *words: str) -> str:
    """Return the output below a cell that has ended, once it contains all `words`."""
    return text_of(notebook.late_messages(message, lambda messages: all(word in text_of(messages) for word in words)))


def test_a_cell_runs_in_the_background_while_the_kernel_works(notebook: Notebook, tmp_path: Path) -> None:
    path = str(tmp_path / "go")
    message = begin_in_background(
        notebook, f"print('begun', rank)\n{UNTIL.format(path=path)}\nprint('over', rank)", "-S all"
    )
    wait_for_words(notebook, message, "begun 0", "begun 1", "begun 2")
    assert notebook.ok("1 + 1").text == "2"
    number = int(notebook.ok("%dipcells").stdout.splitlines()[-1].split()[0])
    assert notebook.ok("%dipcells").stdout.splitlines()[-1].split(maxsplit=4)[1:4] == ["0-2", "running,", "in"]
    refused = notebook.fails("%%dip\n1")
    assert f"cell {number} runs on ranks 0-2" in refused.message and f"%dipwait {number} waits" in refused.message
    notebook.fails("%dipull x")
    notebook.run(f"open({path!r}, 'w').close()")
    waited = notebook.ok("%dipwait")
    assert "over 2" in waited.text and f"cell {number} ended" in waited.text
    assert notebook.ok("%dipwait").text == ""
    assert "ok, in the background" in notebook.ok("%dipcells").stdout.splitlines()[-1]
    notebook.ok("%%dip\n" + REDUCE)


@pytest.mark.native("sockets")
def test_a_failure_is_shown_below_its_cell_and_when_awaited(notebook: Notebook) -> None:
    message = begin_in_background(notebook, f"kept = 7\nif rank == 1: raise ValueError('only here')\n{REDUCE}")
    shown = wait_for_words(notebook, message, "CellError")
    assert "rank 1: ValueError: only here; ranks 0, 2 were blocked in all_reduce" in shown
    assert "failed" in shown
    while not (news := notebook.ok("'next'").stderr):  # the error is shown just before the cell counts as ended
        pass
    assert "failed: rank 1: ValueError: only here" in news
    assert notebook.ok("'and the next'").stderr == ""
    number = notebook.ok("%dipcells").stdout.splitlines()[-1].split()[0]
    for waits in ("%dipwait", f"%dipwait {number}"):
        failed = notebook.fails(waits)
        assert failed.error == "CellError" and "rank 1: ValueError: only here" in failed.message
    notebook.ok("%dipwait")  # every cell has already been waited for
    assert "7 [3.0, 3.0]" in notebook.ok(f"%%dip\n{REDUCE}\nprint(kept, x.tolist())").text


def test_stop_during_dipwait_ends_the_wait_but_not_the_cell(notebook: Notebook, tmp_path: Path) -> None:
    path = str(tmp_path / "go")
    begin_in_background(notebook, f"print('begun')\n{UNTIL.format(path=path)}")
    message = notebook.begin("%dipwait")
    notebook.finish(message, until="begun")
    notebook.interrupt()
    suspended = notebook.finish(message)
    assert suspended.error == "RequestInterrupted" and "continues" in suspended.message
    assert "running" in notebook.ok("%dipcells").stdout.splitlines()[-1]
    notebook.run(f"open({path!r}, 'w').close()")
    notebook.ok("%dipwait")


WAITS_FOR_FAILED = f"""
import threading
go = threading.Event()
if rank:
    threading.Thread(target=go.wait).start()
    {{}}['a']
{REDUCE}
"""
"""Rank 0 waits for ranks that have failed; since a thread of theirs might still join it, ddip does not end the wait."""


@pytest.mark.parametrize(
    "cell",
    [
        "import time\nwhile True: time.sleep(0.05)",
        pytest.param(WAITS_FOR_FAILED, marks=pytest.mark.native("sockets")),
    ],
)
def test_dipstop_ends_a_cell_and_keeps_the_variables(notebook: Notebook, cell: str) -> None:
    notebook.ok("%%dip\nx = 3")
    notebook.ok("%config DipMagics.failure_grace = 60")
    message = begin_in_background(notebook, f"print('begun')\n{cell}")
    wait_for_words(notebook, message, "begun")
    assert "was stopped after" in notebook.ok("%dipstop").stdout
    notebook.ok("%config DipMagics.failure_grace = 1")
    assert "no cell runs in the background" in notebook.fails("%dipstop").message
    number = notebook.ok("%dipcells").stdout.splitlines()[-1].split()[0]
    assert notebook.fails(f"%dipwait {number}").error == "CellInterrupted"
    notebook.ok("%%dip\nif 'go' in globals(): go.set()\nassert 'x' in globals()\n" + REDUCE)


@pytest.mark.slow
@pytest.mark.native("sockets")
def test_a_rank_that_dies_ends_its_cell_and_is_repaired(notebook: Notebook) -> None:
    notebook.ok("%%dip\nkept = 11")
    message = begin_in_background(
        notebook, f"import os, signal\nif rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n{REDUCE}"
    )
    shown = wait_for_words(notebook, message, "CellError")
    assert "rank 2: RankEnded" in shown and "--repair" in shown
    while "running" in (state := notebook.ok("%dipcells").stdout.splitlines()[-1]):
        pass
    assert "a rank ended" in state
    notebook.ok("%makedip --repair")
    assert "11" in notebook.ok(f"%%dip\n{REDUCE}\nprint(kept if rank < 2 else '')").text


def test_free_ranks_run_cells_and_queued_cells_follow(notebook: Notebook, tmp_path: Path) -> None:
    path = str(tmp_path / "go")
    first = begin_in_background(notebook, f"print('begun')\n{UNTIL.format(path=path)}\nhere = 1", "-r 1")
    wait_for_words(notebook, first, "begun")
    assert notebook.ok("%%dip -r 0,2 -S all\nprint('free', rank)").text.count("free") >= 2
    second = begin_in_background(notebook, f"assert rank != 1 or here\n{REDUCE}\nprint(x)", "--queue")
    third = begin_in_background(notebook, "1 / 0", "--queue")
    fourth = begin_in_background(notebook, "never = 1", "--queue")
    assert [line.split()[2] for line in notebook.ok("%dipcells").stdout.splitlines()[-3:]] == ["queued,"] * 3
    notebook.run(f"open({path!r}, 'w').close()")
    assert "tensor([3., 3.])" in wait_for_words(notebook, second, "ended")
    assert "ZeroDivisionError" in wait_for_words(notebook, third, "CellError")
    assert "did not run" in wait_for_words(notebook, fourth, "UsageError")
    assert notebook.fails("%dipwait").error == "CellError"
    notebook.ok("%%dip --queue\nassert 'never' not in globals()")


def test_dipwait_waits_for_every_background_cell_of_a_notebook_cell(notebook: Notebook, tmp_path: Path) -> None:
    path = str(tmp_path / "go")
    notebook.ok("%dipper g")
    code = UNTIL.format(path=path)
    started = notebook.ok(f"g.start({code + chr(10) + '1 / 0'!r}, [0]); g.start({code!r}, [1]); print(len(g.cells))")
    notebook.run(f"open({path!r}, 'w').close()")
    assert "ZeroDivisionError" in notebook.fails(f"%dipwait {started.number}").message


@pytest.mark.slow
def test_a_cell_in_the_foreground_waits_with_queue(notebook: Notebook) -> None:
    begin_in_background(notebook, "import time; time.sleep(0.3); done = 1")
    notebook.ok("%%dip --queue\nassert done == 1")
    begin_in_background(notebook, "time.sleep(0.3); 1 / 0")
    failed = notebook.fails("%%dip --queue\nnever = 1")
    assert re.search(r"this cell did not run: it waited for cell \d+, which failed; %dipwait \d+ shows", failed.message)
    notebook.ok("%%dip\nassert 'never' not in globals()")


@pytest.mark.grid
def test_an_app_gets_its_command_after_the_cells_before_it(notebook: Notebook) -> None:
    notebook.ok("%makedip -a fastai")
    begin_in_background(notebook, "import time; time.sleep(0.3); done = 1", "-r 1")
    notebook.ok("%%dip --queue -r 0 -a patches\n1")
    notebook.ok("%makedip -k")


def test_an_invalid_cell_number_is_named(notebook: Notebook) -> None:
    assert "%dipcell 1²: type the number of a cell" in notebook.fails("%dipcell 1²").message


def test_output_of_a_cell_can_be_shown_again(notebook: Notebook, tmp_path: Path) -> None:
    cell = "from IPython.display import HTML, display\nprint('text of', rank)\ndisplay(HTML('<b>bold</b>'))\nrank * 2"
    shown = notebook.ok(f"%%dip -S all\n{cell}")
    again = notebook.ok("%dipcell")
    content, content_again = (
        [data["text/html"].replace(_output_id(data), "") for data in page.outputs if 'class="ddip"' in str(data)]
        for page in (shown, again)
    )
    assert len(content) == 1 and content == content_again
    assert again.outputs[-1]["text/plain"] == shown.outputs[-1]["text/plain"]
    path = str(tmp_path / "go")
    message = begin_in_background(notebook, f"print('before')\n{UNTIL.format(path=path)}\nprint('after')\nrank")
    wait_for_words(notebook, message, "before")
    second = notebook.begin("%dipcell")
    assert "before" in notebook.finish(second).text
    notebook.run(f"open({path!r}, 'w').close()")
    notebook.ok("%dipwait")
    assert "after" in wait_for_words(notebook, second, "ended")
    number = int(notebook.ok("%dipcells").stdout.splitlines()[-1].split()[0])
    notebook.fails("%%dip -S 0,1\nprint('one'); 1 / 0")
    failed = notebook.ok("%dipcell")
    assert "one" in failed.text and "ZeroDivisionError" in failed.text
    notebook.ok("%makedip -k")
    assert "after" in notebook.ok(f"%dipcell {number}").text
    assert "no cell with this number" in notebook.fails("%dipcell 9999").message


def _output_id(data: dict[str, str]) -> str:
    """Return the ID that belongs to one output only."""
    html = data["text/html"]
    at = html.find("ddip-", html.find("id="))
    return html[at : at + 17]


def test_dropped_output_is_mentioned(notebook: Notebook) -> None:
    notebook.ok("%config DipMagics.keep_output_bytes = 3000")
    notebook.ok(
        "%%dip\nfrom IPython.display import display_html\nfor i in range(10): display_html('x' * 1000, raw=True)"
    )
    assert "outputs of cell" in notebook.ok("%dipcell").stdout
    notebook.ok("%config DipMagics.keep_output_bytes = 64_000_000")


def test_each_rank_has_a_log(notebook: Notebook, tmp_path: Path) -> None:
    message = notebook.begin(
        f"%%dip --log {tmp_path}/train\nprint('x' * 300_000); print('end of', rank)\nif rank: 1 / 0"
    )
    notebook.finish(message)
    for rank in range(3):
        text = (tmp_path / f"train.{rank}.log").read_text()
        assert len(text) > 300_000 and f"end of {rank}" in text
        assert ("ZeroDivisionError: division by zero" in text) == (rank > 0)
        assert "\x1b" not in text
    assert "there is no folder" in notebook.fails(f"%%dip --log {tmp_path}/no/train\n1").message


@pytest.mark.grid
def test_an_unwritable_log_is_reported_and_the_cell_continues(notebook: Notebook, tmp_path: Path) -> None:
    (tmp_path / "train.1.log").mkdir()
    shown = notebook.ok(f"%%dip -S all --log {tmp_path}/train\nprint('fine')")
    assert "train.1.log could not be written: IsADirectoryError" in shown.text
    assert (tmp_path / "train.2.log").read_text() == "fine\n"


@pytest.mark.grid
def test_the_end_of_the_group_is_shown_below_its_cells(notebook: Notebook) -> None:
    message = begin_in_background(notebook, "import time\nprint('begun')\ntime.sleep(100)")
    wait_for_words(notebook, message, "begun")
    notebook.ok("%makedip -k")
    assert "the cell ended with its group" in wait_for_words(notebook, message, "UsageError")
    shown = notebook.ok("%dipcell")
    assert (shown.stdout + shown.stderr).count("the cell ended with its group") == 1
    assert "the group ended, in the background" in notebook.ok("%dipcells").stdout.splitlines()[-1]


@pytest.mark.grid
@pytest.mark.parametrize("how", ["restart", "kill"])
def test_a_kernel_that_ends_during_a_background_cell_leaves_nothing(
    new_notebook: Callable[[], Notebook], how: str
) -> None:
    notebook = new_notebook()
    notebook.ok("%load_ext ddip\n%makedip -n 2")
    message = begin_in_background(notebook, "import time\nprint('begun')\nwhile True: time.sleep(0.1)")
    wait_for_words(notebook, message, "begun")
    if how == "restart":
        notebook.restart()
    else:
        notebook.kill()


@pytest.mark.grid
def test_a_bar_that_is_a_widget_moves_in_the_background(notebook: Notebook) -> None:
    cell = "from tqdm.auto import tqdm\nfor i in tqdm(range(3)): print('step', i)"
    begin_in_background(notebook, cell)
    assert "ended" in notebook.ok("%dipwait").text
    assert "3/3" in notebook.ok("%dipcell").text


@pytest.mark.native("sockets")
def test_a_script_starts_waits_and_stops(cells: ddip.Group, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "go"
    cell = cells.start(f"print('begun', rank)\n{UNTIL.format(path=str(path))}\nmine = rank", show_ranks=[0, 1])
    with pytest.raises(ddip.GroupError, match="^cell .*ranks 0, 1"):
        cells.run("1")
    path.touch()
    assert cell.wait()
    assert "[rank 1] begun 1" in capsys.readouterr().out
    assert cells.pull(["mine"], 1) == {"mine": 1}
    cell = cells.start(REDUCE + "\nif rank == 0: raise KeyError('a')\ndist.all_reduce(x)")
    with raises_on_ranks({0: "KeyError"}, {1: "all_reduce"}):
        cell.wait()
    cells.run(REDUCE)


@pytest.mark.grid
def test_a_stopped_rank_ends_with_dipstop_as_stuck(cells: ddip.Group) -> None:
    cell = cells.start("import time\ntime.sleep(100)")
    pid = cells.members[1].pid
    wait_until(lambda: all(info.state == "busy" for info in cells.info()))
    with suspended([pid]):
        with pytest.raises(ddip.GroupError, match="\nrank 1 "):
            cell.stop()
        assert cell.outcome == "stuck"
    cells.run("1")


@pytest.mark.grid
def test_a_cell_in_the_background_is_profiled_below_it(notebook: Notebook, tmp_path: Path) -> None:
    message = begin_in_background(notebook, REDUCE, f"--profile {tmp_path}/traces")
    assert "where the time of the cell went: ranks 0-2" in wait_for_words(
        notebook, message, "slowest collective", "ended"
    )
    notebook.ok("%dipwait")
    assert len(list((tmp_path / "traces").glob("rank_*.pt.trace.json.gz"))) == 3
