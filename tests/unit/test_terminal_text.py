"""Text as a terminal would show it."""

from __future__ import annotations

import re

import pytest

from ddip.output.terminal_text import Screen, moves_cursor


def text_on_screen(*texts: str, limit: int = 10_000) -> str:
    screen = Screen(limit)
    for text in texts:
        screen.write(text)
    return screen.text


@pytest.mark.parametrize(
    ("written", "seen"),
    [
        ("a\nb\n", "a\nb\n"),
        ("a\r\nb", "a\nb"),
        ("10%\r20%\r100%", "100%"),
        ("100%\r20%", "20%%"),
        ("long text\r\x1b[Kshort", "short"),
        ("abc\x08\x08X", "aXc"),
        ("\x1b[31mred\rR", "\x1b[31mRed\x1b[0m"),
        ("\x1b[31mred\x1b[0m\rR", "R\x1b[31med\x1b[0m"),
        ("outer 0\ninner 0\x1b[A\router 1\n\rinner 1", "outer 1\ninner 1"),
        ("one\ntwo\nthree\x1b[2A\rX\x1b[J", "X"),
        ("one\ntwo\n\x1b[2F\x1b[Jthree", "three"),
        ("ab\x1b[3Cc", "ab   c"),
        ("\x1b[5Gx", "    x"),
        ("ab\x1b[1D\x1b[1Kc", " c"),
    ],
)
def test_cursor_movements_are_applied(written: str, seen: str) -> None:
    assert text_on_screen(written) == seen
    assert text_on_screen(*re.findall("\x1b\\[[0-9;]*[A-Za-z]|(?s:.)", written)) == seen  # also one character at a time


def test_a_tqdm_bar_is_one_line_ending_at_100_percent() -> None:
    pieces = [f"\r{done}%|{'#' * (done // 10):10}| {done}/100" for done in range(0, 101)]
    screen = Screen(1000)
    for piece in pieces:
        screen.write(piece)
        assert screen.unfinished
    screen.write("\n")
    assert not screen.unfinished
    assert screen.text == "100%|##########| 100/100\n"


def test_a_line_that_was_blanked_is_finished() -> None:
    screen = Screen(1000)
    screen.write("\r50%|###   |\r           \r")
    assert not screen.unfinished


def test_long_output_keeps_its_beginning_and_end() -> None:
    screen = Screen(1000)
    for number in range(10_000):
        screen.write(f"line {number}\n")
    lines = screen.text.splitlines()
    assert lines[0] == "line 0" and lines[-1] == "line 9999"
    note = next(line for line in lines if line.startswith("…"))
    left_out = 10_000 - (len(lines) - 1)
    assert note == f"… {left_out:,} lines left out …"
    assert len(screen.text) < 2500
    assert screen.live_text(10).splitlines()[-1] == "line 9999"


def test_output_omitted_on_the_rank_is_counted() -> None:
    screen = Screen(1000)
    screen.write("line 0\nline 1\n")
    screen.jump(100, "line 100\nline 101\n")
    screen.jump(998, "line 998\nline 999\n")
    assert screen.text == "line 0\nline 1\n… 996 lines left out …\nline 998\nline 999\n"


@pytest.mark.grid(in_ci=True)
def test_an_endless_line_uses_bounded_memory() -> None:
    screen = Screen(1000)
    for _ in range(100):
        screen.write("x" * 100)
    assert len(screen.text) <= 1100
    for number in range(10_000):
        screen.write(f"\r{number}%")
    assert len(screen.text) <= 1100


def test_complete_lines_are_removed_and_the_rest_stays() -> None:
    screen = Screen(1000)
    screen.write("a\nb\nc")
    assert screen.take() == "a\nb\n"
    assert screen.take() == ""
    screen.write("d\n")
    assert screen.take() == "cd\n"


def test_plain_lines_do_not_move_the_cursor() -> None:
    assert not moves_cursor("a\nb\r\n\x1b[31mred\x1b[0m\n")
    assert moves_cursor("\r50%") and moves_cursor("\x1b[A") and moves_cursor("a\x08")
