"""Conversion of the messages of ranks to lines of the notebook."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.router import CellOutput
from ddip.output.page.bundles import to_tab
from ddip.output.tables.tables import RankInfo, info_table, size_text, where_text
from ddip.output.terminal_text import Screen, strip_escapes
from ddip.output.transcript import Display
from ddip.rank.streams.limiter import Chunk, OutputLimiter


def stream_message(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": name, "text": text}}


@pytest.mark.parametrize("rank", [0, 2])
def test_output_of_a_single_rank_is_shown_unchanged(rank: int, capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput([rank])
    show.receive(rank, stream_message("half"))
    show.receive(1, stream_message("not seen\n"))
    show.receive(rank, stream_message("\rwhole\n"))
    show.receive(rank, stream_message("bad\n", "stderr"))
    show.finish()
    assert tuple(capsys.readouterr()) == ("half\rwhole\n", "bad\n")


def test_lines_of_several_ranks_are_not_torn(capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput([0, 1])
    show.receive(0, stream_message("a"))
    show.receive(1, stream_message("b\nc"))
    show.receive(0, stream_message("a\n"))
    show.finish()
    assert capsys.readouterr().out == "[rank 1] b\n[rank 0] aa\n[rank 1] c\n"


def test_quiet_keeps_all_output_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput([0, 1], quiet=True)
    show.receive(1, stream_message("b\n"))
    show.receive(0, stream_message("a"))
    assert capsys.readouterr().out == ""
    show.finish()
    assert capsys.readouterr().out == "[rank 0] a\n[rank 1] b\n"


def test_long_output_loses_its_middle(capsys: pytest.CaptureFixture[str]) -> None:
    for show_ranks in ([0], [0, 1]):
        label = "[rank 0] " if len(show_ranks) > 1 else ""
        show = CellOutput(show_ranks)
        show.receive(0, stream_message("line 0\n"))
        show.receive(0, {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": "7\n", "line": 7}})
        show.receive(0, {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": "9\n", "line": 9}})
        show.finish()
        assert capsys.readouterr().out == f"{label}line 0\n{label}… 8 lines left out …\n{label}9\n"


def limited_messages(limit: int, *texts: str) -> list[dict[str, Any]]:
    """Return the messages in which a rank sends `texts`."""
    limiter = OutputLimiter(limit)
    messages = []
    for chunk in [*map(limiter.take, texts), limiter.rest()]:
        if chunk is not None:
            for piece in [Chunk("\n")] * chunk.breaks + [chunk] * bool(chunk.text):
                messages.append(stream_message(piece.text))
                if piece.line is not None:
                    messages[-1]["content"].update(line=piece.line, cut=piece.cut)
    return messages


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("style", ["one rank", "labels", "grouped"])
@pytest.mark.parametrize("before", ["", "start\n"])
@pytest.mark.parametrize("after", ["", "\n", "\nend\n"])
def test_a_line_above_the_limit_loses_its_middle(
    style: Any, before: str, after: str, draws: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    show = CellOutput(
        [0] if style == "one rank" else [0, 1], DisplayOptions("auto" if style == "one rank" else style, 1000)
    )
    for message in limited_messages(1000, f"{before}{'b' * 1500}{after}"):
        show.receive(0, message)
        if draws:
            show.draw()
    show.finish()
    lines = strip_escapes(capsys.readouterr().out).replace("[rank 0] ", "").splitlines()
    lines = lines[1:] if style == "grouped" else lines
    first, note, last = lines[bool(before) : bool(before) + 3]
    left = 1500 - len(first) - len(last)
    assert set(first + last) == {"b"} and min(len(first), len(last)) > 400
    assert note == f"… {left} characters left out …" and left == 500 + len(before) + len(after)
    assert lines[: bool(before)] == before.split() and lines[bool(before) + 3 :] == after.split()


def test_omitted_output_is_counted_in_english() -> None:
    screen = Screen(1000)
    screen.jump(1, "b", 1)
    assert screen.text == "… 1 line and 1 character left out …\nb"


@pytest.mark.parametrize("show_ranks", [[0], [0, 1]])
def test_output_just_above_the_limit_is_shown_whole(show_ranks: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput(show_ranks, DisplayOptions("labels", 1000))
    texts = [f"line {number}\n" for number in range(130)]
    for message in limited_messages(1000, *texts):
        show.receive(0, message)
    show.finish()
    assert capsys.readouterr().out.replace("[rank 0] ", "") == "".join(texts)


def test_bars_of_several_ranks_leave_their_last_state(capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput([0, 1])
    for rank in (0, 1):
        show.receive(rank, stream_message("\r 50%", "stderr"))
    show.draw()
    show.receive(1, stream_message("\r100%\nafter\n", "stderr"))
    show.receive(0, stream_message("\r 75%", "stderr"))
    show.finish()
    assert capsys.readouterr().err == "[rank 1] 100%\n[rank 1] after\n[rank 0]  75%\n"


def test_the_summary_of_a_cell_is_readable() -> None:
    assert where_text({}) == ""
    assert where_text({2: 0.123}) == "rank 2 · 0.12 s"
    assert where_text({0: 1.0, 1: 61.23, 2: 3.0}) == "ranks 0-2 · 61.2 s · slowest: rank 1"


@pytest.mark.parametrize("seconds", [{0: 0.01, 1: 0.1}, {0: 60.0, 1: 61.0}])
def test_a_rank_that_ends_slightly_later_is_not_called_slow(seconds: dict[int, float]) -> None:
    assert "slowest" not in where_text(seconds)


def test_sizes_are_readable() -> None:
    assert [size_text(size) for size in (None, 0, 999, 2.5e8, 80e9)] == ["", "0 B", "999 B", "250 MB", "80.0 GB"]


def test_the_table_has_gpu_columns_only_with_gpus() -> None:
    cpu = RankInfo(0, "a", 12, "cpu", 10_000, None, None, None, "idle", None)
    assert info_table([cpu]).splitlines() == [
        "rank  host  pid  device  memory  state  last cell took",
        "0     a     12   cpu     10 KB   idle",
    ]
    gpu = RankInfo(1, "a", 13, "GPU 3", 10_000, 0, 2_000_000, 80_000_000_000, "busy", 1.5)
    lines = info_table([cpu, gpu]).splitlines()
    assert lines[0].startswith("rank  host  pid  device  memory  GPU memory allocated / reserved / total")
    assert lines[2].endswith(" 1.50 s")
    assert "0 B / 2 MB / 80.0 GB" in lines[2]


def test_a_terminal_shows_all_bars_at_the_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Screen(10_000)

    def terminal_lines() -> list[str]:
        show.draw()
        terminal.write(capsys.readouterr().out)
        return strip_escapes(terminal.text).splitlines()

    show = CellOutput([0, 1])
    show.page.terminal = True
    for rank in (0, 1):
        show.receive(rank, stream_message("\r 10%"))
    assert terminal_lines() == ["[rank 0]  10%", "[rank 1]  10%"]
    show.receive(0, stream_message("\r 20%"))
    show.receive(1, stream_message("\r100%"))
    assert terminal_lines() == ["[rank 0]  20%", "[rank 1] 100%"]
    show.receive(1, stream_message("\nsaid\n"))
    assert terminal_lines() == ["[rank 1] 100%", "[rank 1] said", "[rank 0]  20%"]
    show.receive(0, stream_message("\r100%\n"))
    show.finish()
    assert terminal_lines() == ["[rank 1] 100%", "[rank 1] said", "[rank 0] 100%"]


def test_a_closed_page_ends_no_cell(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    show = CellOutput([0, 1])
    show.receive(0, stream_message("half a line"))
    with Path(os.devnull).open("w") as closed:
        pass
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", closed)
        show.draw()
        show.ended(0, False)
        show.finish()
    assert show.page.closed
    assert caplog.text.count("cannot be drawn: ValueError") == 1


@pytest.mark.parametrize(
    "mime", ["text/html", "text/latex", "text/plain", "text/markdown", "image/png", "image/svg+xml"]
)
def test_a_tab_accepts_displays_without_text(mime: str) -> None:
    for odd in ({}, [], 5, None):
        to_tab([Display({mime: odd})], live=True)
