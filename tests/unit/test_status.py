"""A group and its cells as plain data for programs, and the schemas of the data."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any

import pytest

import ddip
from ddip.cluster import devices
from ddip.errors import CellError, CellTimeout, RankError
from ddip.group.cells.cell import Cell
from ddip.group.cells.cell_status import data_of
from ddip.group.cells.history import History
from ddip.group.members.placement import SHARES
from ddip.notebook import cell_magics
from ddip.output.cells.cell_data import Part, cell_data, error_data, rank_texts, state_of
from ddip.protocol import status_types
from ddip.protocol.status_types import CellData, PartData, Status
from tests.cluster.leftovers import wait_until

from .conftest import NewGroup

SCHEMAS = {
    name: json.loads(
        (Path(ddip.__file__).parent / "protocol" / "schemas" / f"{name}.{status_types.SCHEMA}.json").read_text()
    )
    for name in ("status", "cell")
}


def assert_fits_schema(name: str, data: Any) -> None:
    """Fail unless `data`, as JSON, matches the schema `name`."""
    import jsonschema  # only in this test: takes a second

    jsonschema.Draft202012Validator(SCHEMAS[name]).validate(json.loads(json.dumps(data, allow_nan=False)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_schemas_are_schemas(name: str) -> None:
    import jsonschema

    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])


@pytest.mark.parametrize(
    ("name", "place", "kind"),
    [
        ("status", None, Status),
        ("status", "group", status_types.GroupStatus),
        ("status", "rank", status_types.RankStatus),
        ("status", "gpu", status_types.GpuFigures),
        ("status", "device", status_types.DeviceStatus),
        ("status", "cell", status_types.CellStatus),
        ("status", "error", status_types.LastError),
        ("cell", None, CellData),
        ("cell", "part", PartData),
        ("cell", "error", status_types.ErrorData),
    ],
)
def test_the_schemas_describe_every_key_and_no_other(name: str, place: str | None, kind: Any) -> None:
    described = SCHEMAS[name] if place is None else SCHEMAS[name]["$defs"][place]
    assert set(described["properties"]) == set(typing.get_type_hints(kind))
    assert set(described["required"]) == kind.__required_keys__


def test_the_schemas_know_every_state_and_outcome() -> None:
    enum_of = lambda name, place, key: SCHEMAS[name]["$defs"][place]["properties"][key]["enum"]  # noqa: E731
    assert enum_of("status", "rank", "state") == list(typing.get_args(status_types.RankState))
    assert enum_of("cell", "part", "state") == list(typing.get_args(status_types.PartState))
    outcomes = [*typing.get_args(status_types.CellOutcome), None]
    assert enum_of("status", "cell", "outcome") == SCHEMAS["cell"]["properties"]["outcome"]["enum"] == outcomes


# -- a cell, by rank


def stream_message(text: str, **where: int) -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": text, **where}}


def test_output_is_plain_text_with_bars_in_their_last_state() -> None:
    shown = {"data": {"text/plain": "a plot", "text/html": "<b>"}, "metadata": {}, "transient": {"display_id": "p"}}
    changed = {**shown, "data": {"text/plain": "another plot"}}
    result = {"data": {"text/plain": "3"}, "metadata": {}, "execution_count": 7}
    messages = [
        (0, stream_message("\x1b[31mred\x1b[0m\n 10 %\r100 %\n")),
        (1, stream_message("of rank 1")),
        (0, {"header": {"msg_type": "display_data"}, "content": shown}),
        (0, {"header": {"msg_type": "update_display_data"}, "content": changed}),
        (0, {"header": {"msg_type": "execute_result"}, "content": result}),
    ]
    assert rank_texts(messages, [0], 1000) == {0: ("red\n100 %\nanother plot\nOut[7]: 3", False)}


def test_long_text_keeps_its_end_even_within_a_character() -> None:
    messages = [(0, stream_message("x" * 50 + "\udcff" + "y" * 9))]
    assert rank_texts(messages, [0, 1], 1000, most=12) == {0: ("cff" + "y" * 9, True), 1: ("", False)}


def test_text_shared_by_ranks_appears_once() -> None:
    parts = {rank: Part("ok", 0.5, None, text) for rank, text in enumerate(["same", "other", "same", ""])}
    data = cell_data(7, "ok", 1.23456, {**parts, 4: Part("ok", None, None, ""), 5: Part("ok")})
    assert_fits_schema("cell", data)
    assert [(part.get("text"), part.get("same_text_as")) for part in data["ranks"].values()] == [
        ("same", None),
        ("other", None),
        (None, 0),
        ("", None),
        ("", None),
        (None, None),
    ]
    assert (data["number"], data["outcome"], data["seconds"]) == (7, "ok", 1.235)


@pytest.mark.parametrize(
    ("error", "replied", "outcome", "begun", "state"),
    [
        (None, True, "ok", True, "ok"),
        (None, False, None, True, "running"),
        (None, False, "stuck", True, "running"),
        (None, False, None, False, "queued"),
        (None, False, "not_run", False, "not_run"),
        (RankError("ValueError", "no", ""), True, "user_error", True, "failed"),
        (RankError("RuntimeError", "closed", "", waited="all_reduce"), True, "user_error", True, "released"),
        (RankError("KeyboardInterrupt", "", ""), True, "interrupted", True, "interrupted"),
        (RankError("RankEnded", "pid 3 ended", ""), False, "rank_died", True, "ended"),
    ],
)
def test_a_cell_has_one_state_on_each_rank(
    error: RankError | None, replied: bool, outcome: Any, begun: bool, state: str
) -> None:
    assert state_of(error, replied, outcome, begun) == state


def test_an_error_has_no_colours_and_keeps_its_end() -> None:
    data = error_data(RankError("ValueError", "no" * 5000, "\x1b[31m" + "x" * 30_000 + "end"))
    assert len(data["message"]) == 5000
    assert len(data["traceback"]) == 20_000 and data["traceback"].endswith("xend")


# -- cells of groups


def by_rank(cell: Cell) -> list[tuple[str, str | None]]:
    """Return state and text by rank, after checking the schema."""
    data = data_of(cell)
    assert_fits_schema("cell", data)
    return [(part["state"], part.get("text")) for part in data["ranks"].values()]


def test_a_failed_cell_has_an_outcome_per_rank(new_group: NewGroup) -> None:
    group = new_group(3)
    with pytest.raises(CellError):
        group.run("0: print hello\n1: raise ValueError no\n2: wait", show_ranks=[0, 1])
    assert by_rank(group.cell(1)) == [("ok", "hello"), ("failed", ""), ("released", None)]
    data = data_of(group.cell(1), only=[1])
    assert list(data["ranks"]) == ["1"] and data["outcome"] == "user_error"
    assert all(isinstance(part["seconds"], float) for part in data["ranks"].values())


def test_an_unfinished_cell_has_a_state_per_rank(new_group: NewGroup) -> None:
    group = new_group(2)
    first, second = group.start("0: print hello\n1: sleep"), group.start("pass", queue=True)
    wait_until(lambda: by_rank(first) == [("ok", "hello"), ("running", None)])
    assert by_rank(second) == [("queued", ""), ("queued", None)]
    assert [cell["state"] for cell in group.status()["cells"]] == ["running", "queued"]
    first.stop()
    second.done.result(timeout=10)
    assert by_rank(first) == [("ok", "hello"), ("interrupted", None)]
    assert by_rank(second) == [("not_run", ""), ("not_run", None)]
    assert_fits_schema("status", group.status())
    assert [cell["outcome"] for cell in group.status()["cells"]] == ["interrupted", "not_run"]


def test_the_outcome_is_known_before_the_end_is_shown(new_group: NewGroup, impatient: None) -> None:
    seen: list[Any] = []
    group = new_group(2)
    scripts: list[tuple[str, float | None]] = [
        ("pass", None),
        ("1: raise ValueError no", None),
        ("1: die", None),
        ("sleep", 0.05),
        ("1: deaf", 0.05),
    ]
    for script, timeout in scripts:
        cell = group.start(script, timeout=timeout)
        cell.done.result(timeout=10)
        seen.append(cell.outcome)
        if cell.outcome in ("rank_died", "stuck"):
            group.repair()
    assert seen == ["ok", "user_error", "rank_died", "timeout", "stuck"]


# -- a group


def test_the_status_of_a_group_always_fits_its_schema(new_group: NewGroup) -> None:
    group = new_group(3)
    with pytest.raises(CellError):
        group.run("2: raise ValueError no")
    cell = group.start("sleep", ranks=[1])
    status = group.status()
    assert_fits_schema("status", status)
    assert status["group"] == {"size": 3, "backend": "gloo", "healthy": True, "app": None, "hosts": ["here"]}
    assert [(rank["state"], rank["cell"]) for rank in status["ranks"]] == [("idle", None), ("busy", 2), ("idle", None)]
    assert status["devices"] == [{"device": "cpu", "host": "here", "ranks": [0, 1, 2], "memory_total": None}]
    assert status["errors"]["2"]["message"] == "no" and status["errors"]["2"]["cell"] == 1
    cell.stop()


def test_status_reports_ranks_that_ended_or_do_not_answer(new_group: NewGroup) -> None:
    group = new_group(3)
    group.cluster.end_engine(group.members[1].engine, -9)  # type: ignore[attr-defined]
    del group.engine(2).answers["runtime.housekeeping.rank_figures"]
    status = group.status()
    assert_fits_schema("status", status)
    assert [rank["state"] for rank in status["ranks"]] == ["idle", "ended", "no_answer"]
    assert status["group"] is not None and status["group"]["healthy"] is False
    assert status["ranks"][1]["memory"] is None


def test_a_rank_shows_the_abandoned_cell_as_running(new_group: NewGroup, impatient: None) -> None:
    group = new_group(2)
    with pytest.raises(CellTimeout):
        group.run("1: deaf", timeout=0.02)
    status = group.status()
    assert [rank["cell"] for rank in status["ranks"]] == [None, 1]
    assert status["cells"][0]["outcome"] == "stuck"
    assert "0.02 s" in str(status["cells"][0]["error"])


def test_status_of_an_ended_group_is_none(new_group: NewGroup) -> None:
    group = new_group(2)
    group.run("pass")
    group.shutdown()
    status = group.status()
    assert_fits_schema("status", status)
    assert (status["group"], status["ranks"], status["devices"]) == (None, [], [])
    assert [cell["outcome"] for cell in status["cells"]] == ["ok"]
    assert_fits_schema("status", cell_magics.status_now(None, History()))
    assert cell_magics.status_text(None, History()) == "there is no group"


def test_status_lists_gpus_as_devices(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["0", "1"])
    monkeypatch.setenv(SHARES, "1")
    group = new_group(None, gpus=[0, 0, 1])
    for rank in range(3):
        figures = {"allocated": rank, "reserved": 10, "total": 100 + rank}
        answer = group.engine(rank).answers["runtime.housekeeping.rank_figures"]
        group.engine(rank).answers["runtime.housekeeping.rank_figures"] = lambda answer=answer, figures=figures: {
            **answer(),
            "gpu": figures,
        }
    status = group.status()
    assert_fits_schema("status", status)
    assert [(device["device"], device["ranks"]) for device in status["devices"]] == [("GPU 0", [0, 1]), ("GPU 1", [2])]
    assert status["devices"][1]["memory_total"] == 102
    assert status["ranks"][1]["gpu"] == {"allocated": 1, "reserved": 10, "total": 101}


def test_status_lists_recent_and_running_cells(new_group: NewGroup) -> None:
    group = new_group(2)
    cell = group.start("sleep", ranks=[1])
    for _ in range(5):
        group.run("pass", ranks=[0])
    assert [known["number"] for known in group.status(cells=2)["cells"]] == [1, 5, 6]
    text = cell_magics.status_text(group, group.history)
    assert "2 ranks" in text and "in the background" in text and "last errors" not in text
    cell.stop()
    text = cell_magics.status_text(group, group.history)
    assert "last errors\nrank 1, cell 1: was stopped" in text
