"""The magics in a real notebook kernel."""

from __future__ import annotations

import multiprocessing
import re

import IPython
import pytest

from ddip.protocol.start_methods import NOT_FORKED

from .leftovers import wait_until
from .notebook import Notebook

BAD_INPUT = [
    ("%makedip -n 0", r"-n 0: type a number of ranks, 1 or more, such as -n 2"),
    ("%makedip -g 99", r"-g 99: there is no GPU"),
    ("%makedip -g all", r"-g all: there is no GPU here; type %makedip -n 2"),
    ("%makedip --sideways", r"%makedip --sideways: unrecognized arguments: --sideways; %makedip\? lists the options"),
    ("%makedip -n 500", r"^-n 500: 500 processes on \d+ cores; to start them anyway, type %makedip -n 500 --yes$"),
    ("%makedip -t soon", r"-t soon: type a time of 1 s or more"),
    ("%makedip -v maybe", r"-v maybe: type -v, -v True or -v False"),
    ("%makedip -k -n 2", r"%makedip -k -n 2: -k ends the group; to restart it type -r"),
    ("%makedip -b nope", r"-b nope: torch .* has no backend 'nope'; it has .*gloo"),
    ("%makedip -a nope", r"-a nope: there is no app 'nope'"),
    ("%%dip sideways\n1", r"%%dip sideways: type %%dip, %%dip local or %%dip everywhere"),
    ("%%dip -r 9\n1", r"-r 9: there is no rank 9; this group has ranks 0 to 2"),
    ("%%dip -r 1 -S 0\n1", r"^-S 0: rank 0 does not run this cell, only rank 1; type -S 1, or -S all$"),
    ("%%dip -s all\n1", r"^%%dip -s all: type %%dip -S all$"),
    ("marker = 7\n%%dip -S all\n1", r"^%%dip -S all: it must be the first line of its cell; move what is above it"),
    (
        "%%dip print(rank)\n1",
        r"^%%dip print\(rank\): type %%dip alone in the first line of a cell, and the code below it$",
    ),
    ("%makedip -n 3 -b nccl", r"-b nccl: nccl needs GPUs; leave out -b"),
    ("%%dip -a save\n1", r"%%dip -a save: this group has no app; start it with %makedip -a NAME"),
    ('%%dip -S "0\n1', r'%%dip -S "0: a quote is not closed; type it on both sides'),
    ("%%dip --timeout never\n1", r"--timeout never: type a time of 0.1 s or more, such as --timeout 120, "),
    (
        "%makedip --repair -n 2",
        r"%makedip --repair -n 2: type %makedip --repair, or %makedip --repair --from 0 model opt",
    ),
    ("%makedip --repair --from 9 marker", r"--from 9: type one rank from 0 to 2"),
    ("%makedip --repair --from 0 marker", r"--from 0 marker: all ranks are running, so nothing was copied"),
    ("%dipstack 3", r"%dipstack 3: unrecognized arguments: 3"),
    ("%dipwatch maybe", r"%dipwatch maybe: type %dipwatch, %dipwatch off, or %dipwatch --once"),
    (
        "%dipush rank",
        r"%dipush rank: rank is each rank's own variable, which ddip sets; leave it out, or copy it "
        r"by another name: notebook_rank = rank",
    ),
    ("%autodip maybe", r"%autodip maybe: type %autodip on or %autodip off"),
    ("%dipush", r"%dipush: type the names of variables"),
    ("%dipush --modules torch", r"%dipush --modules torch: torch is an installed module, not your own; install"),
    (
        "%dipush --modules nowhere marker",
        r"the notebook finds no module nowhere, neither in its folder nor on sys.path",
    ),
    ("%dipush nowhere", r"%dipush: the notebook has no variable nowhere; nothing was pushed"),
    ("%dipush a.b", r"%dipush a.b: 'a.b' is not a name; type `b = a.b`, then %dipush b$"),
    ("%dipull losses[-1]", r"'losses\[-1\]' is not a name; type `part = losses\[-1\]` in a %%dip cell, then %dipull p"),
    ("%dipshards", r"^%dipshards: type the name of a model on the ranks, such as %dipshards model$"),
    ("%dipshards nowhere", r"%dipshards nowhere: ranks 0-2 have no variable nowhere; create the model in a %%dip cell"),
    ("%dipshards marker", r"%dipshards marker: it is of type int on ranks 0-2, not a module; type the name of a model"),
    ("%dipull nowhere", r"nothing was pulled: rank 0 has no variable nowhere"),
    ("%dipcell x", r"%dipcell x: type the number of a cell, such as %dipcell 12; %dipcells lists them$"),
    ("%dipcell 99999", r"%dipcell 99999: no cell with this number has run on ranks; the last are \d+"),
    ("%dipwait -t soon", r"-t soon: type a time of 0 s or more, such as -t 120, -t 10m or -t 1h$"),
    ("%dipstop", r"%dipstop: no cell runs in the background; %dipcells lists the earlier ones$"),
    ("%%dip local --bg\n1", r"%%dip local --bg: only ranks run cells in the background; type %%dip --bg$"),
    ("%%dip --log no/such/folder/train\n1", r"--log no/such/folder/train: there is no folder .*; create it, or type"),
    ("%%dip", r"%%dip: the cell is empty; type the code below this line$"),
    ("%%dip --help\n1", r"%%dip --help: type %dip\? for its options and examples$"),
    ("%makedip --num 2", r"%makedip --num 2: type %makedip -n 2$"),
    ("%makedip -n 3 -a fastai,hf", r"^-a fastai,hf: a group takes one app; type -a fastai$"),
    ("%dipdebug --dap off", r"^%dipdebug --dap off: type %dipdebug --off to end --dap$"),
    ("%makedip -n 3 -a fastia", r"-a fastia: there is no app 'fastia'; type -a fastai$"),
    ("%%dip local -r 0\n1", r"^%%dip local -r: -r is for cells on ranks; type %%dip local, or %%dip -r$"),
    ("%%dip -r 0 -r 1\n1", r"^%%dip -r 0 -r 1: type -r only once, with all its values after it$"),
    ('%autodip on -a "-S 9"', r"^-S 9: there is no rank 9; this group has ranks 0 to 2$"),
    ('%autodip on -a "local"', r"^%autodip on -a \"local\": type %autodip off; cells then run in the notebook$"),
    ("%makedip -a ''", r"^%makedip -a '': type a value after -a: Framework to prepare on every rank, such as fastai.$"),
    (
        "%makedip --cd /tmp",
        r"^--cd /tmp: it is for ranks on other hosts; type it with --hosts, such as --hosts h1:4,h2:4$",
    ),
    ("%dipsync marker --from 0,1", r"^--from 0,1: type one rank from 0 to 2, such as --from 0$"),
    (
        "%dipcheck nowhere",
        r"^%dipcheck: nowhere is not a variable with a state on any rank; type %dipcheck to compare all$",
    ),
    ("%dipush markr", r"^%dipush: the notebook has no variable markr; nothing was pushed; type %dipush marker$"),
    ("%dipull markr", r"^nothing was pulled: rank 0 has no variable markr; .*; type %dipull marker$"),
    ("%dipull marker -r x", r"^-r x: 'x' is not a rank; this group has ranks 0 to 2: type -r 0, -r 0,1 or -r all$"),
    ("%dipull marker as x as y", r"type a name on each side of as, such as %dipull model as best$"),
    ("%dipush \u2014help", r"type %dipush\? for its options and examples$"),
    ("%dipper if", r"^%dipper if: type the name of a variable, such as %dipper g$"),
    ("%dipper", r"%dipper: type the name of a variable, such as %dipper g"),
]

BEFORE_ANY_GROUP = [
    "%%dip\n1",
    "%dipush marker",
    "%autodip on",
    "%makedip -i",
    "%dipper g",
    "%makedip --repair",
]


@pytest.fixture(scope="module")
def marked_notebook(shared_notebook: Notebook) -> Notebook:
    """Return the shared notebook with marked variables, which each test must leave unchanged."""
    shared_notebook.ok("%%dip everywhere\nmarker = 7")
    shared_notebook.ok("%%dip\nfrom torch.distributed import get_world_size")
    shared_notebook.ok("def get_world_size(): return 3")
    return shared_notebook


@pytest.mark.parametrize(("cell", "message"), BAD_INPUT, ids=[cell.replace("\n", "|") for cell, _ in BAD_INPUT])
def test_bad_input_is_one_clear_line_and_changes_nothing(marked_notebook: Notebook, cell: str, message: str) -> None:
    shown = marked_notebook.fails(cell)
    assert re.search(message, shown.message), shown.message
    assert shown.traceback == f"UsageError: {shown.message}"
    assert [kind for kind, _ in shown.messages] == ["error"]
    assert "\n" not in shown.message
    marked_notebook.ok("%%dip everywhere\nassert marker == 7 and get_world_size() == 3")


@pytest.mark.parametrize("cell", BEFORE_ANY_GROUP, ids=[cell.replace("\n", "|") for cell in BEFORE_ANY_GROUP])
def test_without_a_group_every_magic_says_how_to_start_one(bare_notebook: Notebook, cell: str) -> None:
    shown = bare_notebook.fails(f"marker = 1\n{cell}" if not cell.startswith("%%") else cell)
    assert re.search(r"there is no group yet; start one with %makedip -n 2, or %makedip -g all", shown.message)
    assert shown.traceback == f"UsageError: {shown.message}"


def test_loading_imports_no_torch_and_offers_the_settings(bare_notebook: Notebook) -> None:
    bare_notebook.ok("import sys; assert 'torch' not in sys.modules")
    assert "DipMagics.timeout" in bare_notebook.ok("%config DipMagics").stdout


def test_makedip_shows_the_new_group_and_needs_no_torch(bare_notebook: Notebook) -> None:
    bare_notebook.ok("%makedip -n 2")
    shown = bare_notebook.ok("%makedip -n 3")
    steps = [bundle["text/plain"] for bundle in shown.data]
    assert any(step.startswith("ddip: 3 of 3 engines are up  ━") for step in steps)
    assert re.fullmatch(r"ddip: 3 ranks on the CPU, gloo, \d+\.\d s", steps[-1])
    bare_notebook.ok("import sys; assert 'torch' not in sys.modules")


def test_a_comment_may_end_the_line_of_a_magic(notebook: Notebook) -> None:
    assert notebook.ok("%makedip -n 3   # as before").text.endswith("unchanged")
    notebook.ok("%%dip -r 1,2  # not 0\nassert rank")
    notebook.ok("%autodip off # on")
    assert re.search("the notebook has no variable nowhere", notebook.fails("%dipush nowhere # at all").message)


def test_a_second_makedip_leaves_the_group_unchanged(notebook: Notebook) -> None:
    notebook.ok("%%dip\nkept = dist = __import__('torch.distributed').distributed.group.WORLD")
    assert notebook.ok("%makedip -n 3").text.endswith("ddip: 3 ranks on the CPU, gloo, unchanged")
    notebook.ok("%%dip\nassert kept is __import__('torch.distributed').distributed.group.WORLD")


def test_the_table_has_a_line_for_each_rank(notebook: Notebook) -> None:
    lines = notebook.ok("%makedip -i").stdout.splitlines()
    assert lines[0].split() == ["rank", "host", "pid", "device", "memory", "state", "last", "cell", "took"]
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert lines[4] == "%autodip: off"


def test_values_are_labelled_by_rank_for_visible_ranks(notebook: Notebook) -> None:
    assert re.fullmatch(r"Out\[0:\d+\]: 20", notebook.ok("%%dip\n20 + rank").text)
    shown = notebook.ok("%%dip -S 1,2\n20 + rank")
    text = re.sub(r"\[\d+\]", "[n]", shown.data[-1]["text/plain"])
    assert text == "── rank 1 ──\nOut[n]: 21\n── rank 2 ──\nOut[n]: 22"
    assert notebook.ok("%%dip -S all\n20 + min(rank, 0)").data[-1]["text/plain"].startswith("── ranks 0-2 ──\nOut[")
    assert notebook.ok("%%dip\n20 + rank;").data == []


@pytest.mark.slow
def test_rich_output_arrives_with_all_its_forms(notebook: Notebook) -> None:
    frame = notebook.ok("""
        %%dip -r 0
        import pandas as pd
        pd.DataFrame({'x': [1, 2]})
    """).data[0]
    assert "<table" in frame["text/html"] and frame["text/plain"].startswith("Out[0:")
    picture = notebook.ok("""
        %%dip -r 0
        import matplotlib.pyplot as plt
        plt.plot([1, 2]); plt.show()
    """).data[0]
    assert picture["image/png"]
    shown = notebook.ok("""
        %%dip -r 1
        from IPython.display import HTML, display
        display(HTML('<b>hi</b>'))
    """)
    assert shown.data[0]["text/html"] == "<b>hi</b>"


def test_a_cell_runs_in_the_ipython_of_the_rank(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        import asyncio
        await asyncio.sleep(0.01)
        !echo from the shell
        %time x = 1
    """)
    assert "from the shell" in shown.stdout and "Wall time" in shown.stdout
    notebook.ok("%%dip\ndef kept(): return rank")
    notebook.ok("%%dip\nassert kept() == rank and x == 1")


def test_output_is_live(notebook: Notebook) -> None:
    """Show the first line while the rank still waits for a file that is created only after that."""
    path = notebook.folder / "go-on"
    path.unlink(missing_ok=True)
    cell = (
        f"%%dip\nimport pathlib, time\nprint('first')\nwhile not pathlib.Path({str(path)!r}).exists(): time.sleep(0.01)"
    )
    running = notebook.begin(cell + "\nprint('second')")
    assert notebook.finish(running, until="first").stdout == "first\n"
    path.touch()
    assert notebook.finish(running).stdout == "second\n"


def test_a_failed_cell_stops_run_all_and_shows_its_lines(notebook: Notebook) -> None:
    shown = notebook.fails("""
        %%dip -S 0
        def f(x):
            return 1 / x

        f(rank - 2)
    """)
    assert shown.error == "CellError"
    assert shown.message == "rank 2: ZeroDivisionError: division by zero"
    assert "[rank 2]" in shown.traceback
    assert "----> 2     return 1 / x" in shown.traceback and "----> 4 f(rank - 2)" in shown.traceback
    assert "ipyparallel" not in shown.traceback and "magics.py" not in shown.traceback


def test_local_runs_here_and_everywhere_runs_on_both_sides(notebook: Notebook) -> None:
    assert notebook.ok("%%dip local\nonly_here = 1\n40 + 2").data[0]["text/plain"] == "42"
    notebook.ok("%%dip\nassert 'only_here' not in globals()")
    notebook.ok("%%dip everywhere\nboth = 1")
    notebook.ok("assert both == 1")
    notebook.ok("%%dip\nassert both == 1")
    shown = notebook.fails("""
        %%dip everywhere
        there = 1
        1 / ('rank' in globals())
    """)
    assert shown.error == "LocalCellFailed" and "the cell failed in the notebook" in shown.message
    notebook.ok("%%dip\nassert 'there' not in globals()")


def test_push_and_pull_between_notebook_and_ranks(notebook: Notebook) -> None:
    notebook.ok("""
        class Made:
            x = 5
        made = Made()
        add = lambda a: a + made.x
    """)
    notebook.ok("%dipush made add Made")
    notebook.ok("%%dip\nresult = add(rank); again = Made()")
    notebook.ok("%dipull result again")
    notebook.ok("assert result == 5 and again.x == 5")
    notebook.ok("%dipull -r 2 result\nassert result == 7")
    notebook.ok("%dipull -r all result\nassert result == [5, 6, 7]")
    notebook.ok("%dipull result -r 1,2\nassert result == [6, 7]")
    notebook.ok("only = 1")
    notebook.ok("%dipush -r 1 only")
    notebook.ok("%%dip\nassert ('only' in globals()) == (rank == 1)")


def test_dipper_gives_the_group(notebook: Notebook) -> None:
    notebook.ok("%dipper g")
    notebook.ok("assert g.world_size == 3 and len(g.cluster.client.ids) == 3")


def test_the_stop_button_ends_a_cell_on_the_ranks(notebook: Notebook) -> None:
    running = notebook.begin(
        "%%dip\nimport torch.distributed as dist\nkept = 1\ndist.barrier()\nprint('running')\nwhile True: pass"
    )
    notebook.finish(running, until="running")
    notebook.interrupt()
    shown = notebook.finish(running)
    assert (shown.status, shown.error) == ("error", "CellInterrupted")
    assert "KeyboardInterrupt" in shown.traceback
    notebook.ok("""
        %%dip
        import torch, torch.distributed as dist
        assert kept == 1
        dist.barrier()
    """)


def test_cells_on_ranks_have_the_numbers_of_the_notebook(notebook: Notebook) -> None:
    number = notebook.ok("1").number
    assert notebook.ok("%%dip\n1").text.startswith(f"Out[0:{number + 1}]")
    notebook.ok("2")
    shown = notebook.fails("""
        %%dip
        x = 1
        1 / 0
    """)
    assert f"Cell In[{number + 3}], line 2" in shown.traceback or IPython.version_info < (8,)
    assert "----> 2 1 / 0" in shown.traceback
    assert "ddip" not in shown.traceback and "ipyparallel" not in shown.traceback
    assert notebook.ok(f"%%dip\nprint(_{number + 1}, repr(In[{number + 1}]))").stdout == "1 '1'\n"


def test_a_caught_error_shows_the_error_of_each_rank(notebook: Notebook) -> None:
    shown = notebook.ok(
        "try: get_ipython().run_cell_magic('dip', '', '1 / rank')\n"
        "except Exception as error: print({rank: e.name for rank, e in error.by_rank.items()})"
    )
    assert shown.stdout == "{0: 'ZeroDivisionError'}\n"


@pytest.mark.slow
@pytest.mark.native("sockets")
def test_a_cell_that_takes_too_long_fails_by_itself(notebook: Notebook) -> None:
    shown = notebook.fails("""
        %%dip --timeout 1
        import time, torch.distributed as dist
        dist.barrier() if rank else time.sleep(100)
    """)
    assert shown.error == "CellTimeout"
    line = f"cell [{shown.number}] line 2: dist.barrier() if rank else time.sleep(100)"
    assert shown.traceback == (
        "CellTimeout: the cell took longer than 1 s and was stopped; the ranks were here:\n"
        f"  rank 0: {line}\n  ranks 1, 2: barrier, {line}"
    )
    notebook.ok("%%dip\ndist.barrier()")


def test_the_settings_of_failures_reach_the_group(notebook: Notebook) -> None:
    notebook.ok("""
        %dipper g
        %config DipMagics.failure_grace = 0.2
        %config DipMagics.stall_timeout = 3
    """)
    assert notebook.ok("print(g.options.failure_grace, g.options.stall_timeout)").stdout == "0.2 3.0\n"
    notebook.ok("%config DipMagics.failure_grace = 1.0\n%config DipMagics.stall_timeout = 10.0\ndel g")


NUMBERS = """%%dip -r 0
import torch
class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 4
    def __getitem__(self, number): return number
def read(method=None, **more):
    return list(torch.utils.data.DataLoader(Numbers(), num_workers=1, multiprocessing_context=method, **more))
"""
FORKS = multiprocessing.get_context().get_start_method() == "fork"
"""True if workers are forked by default, as before Python 3.14."""
METHODS = [
    pytest.param(None, marks=pytest.mark.skipif(FORKS, reason="workers are forked by default")),
    *(pytest.param(method, marks=pytest.mark.grid) for method in ("spawn", "forkserver")),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_hint_explains_missing_classes_in_workers_not_forked(notebook: Notebook, method: str | None) -> None:
    notebook.ok(NUMBERS)
    shown = notebook.fails(f"%%dip -r 0\nread({method!r})")
    assert shown.message.endswith(f"exited unexpectedly; {NOT_FORKED}")
    shown = notebook.fails(f"%%dip -r 0\nread({method!r}, collate_fn=lambda items: items)")
    assert shown.message.endswith(f"; {NOT_FORKED}")
    notebook.ok('%%dip -r 0\nassert len(read("fork")) == 4')


def test_a_dead_rank_is_replaced_and_others_keep_variables(notebook: Notebook) -> None:
    notebook.ok("""
        %%dip
        import os, signal
        mine, model = rank, 5
    """)
    shown = notebook.fails("%%dip\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)")
    assert re.match(r"rank 1: RankEnded: pid \d+ ended \(SIGKILL\): ", shown.message)
    assert "%makedip --repair replaces its process" in shown.message
    assert "%makedip --repair" in notebook.fails("%%dip\npass").message
    assert (
        "nothing was repaired: rank 0 has no variable nowhere"
        in notebook.fails("%makedip --repair --from 0 nowhere").message
    )
    assert "rank 1 is lost itself; copy from another" in notebook.fails("%makedip --repair --from 1 x").message
    assert notebook.ok("%dipstack").stdout == "  ranks 0, 2: idle\n  rank 1: ended\n"
    threads = notebook.ok("%dipstack -v").stdout  # other tests may have left threads on rank 0
    assert threads.count("\n  main:\n  idle\n") in (1, 2) and "\nrank 1\n  main:\n  ended\n" in threads
    text = notebook.ok("%makedip --repair --from 2 model").text
    assert re.search(r"ddip: rank 1 replaced, with model from rank 2, \d+\.\d s$", text)
    assert re.search(r"ddip: ranks? 1.* new and lacks? .*: run the cells that define", notebook.ok("%dipsync").text)
    notebook.ok("""
        %%dip
        import torch, torch.distributed as dist
        x = torch.ones(1)
        dist.all_reduce(x)
        assert x.item() == 3 and model == 5 and ('mine' in globals()) == (rank != 1)
    """)
    assert notebook.ok("%makedip --repair").text == "ddip: all ranks are running; nothing to repair"


def test_dipstack_shows_the_place_of_each_rank(notebook: Notebook) -> None:
    assert notebook.ok("%dipstack").stdout == "  ranks 0-2: idle\n"


@pytest.mark.grid
def test_dipstack_names_a_rank_that_does_not_answer(notebook: Notebook) -> None:
    running = notebook.begin(
        "%%dip\nimport ctypes, signal, torch.distributed as dist\ndef wait():\n    dist.barrier()\n"
        "if rank == 1: signal.signal(signal.SIGINT, signal.SIG_IGN)\nwait()\nif rank == 1: open('held', 'w').close()\n"
        "if rank == 1:\n    while True: ctypes.PyDLL(None).sleep(1000)\nwait()"  # sleeps without releasing the GIL
    )
    wait_until((notebook.folder / "held").exists)  # rank 0 may be slower
    notebook.interrupt()
    shown = notebook.finish(running)
    held = "  rank 1: line 8 of the cell, and it does not answer: C code may hold the interpreter"
    assert shown.error == "CellInterrupted"
    assert f"the cell was interrupted on ranks 0, 2\nrank 1 did not stop:\n{held}\n" in shown.message
    assert notebook.ok("%dipstack").stdout == f"  ranks 0, 2: idle\n{held}\n"
    assert f"ranks 0, 2\n  main:\n  idle\nrank 1\n  main:\n  {held[10:]}" in notebook.ok("%dipstack -v").stdout
    assert notebook.ok("%makedip --repair").text.endswith(" s")


def test_pulled_values_get_other_names(notebook: Notebook) -> None:
    notebook.ok("%%dip\nx, z = rank + 5, [rank]")
    assert notebook.ok("y = %dipull x\nprint(y, x)").stdout.endswith("\n5 5\n")
    assert notebook.ok("a, b = %dipull x z\nprint(a, b)").stdout.endswith("\n5 [0]\n")
    assert notebook.ok("%dipull rank as r0, z as first\nprint(r0, first)").stdout.endswith("\n0 [0]\n")
    assert notebook.ok("%dipull -r 1 x as second\nprint(second)").stdout.endswith("\n6\n")
    for line in ("%dipull x", "%time %dipull x"):  # without an assignment, nothing is echoed
        assert notebook.ok(line).data == []
    for line in ("x as", "as y", "x as class"):
        assert "type a name on each side of as, such as" in notebook.fails(f"%dipull {line}").message
    notebook.ok("x = 'mine'")
    for line in ("x -r 1 as y", "x, as y", "x z as x"):
        assert "type each new name after its variable, and only once" in notebook.fails(f"%dipull {line}").message
    notebook.ok("assert x == 'mine'")


# -- %autodip


def test_autodip_runs_the_users_cells_on_the_ranks(notebook: Notebook) -> None:
    assert notebook.ok("%autodip on").stdout == "%autodip: on, cells run as %%dip\n"
    notebook.ok("far = rank")
    notebook.ok("# a comment first\n\nsecond = far + 1")
    notebook.ok("\n\n  \nindented = 1\n")
    notebook.ok("import functools\n@functools.cache\ndef f(x):\n    return x\n\nf(3)")
    notebook.ok("@functools.cache\ndef g(x):\n    return x")
    notebook.ok("text = '''\n%%dip\n%autodip off\n'''\nassert text.count('%') == 3")
    notebook.ok("")
    notebook.ok("# nothing but a comment")
    assert notebook.ok("!echo $((1 + 1))").stdout.count("2") == 1
    assert notebook.ok("print(world_size)").stdout == "3\n"
    assert notebook.ok("%%dip -S all\nprint('by hand')").data[-1]["text/plain"].startswith("── ranks 0-2 ──\nby hand")
    assert notebook.ok("%%dip local\nprint('far' in globals())").stdout == "False\n"
    assert notebook.ok("# here\n %%dip local\nprint('far' in globals())").stdout == "False\n"
    assert notebook.ok("# 3 ranks\n%makedip -n 3").stdout == ""
    assert notebook.ok("%autodip").stdout.startswith("%autodip: on")
    assert notebook.ok("%autodip off").stdout == "%autodip: off\n"
    assert notebook.ok("print('far' in globals())").stdout == "False\n"


def test_autodip_has_arguments(notebook: Notebook) -> None:
    notebook.ok('%autodip on -a "-S all"')
    text = notebook.ok("print(rank)").data[-1]["text/plain"]
    assert text.startswith("── rank 0 ──\n0\n── rank 1 ──\n1\n── rank 2 ──\n2\n")
    notebook.ok('%autodip on -a "-q"')
    assert notebook.ok("print(rank)").stdout == "0\n"


def test_autodip_survives_an_error_and_a_syntax_error(notebook: Notebook) -> None:
    notebook.ok("%autodip on")
    notebook.fails("1 / 0")
    notebook.fails("for")
    assert notebook.ok("print(rank)").stdout == "0\n"


def test_autodip_ignores_requests_of_the_front_end(notebook: Notebook) -> None:
    notebook.ok("%autodip on")
    for hidden in ({"silent": True}, {"store_history": False}):
        notebook.finish(notebook.begin("inspected = 'here'", **hidden))
    notebook.ok("assert 'inspected' not in globals()")
    notebook.ok("%%dip local\nassert inspected == 'here'")


def test_autodip_does_not_make_a_line_incomplete(notebook: Notebook) -> None:
    notebook.ok("%autodip on")
    notebook.client.is_complete("x = 1")
    assert notebook.client.get_shell_msg(timeout=10)["content"]["status"] == "complete"
    assert "── rank" not in notebook.ok("%%dip -S all\nprint(rank)").text  # only jupyter-console sends this request
    notebook.ok("%%dip local\nfrom ddip.output import area as frontend\nfrontend._prompt_sessions.clear()")


def test_quotes_around_arguments_are_removed(notebook: Notebook) -> None:
    text = notebook.ok('%%dip -S "0,1"\nprint(rank)').data[-1]["text/plain"]
    assert text == "── rank 0 ──\n0\n── rank 1 ──\n1"
    assert "this group has no app" in notebook.fails("%%dip -a 'save x'\n1").message


@pytest.mark.grid
def test_a_new_group_starts_after_all_ranks_have_ended(bare_notebook: Notebook) -> None:
    bare_notebook.ok("%makedip -n 2")
    bare_notebook.fails("%%dip\nimport os\nlost = 1\nos._exit(3)")
    started = bare_notebook.ok("%makedip -n 2").text
    assert "all former ranks had ended, so the new ones have none of their variables" in started
    bare_notebook.ok("%autodip on")
    bare_notebook.ok("assert world_size == 2 and 'lost' not in globals()")
    off = "%autodip is off: cells run in the notebook"
    assert bare_notebook.ok("%makedip -k").stdout == f"ddip: ended 2 ranks; {off}\n"
    assert f"ddip: {off}; %autodip on runs them on the ranks\n" in bare_notebook.ok("%makedip -n 1").stdout


@pytest.mark.grid
def test_a_restart_repeats_a_failed_start(bare_notebook: Notebook) -> None:
    (bare_notebook.folder / "late" / "torch").mkdir(parents=True)
    (bare_notebook.folder / "late" / "torch" / "__init__.py").write_text("import time; time.sleep(1000)\n")
    bare_notebook.ok(f"import os; os.environ['PYTHONPATH'] = {str(bare_notebook.folder / 'late')!r}")
    failed = bare_notebook.fails("%makedip -n 1 -t 1").message  # on a loaded machine the controller takes that long
    assert re.search("timed out: 0 of 1 engines started|the controller did not (answer|start) in time", failed), failed
    bare_notebook.ok("del os.environ['PYTHONPATH']")
    assert "1 rank on the CPU" in bare_notebook.ok("%makedip -r -t 60").text


@pytest.mark.grid(in_ci=True)
def test_magics_of_ipyparallel_disappear_with_the_group(bare_notebook: Notebook) -> None:
    bare_notebook.ok("%makedip -n 1")
    assert "1" in bare_notebook.ok("%px print(world_size)").text
    bare_notebook.ok("%makedip -r")
    assert "1" in bare_notebook.ok("%px print(world_size)").text
    bare_notebook.ok("%makedip -k")
    bare_notebook.fails("%px 1")


def test_autodip_turns_off_with_the_group(bare_notebook: Notebook) -> None:
    bare_notebook.ok("%makedip -n 1")
    bare_notebook.ok("%autodip on")
    bare_notebook.ok("%makedip -k")
    bare_notebook.ok("assert 'rank' not in globals()")
    bare_notebook.ok("%makedip -n 1")
    assert "off" in bare_notebook.ok("%autodip").stdout
    bare_notebook.ok("%makedip -k")


def test_settings_of_the_magics_reach_the_ranks(bare_notebook: Notebook) -> None:
    bare_notebook.ok("%config DipMagics.collect = False\n%config DipMagics.show_ranks = 'all'")
    bare_notebook.ok("%makedip -n 2")
    assert bare_notebook.ok("%%dip\nprint(rank)").data[-1]["text/plain"].count("── rank") == 2
    bare_notebook.ok("""
        %%dip
        from ddip.rank.runtime import housekeeping
        assert not housekeeping.cells.collect
    """)
    bare_notebook.ok("%config DipMagics.collect = True")
    bare_notebook.ok("%%dip\nassert housekeeping.cells.collect")
    bare_notebook.ok("""
        %makedip -k
        %config DipMagics.collect = True
        %config DipMagics.show_ranks = '0'
    """)


def test_verbose_lists_each_step(notebook: Notebook) -> None:
    notebook.ok("%makedip -v")
    assert "ddip: running on 3 of 3 ranks" in notebook.ok("%%dip\npass").stdout
    notebook.ok("%makedip -v False")
    assert notebook.ok("%%dip\npass").text == ""


def test_help_lists_every_option(bare_notebook: Notebook) -> None:
    code = "from IPython.core.oinspect import getdoc\nprint(getdoc(get_ipython().find_magic({!r}, {!r})))"
    for name, kind, options in (
        ("makedip", "line", ["-n", "-g", "-b", "-a", "-r", "-k", "-i", "-t", "-v"]),
        ("dip", "cell", ["-r", "-S", "-q", "-a", "remote", "local", "everywhere"]),
        ("autodip", "line", ["-a", "on|off"]),
        ("dipush", "line", ["-r"]),
        ("dipull", "line", ["-r", "--now", "-t"]),
    ):
        text = bare_notebook.ok(code.format(name, kind)).stdout
        assert [option for option in options if option not in text] == [], text


@pytest.mark.grid(in_ci=True)
def test_unload_ends_the_group_and_removes_the_magics(bare_notebook: Notebook) -> None:
    from .leftovers import processes_of

    bare_notebook.ok("%makedip -n 1")
    assert processes_of(bare_notebook.pid)
    bare_notebook.ok("%unload_ext ddip")
    wait_until(lambda: not processes_of(bare_notebook.pid))
    assert "not found" in bare_notebook.fails("%makedip -n 1").stderr + bare_notebook.fails("%makedip -n 1").message
    bare_notebook.ok("%load_ext ddip\n%makedip -n 1\n%makedip -k")


def test_a_reload_keeps_the_group_the_settings_and_autodip(bare_notebook: Notebook) -> None:
    from .leftovers import processes_of

    bare_notebook.ok("%makedip -n 2\n%config DipMagics.stall_timeout = 7\n%autodip on")
    bare_notebook.ok("x = 10 + rank")
    assert "already loaded" in bare_notebook.ok("%load_ext ddip").text
    for _ in range(2):
        shown = bare_notebook.ok("%reload_ext ddip")
        assert shown.text == "ddip: kept ranks 0, 1, with all variables; %makedip -k ends them\n"
    assert bare_notebook.ok("print(x)").text.startswith("10\n")
    assert "%autodip: on" in bare_notebook.ok("%makedip -i").stdout
    bare_notebook.ok("%autodip off")
    assert bare_notebook.ok("%dipper g\n%config DipMagics.stall_timeout").text == "7.0"
    assert bare_notebook.ok("import ddip\nprint(ddip.current_group() is g)\ndel g").stdout == "True\n"
    bare_notebook.ok("%unload_ext ddip")
    wait_until(lambda: not processes_of(bare_notebook.pid))
    assert "not found" in bare_notebook.fails("%makedip -n 1").stderr
    bare_notebook.ok("%load_ext ddip\n%config DipMagics.report_after = 10")
    assert bare_notebook.ok("%reload_ext ddip").text == ""  # no group, so no notice


@pytest.mark.grid
def test_debug_opens_no_frame_of_ddip(notebook: Notebook) -> None:
    notebook.fails("%%dip -r 1\n1 / 0")
    shown = notebook.ok("%debug")
    assert re.search(r"^ddip: the error is on rank 1: %dipdebug opens .*keep_frames", shown.stderr)
    assert shown.stdout == ""
    notebook.fails("%dipull nowhere")
    assert "the last error is a message of ddip" in notebook.ok("%debug").stderr
    notebook.fails("%%dip local\ndef divide(a): return 1 / a\ndivide(0)")
    assert "ZeroDivisionError" in notebook.run("%tb").traceback
    debugged = notebook.run("%debug").stdout  # the prompt fails, as tests answer none
    assert "divide" in debugged and "ddip" not in debugged
    notebook.ok("%dipper g")
    notebook.ok("def train(): g.run('1 / 0')")
    for call in ("train()", "%time train()"):
        assert notebook.run(call).error == "CellError"  # %time of IPython 7 shows it, and does not fail
        assert "ddip: %debug" not in notebook.run("%debug").text  # its frames are the user's
