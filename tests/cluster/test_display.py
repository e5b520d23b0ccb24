"""The output of a cell on ranks, as messages of a real kernel: order, kinds, IDs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from .leftovers import wait_until
from .notebook import Notebook

TABS = "── "


def message_kinds(notebook: Notebook, code: str) -> list[tuple[str, object]]:
    """Return the type of each message, with its text or its MIME types."""
    return [
        (kind, content["text"] if kind == "stream" else sorted(content.get("data", content)))
        for kind, content in notebook.ok(code).messages
    ]


def last_text(notebook: Notebook, code: str) -> str:
    """Return the text of the last display, which shows the tabs."""
    return str(notebook.ok(code).data[-1]["text/plain"])


# -- one rank, as in the kernel itself


def test_everything_arrives_in_order(notebook: Notebook) -> None:
    shown = message_kinds(
        notebook,
        "%%dip\nimport sys\nfrom IPython.display import HTML, display\nprint('one')\ndisplay(HTML('<b>two</b>'))\n"
        "print('three', file=sys.stderr)\nprint('four')\ndisplay({'application/json': {'a': 1}}, raw=True)\n"
        "print('five')\n'six'",
    )
    assert shown[:2] == [("stream", "one\n"), ("display_data", ["text/html", "text/plain"])]
    assert shown[2:4] == [("stream", "three\n"), ("stream", "four\n")]
    assert shown[4:6] == [("display_data", ["application/json"]), ("stream", "five\n")]
    assert shown[6] == ("display_data", ["text/plain"]) and len(shown) == 7


def test_stdout_and_stderr_stay_in_order(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        import sys
        for i in range(5):
            print('out', i)
            print('err', i, file=sys.stderr, flush=True)
    """)
    expected = [f"{name} {i}\n" for i in range(5) for name in ("out", "err")]
    assert [content["text"] for _, content in shown.messages] == expected


def test_both_streams_stay_in_order_in_any_sending_order(notebook: Notebook) -> None:
    """Delay the sending thread: a flush requested by an earlier line may come at any time."""
    shown = notebook.ok("""
        %%dip
        import sys, threading
        written = threading.Event()
        def flush_late():
            written.wait()
            sys.stderr._flush()
        sys.stdout.pub_thread.schedule(flush_late)
        for i in range(3):
            print('out', i)
            print('err', i, file=sys.stderr)
        written.set()
    """)
    expected = [f"{name} {i}\n" for i in range(3) for name in ("out", "err")]
    assert [content["text"] for _, content in shown.messages] == expected


def test_lines_flushed_in_quick_succession_reach_the_page_together(notebook: Notebook) -> None:
    """Each message costs the notebook a millisecond, and the page as much."""
    shown = notebook.ok("%%dip\nfor i in range(100): print(i, flush=True)")
    assert shown.text.split() == [str(i) for i in range(100)]
    assert len(shown.messages) < 50


def test_output_arrives_while_the_cell_runs(notebook: Notebook) -> None:
    running = notebook.begin("%%dip\nimport time\nprint('begun')\nwhile True: time.sleep(0.01)")
    assert notebook.finish(running, until="begun").status == ""
    notebook.interrupt()
    assert notebook.finish(running).error == "CellInterrupted"


def test_output_of_c_code_and_subprocesses_is_shown(notebook: Notebook) -> None:
    text = notebook.ok(
        "%%dip\nimport os, subprocess\nos.write(1, b'from C\\n')\nsubprocess.run(['echo', 'from a shell']); None"
    ).stdout
    assert "from C\nfrom a shell\n" in text
    assert "from a pipe" in notebook.ok("%%dip\n!echo from a pipe").stdout


def test_output_of_forked_processes_arrives_exactly_once(notebook: Notebook) -> None:
    shown = notebook.ok(
        "%%dip\nimport multiprocessing, sys\n"
        "def work(): print('from a child'); print('its error', file=sys.stderr); print('x' * 100_000)\n"
        "print('before')\n"
        "child = multiprocessing.get_context('fork').Process(target=work); child.start(); child.join()\n"
        "assert child.exitcode == 0"
    )
    text = shown.stdout + shown.stderr
    assert [text.count(written) for written in ("before", "from a child", "its error")] == [1] * 3
    assert text.count("x" * 100_000) == 1


def test_a_later_cell_can_update_a_display_by_id(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        handle = display('a', display_id='mine')
        handle.update('b')
    """).messages
    assert [(kind, content["data"]["text/plain"]) for kind, content in shown] == [
        ("display_data", "'a'"),
        ("update_display_data", "'b'"),
    ]
    assert {content["transient"]["display_id"] for _, content in shown} == {"mine"}
    ((kind, content),) = notebook.ok("%%dip\nhandle.update('c')").messages
    assert (kind, content["transient"]["display_id"]) == ("update_display_data", "mine")


def test_clear_output_arrives(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        from IPython.display import clear_output
        print(1)
        clear_output(wait=True)
        print(2)
        clear_output()
    """).messages
    parts = [str(content.get("wait", content.get("text"))) for _, content in shown]
    assert "".join(parts) == "1\nTrue2\nFalse"


@pytest.mark.grid(in_ci=True)
def test_figures_are_shown_as_in_the_notebook(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        import matplotlib.pyplot as plt
        plt.plot([1, 2])
        plt.show()
        print('between')
        plt.plot([3]);
    """)
    assert [("image/png" in bundle) for bundle in shown.data] == [True, True]
    assert shown.stdout == "between\n"
    frame = notebook.ok("""
        %%dip
        import pandas
        pandas.DataFrame({'a': [1]})
    """).data[0]
    assert "<table" in frame["text/html"]


def test_widgets_work_both_ways(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        import ipywidgets
        slider = ipywidgets.IntSlider(3)
        slider.observe(lambda change: print('now', change['new'], 'on', rank), 'value')
        slider
    """)
    model = shown.data[0]["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert model in [content["comm_id"] for kind, content in shown.messages if kind == "comm_open"]
    notebook.send_comm(model, {"method": "update", "state": {"value": 7}, "buffer_paths": []})
    notebook.ok("%%dip -r 0\nassert slider.value == 7")
    update = notebook.ok("%%dip -r 0\nslider.value = 9").messages
    assert [content["data"]["state"] for kind, content in update if kind == "comm_msg"] == [{"value": 9}]
    assert "slider" in notebook.fails("slider").message


def test_callbacks_print_to_the_cell_of_their_widget(notebook: Notebook) -> None:
    cell = notebook.begin(
        "%%dip\nimport ipywidgets\nbutton = ipywidgets.Button()\nbutton.on_click(lambda b: print('clicked'))\nbutton"
    )
    model = notebook.finish(cell).data[0]["application/vnd.jupyter.widget-view+json"]["model_id"]
    notebook.send_comm(model, {"method": "custom", "content": {"event": "click"}})
    assert notebook.late(cell, "clicked") == "clicked\n"


def test_help_is_shown_in_the_pager(notebook: Notebook) -> None:
    (page,) = notebook.ok("""
        %%dip
        def double(x):
            'Twice as much.'
            return 2 * x
        double?
    """).pages
    assert page["source"] == "page" and "Twice as much." in page["data"]["text/plain"]


# -- progress bars


def test_a_text_bar_is_one_display_ending_at_100_percent(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        from tqdm import tqdm
        print('before')
        for i in tqdm(range(2000)): pass
        print('after')
    """)
    assert shown.stdout == "before\nafter\n" and shown.stderr == ""
    assert len({content["transient"]["display_id"] for kind, content in shown.messages if kind != "stream"}) == 1
    assert shown.data[-1]["text/plain"].startswith("100%|") and "2000/2000" in shown.data[-1]["text/plain"]


def test_bars_of_tqdm_notebook_are_widgets_of_rank_0(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        from tqdm.auto import tqdm
        for i in tqdm(range(50)): pass
    """)
    opened = {content["comm_id"]: content["data"]["state"] for kind, content in shown.messages if kind == "comm_open"}
    assert [state["_model_name"] for state in opened.values()].count("FloatProgressModel") == 1
    assert any("50/50" in str(content["data"]) for kind, content in shown.messages if kind == "comm_msg")


def test_bars_of_fastprogress_are_updated(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip
        from fastprogress import progress_bar
        for i in progress_bar(range(50)): pass
    """)
    assert "100.00% [50/50" in shown.data[-1]["text/html"]
    assert [kind for kind, _ in shown.messages].count("display_data") <= 2  # the style and the bar


def test_bars_of_rich_are_drawn_into_one_widget(notebook: Notebook) -> None:
    cell = notebook.begin("%%dip\nfrom rich.progress import track\nfor i in track(range(50)): pass")
    shown = notebook.finish(cell)
    captured = [
        content["data"]["state"]["msg_id"]
        for kind, content in shown.messages
        if kind == "comm_msg" and "msg_id" in content["data"].get("state", {})
    ]
    assert set(captured) == {cell, ""}  # the page captures the output of this cell
    assert "100%" in [bundle["text/plain"] for bundle in shown.data if bundle["text/plain"]][-1]


def test_bars_within_bars_are_one_display(notebook: Notebook) -> None:
    code = (
        "%%dip\nfrom tqdm import tqdm\nfor epoch in tqdm(range(3), desc='outer', mininterval=0):\n"
        "    for x in tqdm(range(5), desc='inner', mininterval=0, leave=False): pass\nprint('after')"
    )
    shown = notebook.ok(code)
    assert shown.stdout == "after\n"
    assert len({content["transient"]["display_id"] for kind, content in shown.messages if kind != "stream"}) == 1
    assert re.match(r"outer: 100%\|.*3/3", shown.data[-1]["text/plain"])


# -- unusual output


def test_odd_output_does_not_end_the_cell(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip -S all
        from ddip.protocol.old_versions import find_comms
        from IPython.display import Image
        channel = find_comms(get_ipython().kernel)[1](target_name='odd')
        channel.send('just text')
        channel.close()
        display({'image/png': 'AAAA'}, metadata={'image/png': {'width': '50%'}}, raw=True)
        print('whole')
    """)
    assert 'width="50%"' in shown.data[-1]["text/html"] and "whole" in shown.data[-1]["text/plain"]


def test_a_nested_output_widget_belongs_to_the_page(notebook: Notebook) -> None:
    cell = notebook.begin(
        "%%dip -S all\nimport ipywidgets\nout = ipywidgets.Output()\nbox = ipywidgets.VBox([out])\ndisplay(box)\n"
        "with out: print('inside', rank)\nprint('outside')"
    )
    shown = notebook.finish(cell)
    opened = [content["data"]["state"]["_model_name"] for kind, content in shown.messages if kind == "comm_open"]
    assert opened.count("OutputModel") == 3
    captured = [c["data"]["state"].get("msg_id") for kind, c in shown.messages if kind == "comm_msg"]
    assert captured.count(cell) == 3
    assert sorted(re.findall(r"inside \d", shown.stdout)) == ["inside 0", "inside 1", "inside 2"]
    assert shown.data[-1]["text/plain"] == "── ranks 0-2 ──\noutside"


def test_an_error_in_a_widget_callback_is_shown(notebook: Notebook) -> None:
    cell = notebook.begin(
        "%%dip\nimport ipywidgets\nbutton = ipywidgets.Button()\nbutton.on_click(lambda b: 1 / 0)\nbutton"
    )
    model = notebook.finish(cell).data[0]["application/vnd.jupyter.widget-view+json"]["model_id"]
    notebook.send_comm(model, {"method": "custom", "content": {"event": "click"}})
    assert "ZeroDivisionError" in notebook.late(cell, "division by zero")


# -- by rank


def test_each_rank_has_a_tab_and_equal_ranks_share_one(notebook: Notebook) -> None:
    shown = notebook.ok("""
        %%dip -S all
        print('same' if rank else 'different')
        display({'text/html': '<i>x</i>'}, raw=True)
    """)
    assert shown.data[-1]["text/plain"].startswith("── rank 0 ──\ndifferent\n── ranks 1, 2 ──\nsame")
    labels, page = (bundle["text/html"] for bundle in shown.data[-2:])
    assert labels.count("<label") == 2 and page.count("<i>x</i>") == 2
    assert "ddip-ranks" in shown.data[0]["text/html"] and shown.data[0]["text/html"].count('type="radio"') == 3
    for rank in range(3):
        assert f'-{rank}"' in shown.data[0]["text/html"]
    assert {content["transient"].get("display_id") for kind, content in shown.messages[1:]} != {None}


@pytest.mark.slow
def test_pictures_and_errors_are_in_the_tabs(notebook: Notebook) -> None:
    shown = notebook.fails("""
        %%dip -S all
        import matplotlib.pyplot as plt
        plt.figure(figsize=(1, 1))
        plt.plot([rank])
        plt.show()
        if rank == 1: 1 / 0
    """)
    page = shown.data[-1]["text/html"]
    assert page.count('<img src="data:image/png;base64,') == 3
    assert "rank 1 ✗" in page and "division by zero" in page and "ZeroDivisionError" in shown.traceback
    assert shown.error == "CellError"


@pytest.mark.grid(in_ci=True)
@pytest.mark.native("sockets")
def test_waiting_for_a_failed_rank_is_not_a_failure(notebook: Notebook) -> None:
    shown = notebook.fails("""
        %%dip -S all
        import torch.distributed as dist
        if rank == 0: 1 / 0
        print('on')
        dist.barrier()
    """)
    text = shown.data[-1]["text/plain"]
    assert (
        text.startswith("── rank 0 ✗ ──\n---")
        and "\nZeroDivisionError: division by zero\n── ranks 1, 2 ──\non\n" in text
    )
    assert re.search(r"\non\nwas blocked in barrier, cell \[\d+\] line 4, until ddip aborted it$", text)


def test_tabs_are_updated_while_the_cell_runs(notebook: Notebook) -> None:
    running = notebook.begin("%%dip -S all\nimport time\nprint('begun', rank)\nwhile True: time.sleep(0.01)")
    notebook.finish(running, until="begun 2")
    notebook.interrupt()
    notebook.finish(running)


def test_clear_output_and_updates_are_each_ranks_own(notebook: Notebook) -> None:
    text = last_text(
        notebook,
        "%%dip -S all\nfrom IPython.display import clear_output, display\nprint('gone' if rank == 1 else 'stays')\n"
        "if rank == 1: clear_output()\nh = display(rank, display_id='same')\nh.update(10 + rank)",
    )
    assert text == "── rank 0 ──\nstays\n10\n── rank 1 ──\n11\n── rank 2 ──\nstays\n12"


def test_each_visible_rank_has_its_own_bar(notebook: Notebook) -> None:
    text = last_text(
        notebook, "%%dip -S all\nfrom tqdm import tqdm\nfor i in tqdm(range(100 + rank)): pass\nprint('done')"
    )
    for rank in range(3):
        assert re.search(rf"── rank {rank} ──\n100%\|.*{100 + rank}/{100 + rank} .*\ndone", text)
    text = last_text(
        notebook, "%%dip -S all\nfrom rich.progress import track\nprint('kept')\nfor i in track(range(9)): pass"
    )
    assert re.fullmatch(r"── ranks 0-2 ──\nkept\nWorking\.\.\. \S+ 100% \S+\n?", text)


def test_other_styles_label_or_group_output(notebook: Notebook) -> None:
    notebook.ok("%config DipMagics.style = 'labels'")
    shown = notebook.ok("""
        %%dip -S all
        print('a\\nb', end='')
    """)
    assert sorted(shown.stdout.splitlines()) == sorted(f"[rank {rank}] {line}" for rank in range(3) for line in "ab")
    bars = notebook.ok("""
        %%dip -S all
        from tqdm import tqdm
        for i in tqdm(range(100)): pass
        print('done')
    """)
    assert sorted(bars.stdout.splitlines()) == [f"[rank {rank}] done" for rank in range(3)]
    displays = {content["transient"]["display_id"]: content for kind, content in bars.messages if kind != "stream"}
    lines = "\n".join(content["data"]["text/plain"] for content in displays.values()).splitlines()
    assert len(lines) == 3 and all(re.match(r"\[rank \d\] 100%\|.*100/100", line) for line in lines)
    notebook.ok("%config DipMagics.style = 'grouped'")
    shown = notebook.ok("%%dip -S all\nprint('same' if rank else 'different')")
    assert shown.stdout == "── rank 0 ──\ndifferent\n── ranks 1, 2 ──\nsame\n"
    notebook.ok("%config DipMagics.style = 'auto'")


# -- large output


@pytest.mark.grid
def test_a_flood_keeps_its_beginning_and_its_end(notebook: Notebook) -> None:
    notebook.ok("%config DipMagics.max_output_chars = 20000")
    shown = notebook.ok("%%dip -r 0\nfor i in range(100_000): print('line', i)")
    lines = shown.stdout.splitlines()
    assert lines[0] == "line 0" and lines[-1] == "line 99999"
    (note,) = [bundle["text/plain"] for bundle in shown.data if "left out" in bundle["text/plain"]]
    assert note == f"… {100_000 - len(lines):,} lines left out …"
    assert len(shown.stdout) < 60_000
    text = last_text(notebook, "%%dip -S all\nfor i in range(30_000): print('line', i)")
    assert re.match("── ranks? .* ──\nline 0\n", text)
    assert text.endswith("\nline 29999") and "lines left out" in text
    notebook.ok("%config DipMagics.max_output_chars = 400000")


END_DURING_A_FLUSH = """%%dip -r 0
import sys, threading
stream, is_sending, has_ended = sys.stdout, threading.Event(), threading.Event()
send, end_cell = stream._send_limited, stream.end_cell
def send_slowly(text, parent):
    send(text, parent)
    if "flushed" in text:
        is_sending.set()
        assert has_ended.wait(60)
def end_and_continue(header):
    del stream._send_limited, stream.end_cell
    end_cell(header)
    has_ended.set()
stream._send_limited, stream.end_cell = send_slowly, end_and_continue
print("x" * 500_000)
print("flushed")
is_sending.wait(60)
print("the end")"""


def test_a_flood_keeps_text_written_during_the_last_flush(notebook: Notebook) -> None:
    assert notebook.ok(END_DURING_A_FLUSH).stdout.splitlines()[-2:] == ["flushed", "the end"]


def test_a_line_above_the_limit_keeps_both_ends(notebook: Notebook) -> None:
    shown = notebook.ok(
        "%%dip -r 0\nprint('start'); print('a' * 200_000 + 'b' * 100_000 + 'c' * 200_000); print('end')"
    )
    start, first, last, end = shown.stdout.splitlines()
    assert (start, set(first), set(last), end) == ("start", {"a"}, {"c"}, "end")
    note = f"… {500_000 - len(first) - len(last):,} characters left out …"
    assert note in [bundle["text/plain"] for bundle in shown.data]
    text = last_text(notebook, "%%dip -S all\nprint('a' * 200_000 + 'b' * 100_000 + 'c' * 200_000)")
    assert len(re.findall(r"── rank \d ──\na+\n… 100,00\d characters left out …\nc+", text)) == 3


# -- late output


def test_late_output_of_a_thread_goes_to_its_cell(notebook: Notebook) -> None:
    begin = (
        "import threading\ngo = threading.Event()\ndef late():\n    go.wait()\n    print('late')\n"
        "thread = threading.Thread(target=late)\nthread.start()"
    )
    cell = notebook.begin(f"%%dip\n{begin}")
    assert notebook.finish(cell).status == "ok"
    tabs = notebook.begin(f"%%dip -S all\nprint('tabs')\n{begin.replace('go', 'come')}")
    assert notebook.finish(tabs).status == "ok"
    assert notebook.ok("%%dip\nprint('next')\ngo.set(); come.set(); thread.join()").stdout == "next\n"
    notebook.begin("%%dip\npass")
    assert notebook.late(cell, "late\n") == "late\n"


def test_late_output_of_a_thread_goes_to_its_tabs(notebook: Notebook) -> None:
    tabs = notebook.begin(
        "%%dip -S all\nimport threading\nprint('early')\ngo = threading.Event()\n"
        "thread = threading.Thread(target=lambda: (go.wait(), print('late')))\nthread.start()"
    )
    assert notebook.finish(tabs).status == "ok"
    notebook.begin("%%dip\ngo.set(); thread.join()")
    assert "early\nlate" in notebook.late(tabs, "late")
    tabs = notebook.begin(
        "%%dip -S all\nprint('tabs')\ncome = threading.Event()\n"
        "thread = threading.Thread(target=lambda: (come.wait(), [print(i, flush=True) for i in range(9)]))\n"
        "thread.start()"
    )
    assert notebook.finish(tabs).status == "ok"
    notebook.begin("%%dip\ncome.set(); thread.join()")
    assert "6\n7\n8" in notebook.late(tabs, "6\n7\n8")


# -- temporary output


@pytest.mark.grid
def test_a_stall_notice_disappears_when_the_waiting_ranks_end(notebook: Notebook, tmp_path: Path) -> None:
    notebook.ok("%config DipMagics.stall_timeout = 1")
    os.mkfifo(tmp_path / "go")  # on a loaded machine, a loop that polls a file would seem to make progress
    cell = notebook.begin(f"%%dip\nopen({str(tmp_path / 'go')!r}).close()")
    notebook.finish(cell, until="the cell keeps waiting; the stop button ends the cell")
    (tmp_path / "go").open("w").close()
    shown = notebook.finish(cell)
    assert [bundle["text/plain"] for bundle in shown.data] == ["ddip: no rank made progress for 1 s or more"]
    assert shown.messages[0][0] == "update_display_data"
    notebook.ok("%config DipMagics.stall_timeout = 10")


def test_news_are_on_stdout_and_warnings_on_stderr(notebook: Notebook) -> None:
    notebook.ok("%dipsync")  # variables of earlier tests that differ: a fault may come before the state is recorded
    notebook.ok("""
        %%dip
        import torch
        from torch.nn.parallel import DistributedDataParallel as DDP
        model, x = DDP(torch.nn.Linear(1, 1)), torch.ones(1, 1)
    """)
    shown = notebook.fails("%%dip\nmodel(x).sum().backward(); model(x); 1 / 0")
    assert "ddip: the cell ended inside a training iteration" in shown.stdout and shown.stderr == ""
    shown = notebook.ok("%%dip\nfor rank in range(3): pass")
    assert "this cell overwrote rank" in shown.stderr and shown.stdout == ""
    notebook.ok("%%dip\nrank = torch.distributed.get_rank()")


# -- the ranks of a cell


@pytest.mark.grid
def test_a_long_cell_says_where_it_ran(notebook: Notebook) -> None:
    notebook.ok("%config DipMagics.report_after = 1000")
    assert notebook.ok("%%dip\n1").data[-1]["text/plain"].startswith("Out[")
    notebook.ok("%config DipMagics.report_after = 0.3")
    note = last_text(notebook, "%%dip\nimport time\ntime.sleep(0.3 + 0.7 * (rank == 1))")
    assert re.fullmatch(r"ranks 0-2 · \d\.\d+ s · slowest: rank 1", note)
    failed = notebook.fails("%%dip\ntime.sleep(0.3 + 0.7 * (rank == 1))\nassert rank")  # rank 1 has only waited
    assert re.fullmatch(r"ranks 0-2 · \d\.\d+ s", failed.data[-1]["text/plain"])
    note = last_text(notebook, "%%dip -r 2\ntime.sleep(0.4)")
    assert re.fullmatch(r"rank 2 · \d\.\d+ s", note)
    note = last_text(notebook, "%%dip -S all\nprint(1)\ntime.sleep(0.4)")
    assert re.search(r"\nranks 0-2 · \d\.\d+ s( · slowest: rank \d)?$", note)
    notebook.ok("%config DipMagics.report_after = 10")
    notebook.ok("%autodip on")
    assert re.match(r"ranks 0-2 · \d\.\d+ s", last_text(notebook, "pass"))
    notebook.ok("%autodip off")


# -- names defined on the other side


def test_a_missing_name_hints_at_the_other_side(notebook: Notebook) -> None:
    notebook.ok("only_here = 1\n")
    notebook.ok("%%dip\nonly_there = 1")
    assert notebook.fails("%%dip\nonly_here").message.endswith(
        "; only_here is a variable of the notebook; %dipush only_here copies it to every rank"
    )
    assert notebook.fails("only_there").stderr == (
        "ddip: only_there is a variable of the ranks; %dipull only_there copies rank 0's to the notebook\n"
    )
    assert notebook.fails("nowhere").stderr == ""
    assert "dipush" not in notebook.fails("%%dip\nnowhere").message


def ask_until_answered(notebook: Notebook, kind: str, code: str) -> Any:
    """Repeat a completion or help request until it is answered.

    ddip leaves out a rank that takes too long, which may be any rank on a busy machine.
    """
    reply: Any = {}

    def has_answered() -> bool:
        reply.update(notebook.ask(kind, code))
        return bool(reply.get("matches") or reply.get("found"))

    wait_until(has_answered, what=code)
    return reply


METHOD = ([".method"], ["thing.method"])
"""What Tab offers; IPython 7 repeats the object's name."""


def test_tab_and_help_know_the_names_of_rank_0(notebook: Notebook) -> None:
    notebook.ok("""
        %%dip
        class There:
            'Lives on the ranks.'
            def method(self): 'Does it.'
        thing = There()
    """)
    assert ask_until_answered(notebook, "complete", "%%dip -S all\nthing.me")["matches"] in (
        [".method"],
        ["thing.method"],
    )  # IPython 7 gives the whole name
    assert notebook.ask("complete", "thing.me")["matches"] == []
    assert notebook.ask("complete", "%%dip local\nthing.me")["matches"] == []
    assert "Does it." in ask_until_answered(notebook, "inspect", "%%dip\nthing.method")["data"]["text/plain"]
    assert not notebook.ask("inspect", "thing.method")["found"]
    notebook.ok("%autodip on")
    assert ask_until_answered(notebook, "complete", "x = thing.me")["matches"] in (
        [".method"],
        ["thing.method"],
    )  # IPython 7 gives the whole name
    assert "Lives on the ranks." in ask_until_answered(notebook, "inspect", "thing")["data"]["text/plain"]
    assert "%makedip" in notebook.ask("complete", "%makedi")["matches"]
    notebook.ok("%autodip off")
    notebook.ok("%%dip --bg\nwhile 'end' not in globals(): pass")
    assert ask_until_answered(notebook, "complete", "%dipull rank, thi")["matches"] == ["thing"]
    notebook.ok("%dipstop")


@pytest.mark.grid
def test_a_busy_rank_does_not_hold_up_tab(notebook: Notebook) -> None:
    cell = notebook.begin(
        "%%dip -r 0\nimport signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('deaf')\nfree = False\n"
        "while not free: time.sleep(0.01)"
    )
    notebook.finish(cell, until="deaf")
    notebook.interrupt()
    assert notebook.finish(cell).error == "CellInterrupted"
    assert notebook.ask("complete", "%%dip\nprin")["matches"] == ["print"]
    assert notebook.ask("inspect", "%%dip\nprint")["found"]
    notebook.ok("%makedip --repair", timeout=60)


# -- ddip's own messages


@pytest.mark.grid
def test_starting_and_long_transfers_have_bars(notebook: Notebook) -> None:
    notebook.ok("%makedip -n 2")
    bars = [bundle for bundle in notebook.ok("%makedip -n 3").data if "<progress" in bundle.get("text/html", "")]
    assert bars and "━" in bars[-1]["text/plain"]
    notebook.ok("""
        from ddip.group.objects import delivery, transfer
        from ddip.notebook import objects
        transfer.LARGE_BESIDE = delivery.MOST = delivery.LARGE = delivery.LARGE_BESIDE = 1000
        objects.QUIET_SECONDS = -1
    """)
    shown = notebook.ok("big = bytes(10_000)\n%dipush big")
    assert [bundle["text/plain"].count("━") for bundle in shown.data[:-1]] == list(range(0, 21, 2))
    assert re.fullmatch(r"ddip: pushed big: 10 KB to ranks 0-2, \d\.\d s", shown.data[-1]["text/plain"])
    notebook.ok("%%dip\nbig += b'1'")
    assert re.fullmatch(
        r"ddip: pulled big: 10 KB from rank 0, \d\.\d s", notebook.ok("%dipull big").data[-1]["text/plain"]
    )
    assert notebook.ok("%dipper g\n_ = g.push({'big': big})").messages == []  # it takes no messages of another cell
    notebook.ok("""
        assert big == bytes(10_000) + b'1'
        delivery.MOST = 1 << 24
        transfer.LARGE_BESIDE = delivery.LARGE_BESIDE = 1 << 17
        delivery.LARGE = 1 << 21
        objects.QUIET_SECONDS = 0.5
    """)


@pytest.mark.parametrize("options", ["", "-S all", "-S 1", "-q", "-q -S all"])
def test_every_display_option_shows_all_output(notebook: Notebook, options: str) -> None:
    shown = notebook.ok(
        f"%%dip {options}\nprint('text', rank)\ndisplay({{'text/html': '<b>rich</b>'}}, raw=True)\n'value'"
    )
    everything = str(shown.messages)
    for rank in [0, 1, 2] if "all" in options else [1] if "1" in options else [0]:
        assert f"text {rank}" in everything
    assert "<b>rich</b>" in everything and "value" in everything
