"""Exceptions of ranks: reported soon, reported once, and never lost within a magic."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

import ddip
from ddip.errors import CellError, CellInterrupted, TransferError
from ddip.rank.streams.streams import MAX_LIMITERS

from .meanwhile import meanwhile, press_stop
from .notebook import Notebook
from .rank_errors import raises_on_ranks
from .variants import few

PROOF = "import torch, torch.distributed as dist\ny = torch.ones(1)\ndist.all_reduce(y)\nassert y.item() == world_size"


@pytest.fixture(autouse=True)
def short_time_limits(group: ddip.Group) -> None:
    group.options.failure_grace, group.options.stall_timeout = 0.1, 10.0


# -- with what hidden ranks printed before


def test_an_error_shows_the_last_output_of_hidden_ranks(cells: ddip.Group) -> None:
    with raises_on_ranks({1: "ValueError"}) as caught:
        cells.run("for i in range(20): print('\\x1b[31mline', i)\nif rank == 1: raise ValueError")
    lines = caught.value._render_traceback_()
    assert lines[:11] == ["[rank 1] last output:", *(f"line {i}" for i in range(10, 20))]
    with raises_on_ranks({0: "ValueError", 1: "ValueError"}) as caught:
        cells.run("print('shown')\nraise ValueError", show_ranks=[0, 1])
    assert not any(error.output for error in caught.value.by_rank.values())


@pytest.mark.grid
def test_a_time_out_shows_the_last_output_of_hidden_ranks(cells: ddip.Group) -> None:
    cells.run("import time")
    with pytest.raises(ddip.CellTimeout) as caught:
        cells.run("print('step', rank, end='\\r')\nwhile True: time.sleep(0.01)", timeout=1)
    assert caught.value._render_traceback_()[:2] == ["[rank 1] last output:", "step 1"]


# -- in bounded time


@pytest.mark.grid(in_ci=True)
@pytest.mark.native("sockets")
def test_an_unblocked_rank_sends_no_traceback_and_slows_nothing(cells: ddip.Group) -> None:
    def count_objects() -> list[int]:
        cells.run("import gc; count = len(gc.get_objects())")
        return [values["count"] for values in cells.pull_all(["count"], [0, 1])[0]]

    cells.run("import torch, torch.distributed as dist\nx = torch.ones(3)")
    before = count_objects()
    with raises_on_ranks({0: "ValueError"}, {1: "all_reduce"}) as caught:
        cells.run("if rank == 0: raise ValueError\ndist.all_reduce(x)")
    assert "\x1b" in caught.value.by_rank[0].traceback  # IPython's colored traceback
    # No traceback, or a plain one if rank 1 had lost rank 0 before
    assert "\x1b" not in caught.value.by_rank[1].traceback
    with pytest.raises(ddip.CellError) as caught:
        cells.run("torch.nn.Linear(2, 2)(x)")
    assert "torch/nn/modules/linear.py" in caught.value.by_rank[0].traceback
    cells.run("pass")
    for now, then in zip(count_objects(), before, strict=True):
        assert now < then + 6_000  # a leak was 50 000 objects


@pytest.mark.grid(in_ci=True)
def test_failed_or_long_cells_leave_nothing_on_a_rank(cells: ddip.Group) -> None:
    """IPython keeps each traceback and all printed text, which would slow down later cells."""
    count = "import gc\ngc.collect()\ncount = sum(type(one) in (dict, list) for one in gc.get_objects())"

    def fail_often(times: int) -> None:
        for _ in range(times):
            with pytest.raises(ddip.CellError):
                cells.run("for _ in range(200): print('x')\nraise ValueError")

    def count_containers() -> list[int]:
        cells.run(count)
        return [values["count"] for values in cells.pull_all(["count"], [0, 1])[0]]

    for _ in range(MAX_LIMITERS):  # whose output budgets are kept
        cells.run("pass")
    fail_often(1)
    before = count_containers()
    fail_often(15)
    for now, then in zip(count_containers(), before, strict=True):
        assert now < then + 15  # a leak was two per cell


SLOW = {
    "sleeps": "class Odd(Exception):\n    def __str__(self): time.sleep(1000)\nraise Odd",
    "computes": "class Odd(Exception):\n    def __str__(self):\n        while True: pass\nraise Odd",
    "is long": "raise ValueError('x' * 10**9)",
    "is a chain": (
        "error = None\nfor i in range(2000):\n    link = ValueError(i)\n    link.__cause__ = error\n    error = link\n"
        "raise error"
    ),
}


@pytest.mark.grid
@pytest.mark.parametrize("what", few(SLOW, "sleeps"))
def test_an_error_with_a_slow_text_costs_no_rank(cells: ddip.Group, what: str) -> None:
    cells.run("import time\nkept = rank")
    began = time.monotonic()
    with pytest.raises(ddip.CellError, match="^ranks 0, 1: "):
        cells.run(SLOW[what])
    assert time.monotonic() < began + 30  # it used to take more than 40 s on an idle machine
    cells.run(f"{PROOF}\nassert kept == rank")


@pytest.mark.grid
def test_a_stop_while_an_error_is_formatted_costs_no_rank(cells: ddip.Group, tmp_path: Path) -> None:
    thread = meanwhile(lambda: {f.name for f in tmp_path.iterdir()} == {"0", "1"}, press_stop)
    with pytest.raises(CellInterrupted):
        cells.run(f"""
            import pathlib, time
            kept = rank
            folder = pathlib.Path({str(tmp_path)!r})
            class Odd(Exception):
                def __str__(self):
                    (folder / str(rank)).touch(); time.sleep(1000)
            raise Odd
        """)
    thread.join()
    cells.run(f"{PROOF}\nassert kept == rank")


def test_an_interrupt_is_shown_in_a_few_lines(cells: ddip.Group, tmp_path: Path) -> None:
    """IPython takes 4 s to render a traceback of a stop within torch's imports."""
    thread = meanwhile((tmp_path / "begun").exists, press_stop)
    with pytest.raises(CellInterrupted) as caught:
        cells.run(f"""
            import pathlib
            if rank == 0: pathlib.Path({str(tmp_path / "begun")!r}).touch()
            while True: pass
        """)
    thread.join()
    lines = caught.value.by_rank[0].traceback.splitlines()
    assert lines[-1] == "KeyboardInterrupt" and len(lines) < 6 and "\x1b" not in "".join(lines)


# -- exceptions that must not be lost


HIDDEN = {
    "%%capture": "%%capture\n{}",
    "%%capture, nested": "%%capture\nget_ipython().run_cell_magic('time', '', {!r})",
    "%%time": "%%time\n{}",
    "%%timeit": "%%timeit -n1 -r1\n{}",
    "%%prun": "%%prun\n{}",
    "%run": "with open(f'script{{rank}}.py', 'w') as f: _ = f.write({!r})\n%run -i script{{rank}}.py",
}


@pytest.mark.parametrize("magic", few(HIDDEN, "%%capture, nested", "%%time"))
@pytest.mark.native("sockets")
def test_an_error_within_a_magic_fails_the_whole_cell(cells: ddip.Group, magic: str, tmp_path: Path) -> None:
    code = "if rank == 0: raise ValueError('hidden')\nelse: dist.barrier()\n"
    cells.run(f"""
        import os, torch.distributed as dist
        kept = rank
        os.chdir({str(tmp_path)!r})
    """)
    with raises_on_ranks({0: "ValueError"}, {1: ""}) as e:
        cells.run(HIDDEN[magic].format(code), timeout=30)
    assert "ValueError" in e.value.by_rank[0].traceback and "ddip" not in e.value.by_rank[0].traceback
    # %run -i leaves __file__, which spawn would run
    cells.run(f"{PROOF}\nassert kept == rank\nglobals().pop('__file__', None)")


def test_an_error_within_a_magic_ends_the_cell_there(cells: ddip.Group) -> None:
    with raises_on_ranks(dict.fromkeys((0, 1), "ZeroDivisionError")):
        cells.run("went_on = False\nget_ipython().run_cell_magic('capture', 'out', 'print(3); 1 / 0')\nwent_on = True")
    cells.run("assert not went_on and out.stdout.startswith('3')")


def test_a_stop_within_a_magic_stops_the_cell(cells: ddip.Group, tmp_path: Path) -> None:
    thread = meanwhile((tmp_path / "begun").exists, press_stop)
    with pytest.raises(CellInterrupted):
        cells.run(
            "went_on = False\nget_ipython().run_cell_magic('capture', '', '''import pathlib, time\n"
            f"if rank == 1: pathlib.Path({str(tmp_path / 'begun')!r}).touch()\ntime.sleep(1000)''')\nwent_on = True"
        )
    thread.join()
    cells.run("assert rank == 0 or not went_on")


CAUGHT = {
    "run_cell": "assert not get_ipython().run_cell('1 / 0').success",
    "showtraceback": "try: 1 / 0\n    except ZeroDivisionError: get_ipython().showtraceback()",
}


@pytest.mark.grid(in_ci=True)
@pytest.mark.parametrize("how", ["run_cell", pytest.param("showtraceback", marks=pytest.mark.grid)])
@pytest.mark.native("sockets")
def test_a_caught_error_fails_the_cell_only_if_ranks_wait(
    cells: ddip.Group, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run(f"import time, torch.distributed as dist\nformer = dist.group.WORLD\nif rank == 0:\n    {CAUGHT[how]}")
    assert "ZeroDivisionError" in capsys.readouterr().err
    cells.run(f"assert dist.group.WORLD is former\nif rank == 0:\n    {CAUGHT[how]}")
    with raises_on_ranks({0: "ZeroDivisionError"}, {1: "barrier"}) as caught:
        cells.run(
            f"if rank == 0:\n    print('mine')\n    {CAUGHT[how]}\nelse: dist.barrier()", timeout=30, show_ranks=[]
        )
    assert caught.value.by_rank[0].output == "mine"
    cells.run(PROOF)


def test_an_object_that_cannot_be_displayed_shows_an_error(
    cells: ddip.Group, capsys: pytest.CaptureFixture[str]
) -> None:
    cells.run("""
        class Odd:
            def _repr_html_(self): 1 / 0
        display(Odd()); went_on = True
    """)
    assert "division by zero" in capsys.readouterr().err
    cells.run("assert went_on")


# -- invalid characters


def test_text_that_utf8_cannot_carry_arrives_escaped(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    """Lone surrogates come from file names, and from tokenizers that split a character."""
    cells.run(
        r"import sys; print('a\ud800b'); print('c\udfffd', file=sys.stderr)" + "\n"
        r"display({'text/plain': 'e\ud800f'}, raw=True)"
    )
    captured = capsys.readouterr()
    assert r"a\ud800b" in captured.out and r"c\udfffd" in captured.err and r"e\ud800f" in captured.out
    for half in ("ud800", "udcff"):
        with raises_on_ranks(dict.fromkeys((0, 1), "ValueError")) as caught:
            cells.run(rf"print('x\{half}y'); raise ValueError('x\{half}y')")
        str(caught.value).encode(), "".join(caught.value._render_traceback_()).encode()
    cells.run("""
        class Odd:
            def __reduce__(self): raise ValueError(chr(0xd800))
        odd = Odd()
    """)
    with pytest.raises(TransferError, match="odd") as refused:
        cells.pull(["odd"])
    str(refused.value).encode()
    cells.run(r"odd = 'x\ud800y'; odd")  # Python 3.13 compiles no docstring with half a character
    assert r"x\ud800y" in capsys.readouterr().out
    cells.run(PROOF)


# -- a failure within gloo


@pytest.mark.native("sockets")
def test_a_rank_failing_in_gloo_itself_appears_as_failed(notebook: Notebook) -> None:
    notebook.ok("%%dip\nimport time, torch, torch.distributed as dist")
    shown = notebook.fails("""
        %%dip -S all
        print('here')
        if rank == 0: raise RuntimeError('[gloo/transport/tcp/pair.cc] its own')
        dist.barrier()
    """)
    assert "rank 0: RuntimeError: [gloo/transport/tcp/pair.cc] its own; ranks 1, 2 were blocked" in shown.message
    pages = [bundle["text/html"] for bundle in shown.data if "text/html" in bundle]
    for page in (page for page in pages if "released" in page or "rank 0 ✗" in page):
        (own,) = re.findall(r'<div class="ddip-shown" id="[^"]*-s0"[^>]*>.*?</div>', page, re.DOTALL)
        assert "rank 0 ✗" in page and "released" not in own
    assert "rank 0 ✗" in pages[-1] and "its own" in own and "ranks 1, 2 ✗" not in pages[-1]


@pytest.mark.parametrize("name", ["hist", "who", "page"])
def test_a_missing_variable_is_not_mistaken_for_a_magic(cells: ddip.Group, name: str) -> None:
    cells.run(f"if rank == 0: {name} = [1]")
    with raises_on_ranks({1: "NameError"}):
        cells.run(name)


def test_magics_run_on_ranks_by_their_percent_sign(cells: ddip.Group, capsys: pytest.CaptureFixture[str]) -> None:
    cells.run("mine = 1\n%who int")
    assert "mine" in capsys.readouterr().out
    with raises_on_ranks(dict.fromkeys((0, 1), "SyntaxError")):
        cells.run("who int")


@pytest.mark.parametrize(
    "call",
    few(
        ["broadcast(torch.ones(1), src=7)", "all_reduce(torch.ones(1) > 0, op=dist.ReduceOp.AVG)"],
        "broadcast(torch.ones(1), src=7)",
    ),
)
def test_no_frame_of_ddip_is_in_a_collectives_traceback(cells: ddip.Group, call: str) -> None:
    with pytest.raises(CellError) as caught:
        cells.run(f"import torch, torch.distributed as dist\ndist.{call}")
    for error in caught.value.by_rank.values():
        assert error.name == "RuntimeError" and "distributed_c10d.py" in error.traceback
        assert "process_group" not in error.traceback
