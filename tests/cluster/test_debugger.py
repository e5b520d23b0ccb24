"""The debugger of a rank, ``input()`` and ``getpass``, with a notebook that types the answers."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import pytest

from .notebook import Notebook

SETUP = """
import torch, torch.distributed as dist
def train(steps, stop_at=None):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator, losses = torch.Generator().manual_seed(rank), []
    for step in range(steps):
        if stop_at is not None and rank == stop_at[0] and step == stop_at[1]:
            breakpoint()
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        losses.append(loss.item())
    state = [entry["momentum_buffer"] for entry in optimizer.state.values()]
    return losses, [*map(torch.clone, model.parameters())], state, generator.get_state()
def assert_same(one, other):
    assert one[0] == other[0], (one[0], other[0])
    for mine, theirs in zip([*one[1], *one[2], one[3]], [*other[1], *other[2], other[3]], strict=True):
        assert torch.equal(mine, theirs)
"""
LEAVE_BREAKPOINT = ["all n"] * (sys.version_info >= (3, 13))
"""Commands that leave the line of ``breakpoint()`` itself, at which newer Pythons stop."""
PROOF = "%%dip\nproof = torch.ones(2) * rank\ndist.all_reduce(proof)\nassert proof.tolist() == [3, 3], proof"


@pytest.fixture
def debugged(notebook: Notebook) -> Notebook:
    """Return the notebook, whose three ranks have defined `train` and `assert_same`."""
    notebook.ok(f"%%dip\n{SETUP}")
    return notebook


def test_ranks_ask_one_after_the_other(notebook: Notebook) -> None:
    cell = "%%dip\nname = input('name? ')\nassert name == 'abc'[rank], name"
    asked = notebook.converse(cell, "a", "b", "c")
    assert (asked.shown.status, asked.prompts) == ("ok", [f"rank {rank}: name? " for rank in range(3)])


def test_one_rank_asks_for_a_password(notebook: Notebook) -> None:
    asked = notebook.converse("%%dip -r 1\nfrom getpass import getpass\nassert getpass('key ') == 'abc'", "abc")
    assert (asked.shown.status, asked.prompts) == ("ok", ["rank 1: key "])
    assert "abc" not in asked.shown.text


def test_the_end_of_input_raises_an_error(notebook: Notebook) -> None:
    asked = notebook.converse("%%dip -r 0\ninput('x')", None)
    assert "EOFError" in asked.shown.message


def test_training_goes_on_after_steps_in_the_debugger(debugged: Notebook) -> None:
    cell = "%%dip\nresult = train(10, stop_at=(1, 3))\nassert_same(result, train(10))"
    seen = debugged.converse(cell, "p step", "n", "n", "n", "n", "n", "n", "p float(loss) > 0", "c")
    assert seen.shown.status == "ok", seen.shown.message
    assert re.search(r"^3$", seen.text, re.M) and re.search(r"^True$", seen.text, re.M)
    assert seen.prompts[0].startswith("rank 1 of 3, train() cell [") and seen.prompts[0].endswith(" (Pdb) ")
    lines = [int(re.findall(r"line (\d+)", prompt)[0]) for prompt in seen.prompts]
    assert lines[-1] > lines[0]
    debugged.ok("%%dip\nassert_same(result, train(10))")


def test_commands_reach_one_rank_or_all(debugged: Notebook) -> None:
    cell = "%%dip\nbreakpoint()\na = rank * 2\nb = a + 1"
    answers = ["all n", "p a + 100", "all p a + 100", "rank 2", "p a + 200", "rank 7", "ranks", "all", "c all"]
    seen = debugged.converse(cell, *LEAVE_BREAKPOINT, *answers)
    assert seen.shown.status == "ok"
    prompts = seen.prompts[len(LEAVE_BREAKPOINT) :]
    assert [prompt.split(",")[0] for prompt in prompts] == ["rank 0 of 3"] * 4 + ["rank 2 of 3"] * 5
    assert "[rank 0]\n100\n[rank 1]\n102\n[rank 2]\n104\n" in seen.text
    assert "204\n" in seen.text
    assert "ddip: there is no rank 7; at a prompt: ranks 0-2" in seen.text
    assert "ddip: all needs a command, as in all p loss" in seen.text
    assert "ranks 0-2: at a prompt, cell [" in seen.text


def test_one_rank_steps_over_a_collective_of_all(debugged: Notebook) -> None:
    cell = "%%dip\nx = torch.ones(1)\nbreakpoint()\ndist.all_reduce(x)\ny = x + rank"
    seen = debugged.converse(cell, *LEAVE_BREAKPOINT, "n", "n", "n", "all p x.item()", "c all")
    assert seen.shown.status == "ok", seen.shown.message
    assert "3.0" in seen.text
    prompts = seen.prompts[len(LEAVE_BREAKPOINT) :]
    assert [prompt.split(",")[0] for prompt in prompts[:3]] == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]
    assert "ddip: rank 0 continues; the prompt is rank 1's" in seen.text


@pytest.mark.parametrize(
    "how", ["q", *(pytest.param(how, marks=pytest.mark.grid) for how in ("stop button", "end of input"))]
)
def test_leaving_the_prompt_ends_the_cell_everywhere(debugged: Notebook, how: str) -> None:
    answer = {"q": "q", "stop button": debugged.interrupt, "end of input": None}[how]
    seen = debugged.converse("%%dip\nkept = rank\nif rank == 1: breakpoint()\ndist.barrier()\nlate = 1", answer)
    assert (seen.shown.error, len(seen.prompts)) == ("CellInterrupted", 1)
    debugged.ok("%%dip\nassert kept == rank and 'late' not in globals()")
    debugged.ok(PROOF)


def test_break_on_limits_the_ranks_that_stop(debugged: Notebook) -> None:
    seen = debugged.converse("%%dip --break-on 1-2\nbreakpoint()\na = 1", "c all")
    assert (seen.shown.status, len(seen.prompts)) == ("ok", 1)
    assert "ranks 1, 2 have stopped" in seen.text
    assert "--break-on" in debugged.fails("%%dip --break-on 7\npass").message


@pytest.mark.grid(in_ci=True)
def test_no_alarm_while_the_user_thinks(debugged: Notebook) -> None:
    debugged.ok("%config DipMagics.stall_timeout = 1\n%config DipMagics.failure_grace = 0.2")
    cell = "%%dip --timeout 3\nif rank == 1: breakpoint()\ndist.barrier()\nif rank == 2: time.sleep(0)"
    debugged.ok("%%dip\nimport time")
    seen = debugged.converse(cell, lambda: (time.sleep(4), debugged.client.input("c")))
    assert seen.shown.status == "ok", seen.shown.message
    assert "no rank has made progress" not in seen.shown.text
    cell_seconds, rank_seconds = debugged.ok(
        "%dipper g\nprint(g.cells[-1].seconds, g.cells[-1].seconds_by_rank[0])"
    ).stdout.split()
    assert float(cell_seconds) < 3 and float(rank_seconds) < 3
    debugged.ok("%config DipMagics.stall_timeout = 10\n%config DipMagics.failure_grace = 1")


@pytest.mark.slow
def test_a_timeout_still_holds_after_a_pause(debugged: Notebook) -> None:
    cell = "%%dip --timeout 1\nimport time\nif rank == 2: breakpoint()\ntime.sleep(30)"
    assert debugged.converse(cell, "c").shown.error == "CellTimeout"
    debugged.ok(PROOF)


@pytest.mark.grid(in_ci=True)
def test_a_failed_rank_is_reported_after_the_pause(debugged: Notebook) -> None:
    cell = "%%dip\nif rank == 1: breakpoint()\nif rank == 2: 1 / 0\ndist.barrier()"
    seen = debugged.converse(cell, "ranks", "c")
    assert len(seen.prompts) == 2
    assert "rank 2: ZeroDivisionError" in seen.shown.message
    debugged.ok(PROOF)


@pytest.mark.grid(in_ci=True)
def test_the_prompt_ends_when_its_rank_ends(debugged: Notebook) -> None:
    pids = [int(pid) for pid in debugged.ok("%dipper g\nprint(*[member.pid for member in g.members])").stdout.split()]
    cell = "%%dip\nif rank == 1: breakpoint()\ndist.barrier()"
    seen = debugged.converse(cell, lambda: os.kill(pids[1], signal.SIGKILL))
    assert "ddip: rank 1 no longer runs the cell" in seen.text
    assert "rank 1: RankEnded" in seen.shown.message
    debugged.ok("%makedip --repair")
    debugged.ok(f"%%dip\n{SETUP}")
    debugged.ok(PROOF)


def begin_in_background(notebook: Notebook, cell: str) -> tuple[int, str]:
    """Run a background cell until it has asked, which may be before or after its magic has returned.

    Return its number and what it shows.
    """
    begun = notebook.begin(cell, allow_stdin=True)
    shown = notebook.finish(begun)
    return shown.number, shown.text if "%dipdebug" in shown.text else notebook.late(begun, "%dipdebug")


@pytest.mark.slow
def test_a_background_cell_waits_for_dipdebug(debugged: Notebook) -> None:
    cell = "%%dip --bg\nfor i in range(3):\n    if rank == 1 and i == 1:\n        breakpoint()\n    dist.barrier()"
    number, notice = begin_in_background(debugged, cell)
    line = 3 if LEAVE_BREAKPOINT else 4
    assert f"rank 1 has stopped in the debugger at cell [{number}] line {line}; %dipdebug {number} opens" in notice
    assert debugged.fails("%dipdebug 1").error == "BadInput"
    seen = debugged.converse("%dipdebug", "p i + 70", "n", "c")
    assert (seen.shown.status, len(seen.prompts)) == ("ok", 3)
    assert "71\n" in seen.text
    debugged.ok("%dipwait")


def test_an_answered_background_cell_leaves_the_prompt(debugged: Notebook) -> None:
    cell = "%%dip --bg -r 1\nimport time\nanswer = input('?')\ntime.sleep(60)"
    number, notice = begin_in_background(debugged, cell)
    assert "rank 1 asks: ?" in notice
    seen = debugged.converse("%dipdebug", "yes", timeout=20)
    assert (seen.shown.status, seen.prompts) == ("ok", ["rank 1: ?"])
    debugged.ok(f"%dipstop {number}")
    debugged.ok("%%dip -r 1\nassert answer == 'yes'")


@pytest.mark.parametrize("how", ["kept", "%pdb on"])
def test_an_error_without_frames_opens_no_prompt(debugged: Notebook, how: str) -> None:
    debugged.ok("%config DipMagics.keep_frames = True" if how == "kept" else "%%dip\n%pdb on")
    seen = debugged.converse("%%dip -r 1\n1 +")
    assert (seen.prompts, "SyntaxError" in seen.shown.message) == ([], True)
    assert "no frames to debug" in debugged.converse("%dipdebug").shown.message
    debugged.ok("%config DipMagics.keep_frames = False" if how == "kept" else "%%dip\n%pdb off")


@pytest.mark.grid(in_ci=True)
def test_frames_of_an_error_are_kept_on_request(debugged: Notebook) -> None:
    failing = (
        "%%dip\nimport weakref\nclass Held: pass\ndef fails():\n    global seen\n    held = Held()\n"
        "    seen = weakref.ref(held)\n    raise ValueError('x')\nif rank == 1: fails()\ndist.barrier()"
    )
    debugged.fails(failing)
    assert "the frames of cell" in debugged.converse("%dipdebug").shown.message
    debugged.ok("%config DipMagics.keep_frames = True")
    debugged.fails(failing)
    assert "rank 2 has not failed; type %dipdebug -r 1" in debugged.fails("%dipdebug -r 2").message
    for ending in ("c", "q", None):
        seen = debugged.converse("%dipdebug", "p held", "u", ending)
        assert (seen.shown.status, len(seen.prompts)) == ("ok", 3)
        assert re.search(r"Held object", seen.text) and seen.prompts[0].startswith("rank 1 of 3, fails() cell [")
    debugged.ok("%config DipMagics.keep_frames = False")
    debugged.ok("%%dip -r 1\nassert seen() is None, seen()")
    debugged.ok(PROOF)


def test_pdb_on_opens_the_debugger_at_an_error(debugged: Notebook) -> None:
    seen = debugged.converse("%%dip\n%pdb on\nw = 1 / (rank - 1)\ndist.barrier()", "p rank", "q")
    assert len(seen.prompts) == 2
    assert "rank 1: ZeroDivisionError" in seen.shown.message
    again = debugged.converse("%%dip\n%debug", "p rank + 40", "q")
    assert (again.shown.status, len(again.prompts)) == ("ok", 2)
    assert "41" in again.text
    debugged.ok("%%dip\n%pdb off")
    debugged.ok(PROOF)


def test_the_debugger_leaves_no_frame_behind(debugged: Notebook) -> None:
    cell = (
        "%%dip\nimport weakref, sys\nclass Held: pass\ndef stops():\n    global seen\n    held = Held()\n"
        "    seen = weakref.ref(held)\n    breakpoint()\n    return 1\nstops()"
    )
    seen = debugged.converse(cell, "n", "interact", "1 + 1", None, "c all", "c all", "c all")
    assert seen.shown.status == "ok", seen.shown.message
    debugged.ok(
        "%%dip\nimport gc; gc.collect()\nassert seen() is None and sys.gettrace() is None and not hasattr(sys, 'ps1')"
    )


@pytest.mark.grid(in_ci=True)
def test_without_stdin_there_is_one_error_at_once(notebook: Notebook) -> None:
    assert "UsageError: no one can answer a debugger here" in notebook.fails("%%dip\nbreakpoint()").message
    assert "UsageError: no one" in notebook.fails("%%dip\nimport pdb; pdb.set_trace()").message
    assert "StdinNotImplementedError" in notebook.fails("%%dip\ninput()").message
    notebook.ok(
        "%%dip\nimport os; os.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\ndel os.environ['PYTHONBREAKPOINT']"
    )


@pytest.mark.parametrize(
    "code",
    [
        "import pdb; pdb.set_trace()\na = 1",
        "from IPython.core.debugger import set_trace; set_trace()\na = 1",
        "import pdb; pdb.Pdb().set_trace()\na = 1",
        "async def stops():\n    breakpoint()\n    return 1\nawait stops()",
        "def stops(): breakpoint(); print('x')\nt = threading.Thread(target=stops); t.start(); t.join()",
        "def hook(g):\n    breakpoint()\n    return g\nw = torch.ones(2, requires_grad=True)\nw.register_hook(hook)\n"
        "w.sum().backward()",
        "list(torch.utils.data.DataLoader(Data()))",
        "breakpoint()",
        "for i in range(1): breakpoint()",
        "%time breakpoint()\na = 1",
    ],
)
def test_breakpoints_stop_anywhere_in_users_code(debugged: Notebook, code: str) -> None:
    debugged.ok(
        "%%dip\nimport threading\nclass Data(torch.utils.data.Dataset):\n    def __len__(self): return 1\n"
        "    def __getitem__(self, index):\n        breakpoint()\n        return index"
    )
    seen = debugged.converse(f"%%dip -r 2\n{code}", "p 7 * 191", "c")
    assert (seen.shown.status, len(seen.prompts)) == ("ok", 2), seen
    assert "1337" in seen.text


def test_steps_below_a_cell_magic_stay_in_the_cell(debugged: Notebook) -> None:
    cell = "%%dip -r 1\n%%capture out\nprint(1)\nbreakpoint()\na = 1\nb = 2"
    seen = debugged.converse(cell, *LEAVE_BREAKPOINT, "n", "c")
    assert seen.shown.status == "ok"
    places = [re.findall(r"cell \[\d+\] line (\d)", prompt) for prompt in seen.prompts]
    assert places[len(LEAVE_BREAKPOINT) :] == [["3"], ["4"]], seen.prompts


def test_quit_in_a_recursive_debugger_returns_to_the_outer_one(debugged: Notebook) -> None:
    debugged.ok("%%dip\ndef double(a):\n    b = 2 * a\n    return b")
    cell = "%%dip -r 1\nouter = 5\nbreakpoint()\nlate = 1"
    seen = debugged.converse(
        cell, *LEAVE_BREAKPOINT, "debug double(4)", "s", "s", "n", "p a + 300", "q", "p outer + 100", "c"
    )
    assert seen.shown.status == "ok", seen.shown.message
    assert seen.prompts[-1].endswith(" (Pdb) ") and "304\n" in seen.text and "105\n" in seen.text
    debugged.ok("%%dip -r 1\nassert late == 1")


def test_the_prompt_of_a_list_of_commands(debugged: Notebook) -> None:
    cell = "%%dip -r 1\nbreakpoint()\na = 1\nfor k in range(5):\n    b = k\nc = 3"
    seen = debugged.converse(cell, "b 4, k == 3", "commands", "p k + 1000", "end", "c", "c")
    assert (seen.shown.status, [prompt[-6:] for prompt in seen.prompts[2:4]]) == ("ok", ["(com) "] * 2)
    assert "\n1003\n" in seen.text


def test_a_forked_worker_names_what_to_change(debugged: Notebook) -> None:
    debugged.ok(
        "%%dip\nclass Data(torch.utils.data.Dataset):\n    def __len__(self): return 1\n"
        "    def __getitem__(self, index):\n        breakpoint()\n        return index"
    )
    cell = "%%dip -r 0\nlist(torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context='fork'))"
    seen = debugged.converse(cell, "c")
    assert "data-loader worker 0" in seen.shown.message and "num_workers=0" in seen.shown.message
    assert not seen.prompts


def test_a_foreign_debugger_ends_with_the_stop_button(debugged: Notebook) -> None:
    cell = """%%dip
        import pdb
        class Own(pdb.Pdb.__mro__[2]):
            def _cmdloop(self):
                while True:
                    try: return self.cmdloop()
                    except KeyboardInterrupt: pass
        if rank == 0: Own().set_trace()
        x = 1
    """
    seen = debugged.converse(cell, debugged.interrupt)
    assert seen.shown.status == "error"
    debugged.ok(PROOF)


def test_collectives_wait_longer_than_half_an_hour(debugged: Notebook) -> None:
    debugged.ok(
        "%%dip\nfor group in (dist.group.WORLD, dist.new_group()):\n"
        "    assert group._get_backend(torch.device('cpu')).options._timeout.days == 1"
    )


def test_the_prompt_names_a_timeout_of_the_user(debugged: Notebook) -> None:
    debugged.ok("%%dip\nimport datetime\nown = dist.new_group(timeout=datetime.timedelta(seconds=90))")
    seen = debugged.converse("%%dip -r 0\nbreakpoint()\na = 1", "c")
    assert "ddip: other ranks wait 90 s at most in collectives: a group has this timeout=" in seen.text
    debugged.ok("%%dip\ndist.destroy_process_group(own)\ndel own")
    assert "at most in collectives" not in debugged.converse("%%dip -r 0\nbreakpoint()\na = 1", "c").text
