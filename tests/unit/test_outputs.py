"""How messages of ranks become lines of the notebook."""

from __future__ import annotations

from typing import Any

import pytest

from ddip.outputs import CellOutput, RankInfo, info_table, size_text


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": name, "text": text}}


def test_another_rank_alone_is_labelled(capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput([2])
    show.receive(2, stream("a\n"))
    assert capsys.readouterr().out == "[rank 2] a\n"


def test_rank_0_is_shown_as_it_writes(capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput([0])
    show.receive(0, stream("half"))
    show.receive(1, stream("not seen\n"))
    show.receive(0, stream("\rwhole\n"))
    show.receive(0, stream("bad\n", "stderr"))
    show.finish()
    assert tuple(capsys.readouterr()) == ("half\rwhole\n", "bad\n")


def test_lines_of_several_ranks_are_not_torn(capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput([0, 1])
    show.receive(0, stream("a"))
    show.receive(1, stream("b\nc"))
    show.receive(0, stream("a\n"))
    show.finish()
    assert capsys.readouterr().out == "[rank 1] b\n[rank 0] aa\n[rank 1] c\n"


def test_quiet_keeps_all_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    show = CellOutput([0, 1], quiet=True)
    show.receive(1, stream("b\n"))
    show.receive(0, stream("a"))
    assert capsys.readouterr().out == ""
    show.finish()
    assert capsys.readouterr().out == "[rank 0] a\n[rank 1] b\n"


def test_sizes_are_for_people() -> None:
    assert [size_text(size) for size in (None, 0, 999, 2.5e8, 80e9)] == ["", "0 B", "999 B", "250 MB", "80.0 GB"]


def test_the_table_has_gpu_figures_only_where_there_is_a_gpu() -> None:
    cpu = RankInfo(0, "a", 12, "cpu", 10_000, None, None, None, "idle", None)
    assert info_table([cpu]).splitlines() == [
        "rank  host  pid  device  memory  state  last cell",
        "0     a     12   cpu     10 KB   idle",
    ]
    gpu = RankInfo(1, "a", 13, "GPU 3", 10_000, 0, 2_000_000, 80_000_000_000, "busy", 1.5)
    lines = info_table([cpu, gpu]).splitlines()
    assert lines[0].startswith("rank  host  pid  device  memory  GPU memory allocated / reserved / total")
    assert lines[2].endswith(" 1.50 s")
    assert "0 B / 2 MB / 80.0 GB" in lines[2]
