"""What the keeper of a kept group records of its cells, without processes."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from ddip.cluster.processes import ownership
from ddip.cluster.processes.processes import Proc
from ddip.errors import BadInput, CellError, GroupError, TransferError
from ddip.kept import cell_records, keeper, kept_command, kept_folder
from ddip.kept.cell_records import CellRecord, CellRecords
from ddip.kept.keeper_link import error_of
from ddip.kept.kept_objects import KeptObjects
from ddip.notebook import arguments


def stream(text: str, name: str = "stdout") -> dict[str, Any]:
    return {"name": name, "text": text}


def display(text: str, name: str) -> dict[str, Any]:
    return {"data": {"text/plain": text}, "metadata": {}, "transient": {"display_id": name}}


def texts_of(record: CellRecord) -> list[str]:
    return [output["content"].get("text") or output["content"]["data"]["text/plain"] for output in record.outputs]


def test_texts_are_joined_and_displays_updated() -> None:
    record = CellRecord(1, 0.0)
    for content in (stream("a"), stream("b"), stream("error", "stderr")):
        record.add("stream", content)
    record.add("display_data", display("10 %", "bar"))
    record.add("stream", stream("c"))
    record.add("update_display_data", display("20 %", "bar"))
    record.add("update_display_data", display("of another cell", "other"))
    assert texts_of(record) == ["ab", "error", "20 %", "c"]


def test_output_is_cleared_as_on_a_page() -> None:
    record = CellRecord(1, 0.0)
    record.add("stream", stream("a"))
    record.add("clear_output", {"wait": True})
    assert texts_of(record) == ["a"]
    record.add("stream", stream("b"))
    assert texts_of(record) == ["b"]
    record.add("clear_output", {"wait": False})
    assert texts_of(record) == []


def test_the_beginning_of_long_text_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_records, "CHARACTERS", 100)
    record = CellRecord(1, 0.0)
    record.add("stream", stream("first" * 10, "stderr"))
    record.add("display_data", display("stays", "1"))
    for number in range(100):
        record.add("stream", stream(f"line {number:3}\n"))
    assert record.is_dropped and texts_of(record)[0] == "stays"
    assert texts_of(record)[-1].endswith("line  99\n") and 100 <= len(texts_of(record)[-1]) < 150


def test_records_are_selected_by_time_and_by_running_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    def add(request: str, number: int) -> None:
        header = {"msg_type": "stream", "msg_id": f"session_1_{number}"}
        records.add({"header": header, "parent_header": {"msg_id": request}, "content": stream("a")}, number)

    now = 100.0
    monkeypatch.setattr(cell_records.time, "monotonic", lambda: now)
    records = CellRecords()
    add("old", 1)
    add("running", 2)
    now = 200.0
    add("new", 3)
    assert [record["number"] for record in records.select(150.0, {2}).values()] == [2, 3]
    assert records.select(150.0, set())["new"]["last"] == 3
    for number in range(cell_records.CELLS):
        add(f"later {number}", 9)
    assert "running" not in records.select(0.0, {2})


def test_an_error_of_the_keeper_keeps_its_class_and_traceback() -> None:
    error = error_of({"ename": "CellError", "evalue": "rank 1: oops", "traceback": ["line 1"]})
    assert isinstance(error, CellError) and str(error) == "rank 1: oops" and type(error).__name__ == "CellError"
    assert error._render_traceback_() == ["line 1"]  # type: ignore[attr-defined]
    assert type(error_of({"ename": "ZeroDivisionError", "evalue": ""})).__name__ == "ZeroDivisionError"


def test_times_have_units() -> None:
    assert [arguments.parse_seconds(typed, "--keep", 0.1) for typed in ("90s", "10m", "2h", "5", "1.5h")] == [
        90, 600, 7200, 5, 5400,
    ]  # fmt: skip
    with pytest.raises(BadInput, match="--keep soon: type a time"):
        arguments.parse_seconds("soon", "--keep", 0.1)


def test_a_full_folder_is_one_error_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fill_disk(path: Path, data: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fill_disk)
    objects = KeptObjects(lambda function, *arguments: [], tmp_path)
    with pytest.raises(TransferError, match="nothing was pushed: .*No space left on device; free some space"):
        objects.push({"x": 1}, [0], lambda text, share=None: None)
    assert list(tmp_path.iterdir()) == []


def test_a_task_without_a_group_says_so() -> None:
    with pytest.raises(GroupError, match="the kept group has ended; %makedip starts one"):
        keeper.TASKS["world_size"]()


@pytest.mark.parametrize(("count", "text"), [(1, "1 process "), (2, "2 processes ")])
def test_groups_of_notebooks_are_listed(
    count: int, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ownership.Run(Path("run"), Proc(5, 0.0), True, count)
    monkeypatch.setattr(kept_folder, "list_kept", lambda: [])
    monkeypatch.setattr(ownership, "list_runs", lambda: [run])
    assert kept_command.list_groups() == 0
    assert f"group of process 5  {text} ends with its notebook" in capsys.readouterr().out


def test_an_attached_group_names_its_kernel_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = kept_folder.KeptGroup("train", 1, 0.0, 60.0, str(tmp_path))
    (tmp_path / kept_folder.HOLDER).write_text(kept_folder.holder_text("pid 24143", 24143))
    monkeypatch.setattr(kept_folder, "list_kept", lambda: [kept])
    monkeypatch.setattr(kept_folder, "can_claim", lambda folder: False)
    with pytest.raises(GroupError) as caught:
        kept_folder.find_kept("")
    assert str(caught.value) == (
        "--attach: train is held by the kernel with PID 24143; there, %unload_ext ddip releases it, and %makedip -k "
        "ends it"
    )
