"""Status of real ranks as reported to programs, and the data in a cell's output for them."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import ddip
from ddip.protocol.status_types import CELL_MIME

from ..unit.test_status import assert_fits_schema
from .leftovers import wait_until
from .meanwhile import suspended
from .notebook import Notebook, Shown

CALL = "from ddip.notebook.for_programs import call as _call; print(_call({name!r}, {arguments!r})._text)"


def test_status_shows_running_suspended_and_ended_ranks(cells: ddip.Group) -> None:
    cell = cells.start("import time\nprint('begun')\nwhile True: time.sleep(0.01)", show_ranks=[0, 1])
    wait_until(lambda: str(list(cell.recording.messages())).count("begun") == 2)
    status = cells.status()
    assert_fits_schema("status", status)
    assert [(rank["state"], rank["cell"]) for rank in status["ranks"]] == [("busy", cell.number)] * 2
    assert all(rank["memory"] and rank["memory"] > 1_000_000 for rank in status["ranks"])
    assert status["cells"][-1]["state"] == "running"

    pid = cells.members[1].pid
    with suspended([pid]):
        status = cells.status()
    assert_fits_schema("status", status)
    assert [rank["state"] for rank in status["ranks"]] == ["busy", "stopped"]

    os.kill(pid, signal.SIGKILL)
    cell.stop()
    status = cells.status()
    assert_fits_schema("status", status)
    assert [rank["state"] for rank in status["ranks"]] == ["idle", "ended"]
    assert status["group"] is not None and not status["group"]["healthy"]
    assert status["errors"]["1"]["name"] == "RankEnded"
    assert cells.repair() == [1]
    status = cells.status()
    assert status["group"] is not None and status["group"]["healthy"]


def data_of(shown: Shown) -> list[Any]:
    """Return the data for programs in the outputs; each must match its schema, and come with HTML."""
    bundles = [bundle for bundle in shown.outputs if CELL_MIME in bundle]
    for bundle in bundles:
        assert_fits_schema("cell", bundle[CELL_MIME])
        assert bundle["text/html"]
    return [bundle[CELL_MIME] for bundle in bundles]


def test_tabs_carry_data_by_rank(notebook: Notebook) -> None:
    shown = notebook.fails("%%dip -S all\nprint('rank', min(rank, 1))\nif rank == 2: raise ValueError('no')")
    (data,) = data_of(shown)
    ranks = data["ranks"]
    assert (data["schema"], data["number"], data["outcome"]) == (1, shown.number, "user_error")
    assert [ranks[rank]["state"] for rank in "012"] == ["ok", "ok", "failed"]
    assert (ranks["0"]["text"], ranks["1"]["text"], ranks["2"]["same_text_as"]) == ("rank 0", "rank 1", 1)
    assert ranks["2"]["error"]["message"] == "no" and "ValueError" in ranks["2"]["error"]["traceback"]

    long = notebook.ok("%%dip -S 0,1\nprint('x' * 30_000, rank)")
    (data,) = data_of(long)
    assert len(data["ranks"]["1"]["text"]) == 20_000 and data["ranks"]["1"]["text"].endswith("x 1")
    assert data["ranks"]["1"]["truncated"] and "text" not in data["ranks"]["2"]

    notebook.ok("%config DipMagics.cell_json = False")
    assert data_of(notebook.ok("%%dip -S all\nprint(rank)")) == []
    notebook.ok("%config DipMagics.cell_json = True")


def test_summaries_of_cells_carry_data_by_rank(notebook: Notebook, tmp_path: Path) -> None:
    plain = notebook.ok("%config DipMagics.report_after = 0\nprint()\n%config DipMagics.report_after = 0")
    assert data_of(plain) == []
    try:
        (data,) = data_of(notebook.ok("%%dip\nprint('one', rank)"))
        assert data["ranks"]["0"]["text"] == "one 0" and "text" not in data["ranks"]["1"]
        (data,) = data_of(notebook.ok("%%dip -q\nprint('at the end')"))
        assert data["ranks"]["0"]["text"] == "at the end"
    finally:
        notebook.ok("%config DipMagics.report_after = 10")
    go = tmp_path / "go"
    wait = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n"
    begun = notebook.begin(f"%%dip --bg -S all\n{wait}print('later', rank)")
    notebook.finish(begun)
    go.touch()
    messages = notebook.late_messages(begun, lambda messages: any(CELL_MIME in c.get("data", {}) for _, c in messages))
    (data,) = [content["data"][CELL_MIME] for _, content in messages if CELL_MIME in content.get("data", {})]
    assert_fits_schema("cell", data)
    assert (data["outcome"], data["ranks"]["2"]["text"]) == ("ok", "later 2")
    (again,) = data_of(notebook.ok(f"%dipcell {data['number']}"))
    assert again == data


def test_the_magic_prints_json_or_a_readable_table(notebook: Notebook) -> None:
    notebook.fails("%%dip -r 1\n1 / 0")
    status = json.loads(notebook.ok("%dipstatus --json").stdout)
    assert_fits_schema("status", status)
    assert status["group"]["size"] == 3 and status["errors"]["1"]["name"] == "ZeroDivisionError"
    text = notebook.ok("%dipstatus").stdout
    assert text.startswith("3 ranks on the CPU, gloo\nrank")
    assert re.search(r"^rank 1, cell \d+: ZeroDivisionError", text[text.index("last errors\n") :], re.MULTILINE), text
    assert "1 / 0" in text


def test_cells_of_a_program_have_their_own_numbers(notebook: Notebook) -> None:
    def call_tool(name: str, **arguments: Any) -> Any:
        message = notebook.begin(CALL.format(name=name, arguments=json.dumps(arguments)), store_history=False)
        answer = json.loads(notebook.finish(message).stdout.splitlines()[-1])
        assert "ok" in answer, answer
        return answer["ok"]

    before = notebook.ok("1").number
    notebook.ok("%autodip on")
    try:
        first, second = call_tool("run", code="a = rank", queue=True), call_tool("run", code="print(a)", queue=True)
    finally:
        notebook.ok("%autodip off")
    assert first["number"] > before and second["number"] > first["number"]
    wait_until(lambda: call_tool("poll")["state"] == "ended")
    assert call_tool("poll")["outcome"] == "ok"
    assert [call_tool("output", ranks=[rank])["ranks"][str(rank)]["text"] for rank in range(3)] == ["0", "1", "2"]
    shown = notebook.ok(f"%dipcell {second['number']}").text
    assert all(f"── rank {rank} ──\n{rank}" in shown for rank in range(3))
    assert call_tool("pull", names=["a"], rank=2) == {"a": {"type": "int", "json": 2}}
    assert notebook.ok("1").number > second["number"]


@pytest.mark.parametrize("code", ["%dipstatus --much", "%dipstatus 3"])
def test_an_unknown_option_is_refused(bare_notebook: Notebook, code: str) -> None:
    assert "%dipstatus" in bare_notebook.fails(code).message
    assert json.loads(bare_notebook.ok("%dipstatus --json").stdout)["group"] is None
    assert bare_notebook.ok("%dipstatus").stdout.startswith("there is no group")
