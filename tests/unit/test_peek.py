"""Snapshots of a busy rank's variables, on scripted engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ddip.errors import BadInput, RequestFailed, RequestInterrupted, TransferError
from ddip.group.objects import part_size
from ddip.group.watching import peek
from ddip.notebook import arguments
from ddip.protocol import on_rank
from ddip.protocol.remote import with_bytes, without_bytes

from .conftest import NewGroup
from .scripted import ScriptedEngine, Silence, press_stop

TAKE, PART, DROP = on_rank.take_peek.target, on_rank.part_of_peek.target, on_rank.drop_peek.target


def stay_silent(*args: Any) -> Any:
    """Do not answer."""
    raise Silence


def snapshot_calls(engine: ScriptedEngine) -> list[str]:
    """Return the calls of the engine that belong to a snapshot."""
    return [target for target in engine.calls if target in (TAKE, PART, DROP)]


def test_ranks_are_asked_once_and_answers_contain_small_objects(new_group: NewGroup) -> None:
    group = new_group(3)
    group.push({"a": 1, "b": [2]})
    group.push({"a": 5}, ranks=[1])
    assert group.peek(["a", "b"], 2) == {"a": 1, "b": [2]}
    assert group.peek_all(["a"], [1, 0]) == ([{"a": 5}, {"a": 1}], [])
    assert [snapshot_calls(group.engine(rank)) for rank in range(3)] == [[TAKE]] * 3


def test_unreadable_large_objects_come_in_parts(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FIRST", "MOST"):
        monkeypatch.setattr(part_size, name, 100)
    monkeypatch.setattr(peek, "FIRST", 100)
    group = new_group(2)
    group.push({"text": "x" * 1000, "n": 1})
    messages: list[float | None] = []
    values, _ = group.peek_all(["text", "n"], [1], progress=lambda text, share=None: messages.append(share))
    assert values == [{"text": "x" * 1000, "n": 1}] and group.transferred.size > 1000
    assert snapshot_calls(group.engine(1)) == [TAKE, *[PART] * 11, DROP] and len(messages) == 12
    assert all(share is not None and 0 <= share < 1 for share in messages[1:])


def test_a_snapshot_names_the_variables_that_a_rank_lacks(new_group: NewGroup) -> None:
    group = new_group(2)
    group.push({"a": 1})
    with pytest.raises(TransferError, match="rank 0 .* x, y; .*%%dip"):
        group.peek(["a", "x", "y"])


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"cell": 3, "line": 2, "source": "sleep(9)"}, r"a, in cell \[3\] line 2: sleep\(9\)"),
        ({"state": "finished"}, "about to"),
        ({}, "still pickles a"),
    ],
)
def test_a_late_rank_reports_its_place_and_drops_the_request(
    new_group: NewGroup, place: dict[str, Any], text: str
) -> None:
    group = new_group(2)
    group.push({"a": 1})
    group.engine(1).answers.update({TAKE: stay_silent, DROP: lambda number: place})
    with pytest.raises(TransferError, match=f"rank 1 .*0.05 s: .*{text}; -t "):
        group.peek_all(["a"], [0, 1], seconds=0.05)
    assert [snapshot_calls(group.engine(rank)) for rank in (0, 1)] == [[TAKE, DROP]] * 2


def test_a_silent_rank_is_reported_without_a_place(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group = new_group(2)
    monkeypatch.setattr(peek, "WHERE_SECONDS", 0.05)
    group.engine(1).answers.update({TAKE: stay_silent, DROP: stay_silent})
    with pytest.raises(TransferError, match="rank 1 .*0.05 s: .*signals"):
        group.peek(["a"], 1, seconds=0.05)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_rank_that_has_ended_is_named_at_once(new_group: NewGroup, when: str) -> None:
    group = new_group(2)

    def end_engine(*args: Any) -> Any:
        group.scripted.end_engine(group.members[1].engine, -9)
        raise Silence

    if when == "before":
        group.scripted.end_engine(group.members[1].engine, -9)
    group.engine(1).answers[TAKE] = end_engine
    with pytest.raises(RequestFailed, match="--repair") as caught:
        group.peek_all(["a"], [0, 1], seconds=60)
    assert caught.value.by_rank[1].name == "RankEnded" and "SIGKILL" in caught.value.by_rank[1].message


def test_the_stop_button_ends_a_snapshot(new_group: NewGroup) -> None:
    group = new_group(2)

    def press_stop_silently(*args: Any) -> Any:
        press_stop()
        raise Silence

    group.engine(0).answers[TAKE] = press_stop_silently
    with pytest.raises(RequestInterrupted):
        group.peek(["a"], seconds=60)
    assert snapshot_calls(group.engine(0)) == [TAKE, DROP]


def test_a_refusal_of_a_rank_is_shown(new_group: NewGroup) -> None:
    group = new_group(2)

    def refuse_snapshot(*args: Any) -> Any:
        raise RuntimeError("8 former ones have not ended")

    group.engine(1).answers[TAKE] = refuse_snapshot
    with pytest.raises(TransferError, match="rank 1: RuntimeError"):
        group.peek(["a"], 1)


def test_bytes_travel_beside_the_json() -> None:
    answer = {"ok": {"values": {"a": bytearray(b"one"), "b": b""}, "sizes": [1, (2, b"two")], "none": None}}
    beside: list[Any] = []
    restored = without_bytes(answer, beside)
    assert beside == [b"one", b"", b"two"] and b"two" not in str(restored).encode()
    assert with_bytes(restored, [memoryview(each) for each in beside]) == {
        "ok": {"values": {"a": b"one", "b": b""}, "sizes": [1, [2, b"two"]], "none": None}
    }
    assert with_bytes({"ok": 1}, []) == {"ok": 1}


@pytest.mark.parametrize(("now", "timeout", "seconds"), [(False, None, None), (True, None, 5.0), (True, "20", 20.0)])
def test_the_timeout_is_read_as_seconds(now: bool, timeout: str | None, seconds: float | None) -> None:
    assert arguments.peek_timeout(SimpleNamespace(now=now, timeout=timeout), "") == seconds


@pytest.mark.parametrize(
    ("now", "timeout", "text"),
    [
        (False, "3", "^%dipull x -t 3: .*--now"),
        (True, "soon", "^-t soon: .*-t 120, "),
        (True, "0", "^-t 0: .*-t 120, "),
    ],
)
def test_a_bad_timeout_is_refused(now: bool, timeout: str, text: str) -> None:
    with pytest.raises(BadInput, match=text):
        arguments.peek_timeout(SimpleNamespace(now=now, timeout=timeout), f"x -t {timeout}")
