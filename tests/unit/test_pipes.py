"""Data from other processes by pipes: records are complete, and lines are assembled."""

from __future__ import annotations

import os
import select

import pytest

from ddip.rank.streams.pipes import HEAD, Lines, ProcessText, Records


def record_of(writer: int, text: str, stream: int = 1) -> ProcessText:
    return ProcessText(writer, stream, "request", text)


def test_a_line_written_in_parts_stays_whole_between_other_writers() -> None:
    lines = Lines()
    records = [record_of(5, "a"), record_of(6, "b"), record_of(5, " line\n"), record_of(6, " line\nand")]
    assert [whole for part in records for whole in lines.add(part)] == [
        record_of(5, "a line\n"),
        record_of(6, "b line\n"),
    ]
    assert lines.rest() == [record_of(6, "and")] and lines.rest() == []


def test_text_begun_in_one_stream_precedes_the_other_stream() -> None:
    lines = Lines()
    assert list(lines.add(record_of(5, "begun"))) == []
    assert list(lines.add(record_of(5, "wrong\n", stream=2))) == [
        record_of(5, "begun"),
        record_of(5, "wrong\n", stream=2),
    ]


@pytest.mark.parametrize("text", ["\r 50%\r 60%", "x" * 2_000])
def test_bars_and_long_lines_pass_without_a_wait(text: str) -> None:
    lines = Lines()
    assert "".join(part.text for part in lines.add(record_of(5, text))) in (text, "\r 50%\r")


def test_records_are_written_whole_and_read_as_they_were_written() -> None:
    records = Records()
    long = "é█\N{GRINNING FACE}" * 3_000
    records.write(1, 5, "first", long)
    records.write(2, 5, "first", "\udc80")
    records.write(1, 6, "", "short")
    largest = select.PIPE_BUF
    data = os.read(records.reads, 1 << 20)
    sizes, begin = [], 0
    while begin < len(data):
        sizes.append(HEAD.unpack_from(data, begin)[0])
        begin += sizes[-1]
    assert max(sizes) <= largest
    taken = []
    for begin in range(0, len(data), 1_000):  # in parts
        os.write(records.writes, data[begin : begin + 1_000])
        taken += records.take()
    assert "".join(part.text for part in taken if part[:3] == (5, 1, "first")) == long
    assert taken[-2:] == [ProcessText(5, 2, "first", "\\udc80"), ProcessText(6, 1, "", "short")]
    assert records.take() == []
    os.close(records.reads)
    records.write(1, 5, "first", "nobody reads this")
    os.close(records.writes)
