"""Transfers of objects, and widgets, on scripted engines."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from ddip.errors import BadInput, RequestInterrupted, TransferError
from ddip.group.cells import comms
from ddip.group.group import Group
from ddip.group.objects import delivery, part_size, transfer
from ddip.output.area import CellOutputArea
from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.router import CellOutput
from ddip.output.transcript import WIDGET, plain_of
from ddip.output.widgets import merge_state
from ddip.protocol import on_rank
from ddip.protocol.objects.shared import SharedBytes

from .conftest import NewGroup
from .scripted import press_stop


class CannotLeave:
    """An object that cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("stays")


NEEDS_COMM = pytest.mark.skipif(find_spec("comm") is None, reason="no kernel, and no package comm (Colab)")


def raise_on_arrival(text: str) -> None:
    """Raise when an object is unpickled."""
    raise ValueError(text)


class CannotArrive:
    """An object that cannot be unpickled."""

    def __reduce__(self) -> Any:
        return raise_on_arrival, ("not here",)


def test_pushed_names_reach_all_ranks_and_can_be_pulled(new_group: NewGroup) -> None:
    group = new_group(3)
    assert group.push({"a": 1, "b": [2]}) == []
    group.push({"a": 5}, ranks=[1])
    assert group.pull(["a", "b"], 2) == {"a": 1, "b": [2]}
    assert group.pull_all(["a"], [0, 1]) == ([{"a": 1}, {"a": 5}], [])
    assert group.has_name("a") and not group.has_name("c")


def test_large_objects_travel_in_parts(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((part_size, "FIRST"), (part_size, "MOST"), (delivery, "MOST")):
        monkeypatch.setattr(module, name, 100)
    for module in (transfer, delivery):
        monkeypatch.setattr(module, "LARGE_BESIDE", 100)
    monkeypatch.setattr(delivery, "LARGE", 100)
    group = new_group(2)
    shares: list[tuple[str, float | None]] = []
    text = "x" * 1000
    group.push({"text": text, "n": 1}, progress=lambda text, share=None: shares.append((text, share)))
    assert group.pull(["text", "n"], 1, progress=lambda text, share=None: shares.append((text, share))) == {
        "text": text,
        "n": 1,
    }
    pushed = [share for text, share in shares if text.startswith("ddip: pushing text")]
    pulled = [share for text, share in shares if text.startswith("ddip: pulling text from rank 1")]
    assert len(pushed) == len(pulled) == 11 and 0 <= (pushed[0] or 0) < (pushed[-1] or 0) < 1
    assert group.engine(1).calls.count(on_rank.drop_transfers.target) == 1


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((part_size, "FIRST"), (part_size, "MOST"), (delivery, "MOST")):
        monkeypatch.setattr(module, name, 100)
    monkeypatch.setattr(delivery, "LARGE", 100)
    monkeypatch.setattr(delivery, "LARGE_BESIDE", 100)


def test_ranks_on_this_host_read_one_shared_copy(new_group: NewGroup, small_parts: None) -> None:
    group = new_group(3)
    values = {"text": "x" * 1000, "none": None, **{f"n{i}": i for i in range(200)}}
    group.push(values, [0, 2])
    assert group.pull([*values], 2) == values
    calls = [
        target
        for engine in (0, 2)
        for target in group.engine(engine).calls
        if target.startswith("objects.rank_transfer.")
    ]
    assert calls == [on_rank.apply_push.target, on_rank.apply_push.target, on_rank.pack_variables.target]
    assert on_rank.apply_push.target not in group.engine(1).calls


def test_ranks_that_cannot_read_the_copy_get_parts(new_group: NewGroup, small_parts: None) -> None:
    group = new_group(3)
    group.engine(1)._attach = lambda load, path, size: False  # type: ignore[method-assign]
    shares: list[float] = []
    group.push({"text": "x" * 1000}, progress=lambda text, share=None: shares.append(share or 0.0))
    assert [values["text"] for values in group.pull_all(["text"], range(3))[0]] == ["x" * 1000] * 3
    assert [group.engine(rank).calls.count(on_rank.append_part.target) for rank in range(3)] == [0, 11, 0]
    assert all(0 <= share < 1 for share in shares)


def test_without_memory_for_a_copy_all_ranks_get_parts(
    new_group: NewGroup, small_parts: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_disk_full(self: SharedBytes, portion: list[bytes]) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(SharedBytes, "write", raise_disk_full)
    group = new_group(2)
    group.push({"text": "x" * 1000})
    assert [values["text"] for values in group.pull_all(["text"], range(2))[0]] == ["x" * 1000] * 2


def test_a_stop_while_the_notebook_writes_changes_nothing(new_group: NewGroup, small_parts: None) -> None:
    group = new_group(2)
    with pytest.raises(RequestInterrupted):
        group.push({"text": "x" * 1000}, progress=lambda text, share=None: press_stop())
    assert not group.has_name("text")
    assert group.engine(0).calls[-2:] == [on_rank.drop_transfers.target, on_rank.variable_names.target]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (CannotLeave(), "odd .*: ValueError: stays"),
        (CannotArrive(), r"^nothing was pushed: odd cannot be unpickled there: ValueError: not here \(ranks 0, 1\)$"),
    ],
)
def test_a_push_of_an_unpicklable_object_changes_nothing(new_group: NewGroup, value: Any, text: str) -> None:
    group = new_group(2)
    with pytest.raises(TransferError, match=text):
        group.push({"good": 1, "odd": value})
    assert not group.has_name("good")


def test_a_pull_that_fails_says_why(new_group: NewGroup) -> None:
    group = new_group(1)
    with pytest.raises(TransferError, match="rank 0 .*variable x;"):
        group.pull(["x"])
    group.engine(0).names["x"] = CannotArrive()
    with pytest.raises(TransferError, match="x .*notebook: ValueError"):
        group.pull(["x"])
    pack = group.engine(0).answers[on_rank.pack_variables.target]
    group.engine(0).answers[on_rank.pack_variables.target] = lambda *args: {
        **pack(*args),
        "errors": {"x": "TypeError: no"},
    }
    with pytest.raises(TransferError, match="x .*rank 0: TypeError"):
        group.pull(["x"])


@pytest.mark.parametrize("target", [on_rank.apply_push.target, on_rank.pack_variables.target])
def test_a_transfer_that_is_stopped_changes_nothing(new_group: NewGroup, target: str) -> None:
    group = new_group(2)
    group.push({"x": 1})
    answer = group.engine(0).answers[target]

    def press_stop_and_answer(*args: Any) -> Any:
        press_stop()
        return answer(*args)

    group.engine(0).answers[target] = press_stop_and_answer
    with pytest.raises(RequestInterrupted):
        group.push({"x": 2}) if target == on_rank.apply_push.target else group.pull(["x"])
    group.engine(0).answers[target] = answer
    assert group.pull(["x"]) in ({"x": 1}, {"x": 2})


def test_ranks_and_names_are_checked(new_group: NewGroup) -> None:
    group = new_group(2)
    with pytest.raises(BadInput, match="rank 9"):
        group.pull(["x"], 9)
    with pytest.raises(BadInput, match=r"'a\.b'"):
        transfer.check_names(["a.b"], "%dipush")


# -- widgets


class Page(CellOutputArea):
    """A page that shows HTML, and records the messages sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rich = self.changeable = True
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def show(self, *shown: Any, **options: Any) -> None:
        """Ignore tabs, which these tests do not check."""

    def write(self, stream: str, text: str) -> None:
        self.sent.append({"header": {"msg_type": "stream"}, "content": {"text": text}})

    @property
    def message(self) -> str:
        return "m"

    @property
    def kinds(self) -> list[str]:
        return [message["header"]["msg_type"] for message in self.sent]

    @property
    def captures(self) -> list[str]:
        """Return written texts, and the starts and ends of captures by widgets."""
        entries = []
        for message in self.sent:
            content = message["content"]
            if "text" in content:
                entries.append(content["text"])
            elif "msg_id" in content["data"].get("state", {}):
                entries.append(f"{content['comm_id']}:{content['data']['state']['msg_id']}")
        return entries


class Cell(CellOutput):
    """A cell that shows ranks on such a page, and records messages that arrive after its end."""

    def __init__(self, group: Group, *ranks: int) -> None:
        super().__init__(ranks, DisplayOptions(), comms=group.comms)
        self.page: Page = Page()
        self._view = self._new_view()
        self.late_messages: list[tuple[int, dict[str, Any]]] = []

    def late(self, rank: int, message: dict[str, Any]) -> None:
        self.late_messages.append((rank, message))
        self.receive(rank, message)

    def tab(self, rank: int) -> str:
        section = self._view.section(rank)
        assert section is not None
        return plain_of(section.items)


def comm_message(kind: str, name: str, **state: Any) -> dict[str, Any]:
    return {
        "header": {"msg_type": kind},
        "content": {"comm_id": name, "target_name": "jupyter.widget", "data": {"state": state}},
    }


def widget_display(name: str) -> dict[str, Any]:
    return {"header": {"msg_type": "display_data"}, "content": {"data": {WIDGET: {"model_id": name}}}}


def stream_message(text: str) -> dict[str, Any]:
    return {"header": {"msg_type": "stream"}, "content": {"name": "stdout", "text": text}}


def update_from_page(name: str) -> None:
    """Send a widget update, as a person's action on the page would."""
    message = {"header": {"msg_type": "comm_msg"}, "content": {"comm_id": name, "data": {"method": "update"}}}
    comms._find_comms()[0].comms[name].handle_msg(message)


@NEEDS_COMM
def test_a_widget_of_a_rank_is_opened_answered_and_closed(new_group: NewGroup) -> None:
    group = new_group(1)
    cell = Cell(group, 0)
    cell.receive(0, comm_message("comm_open", "w1"))
    update_from_page("w1")
    (listener,) = group.scripted.listeners.values()
    listener(stream_message("late"))
    assert cell.late_messages == [(0, stream_message("late"))]
    cell.receive(0, comm_message("comm_close", "w1"))
    assert "w1" not in comms._find_comms()[0].comms
    assert cell.page.kinds == ["comm_open", "stream", "comm_close"]


@NEEDS_COMM
def test_actions_on_a_widget_of_an_ended_rank_do_nothing(new_group: NewGroup) -> None:
    group = new_group(1)
    Cell(group, 0).receive(0, comm_message("comm_open", "w2"))
    group.scripted.end_engine(0, 1)
    update_from_page("w2")
    comms._find_comms()[0].comms["w2"].close()


@NEEDS_COMM
def test_an_output_widget_captures_into_its_tab(new_group: NewGroup) -> None:
    cell = Cell(new_group(2), 0, 1)
    cell.receive(0, comm_message("comm_open", "out", _model_name="OutputModel"))
    cell.receive(0, comm_message("comm_msg", "out", msg_id="of the rank"))
    cell.receive(0, stream_message("before"))
    cell.receive(0, comm_message("comm_msg", "out", msg_id=""))
    assert cell.keeps(0, "out") and cell.page.kinds == ["comm_open"] and cell.tab(0) == ""
    cell.receive(0, widget_display("out"))
    assert cell.tab(0) == "before"
    cell.receive(0, comm_message("comm_open", "box", children=["IPY_MODEL_out"]))
    assert not cell.keeps(0, "out")
    assert cell.page.captures == ["out:m", "before", "out:"]  # the page gets what it missed
    cell.receive(0, comm_message("comm_msg", "out", msg_id="of the rank"))
    cell.receive(0, stream_message("inside"))
    cell.receive(1, stream_message("of another rank"))
    assert cell.page.captures[3:] == ["out:m", "inside", "out:"] and cell.tab(1) == "of another rank"


@NEEDS_COMM
@pytest.mark.parametrize("border, before", [("1px solid", []), (None, ["first"])])
def test_an_output_widget_with_layout_or_after_widgets_is_below(
    new_group: NewGroup, border: str | None, before: list[str]
) -> None:
    cell = Cell(new_group(2), 0, 1)
    cell.receive(0, comm_message("comm_open", "first"))
    cell.receive(0, comm_message("comm_open", "plain", _model_name="LayoutModel", border=border, width=None))
    cell.receive(0, comm_message("comm_open", "out", _model_name="OutputModel", layout="IPY_MODEL_plain"))
    for name in (*before, "out"):
        cell.receive(0, widget_display(name))
    cell.receive(0, comm_message("comm_msg", "out", msg_id="of the rank"))
    cell.receive(0, stream_message("inside"))
    assert cell.page.captures == ["out:m", "inside"] and cell.tab(0) == "" and not cell.keeps(0, "out")


def test_the_page_also_receives_later_children_of_a_widget(new_group: NewGroup) -> None:
    """Add children later, as ``interact`` does."""
    cell = Cell(new_group(2), 0, 1)
    for rank in (0, 1):
        cell.receive(rank, comm_message("comm_open", f"box{rank}", children=[]))
        cell.receive(rank, comm_message("comm_open", f"out{rank}", _model_name="OutputModel"))
        cell.receive(rank, comm_message("comm_msg", f"box{rank}", children=[f"IPY_MODEL_out{rank}"]))
        cell.receive(rank, comm_message("comm_msg", f"out{rank}", msg_id="of the rank"))
    for rank in (0, 1, 0):
        cell.receive(rank, stream_message(f"{rank}"))
    cell.finish()
    assert cell.page.captures == ["out0:m", "0", "out0:", "out1:m", "1", "out1:", "out0:m", "0", "out0:"]


@NEEDS_COMM
def test_output_captured_by_an_earlier_cell_appears_in_its_tab(new_group: NewGroup) -> None:
    group = new_group(2)
    first, second = Cell(group, 0, 1), Cell(group, 0)
    first.receive(0, comm_message("comm_open", "out", _model_name="OutputModel"))
    first.receive(0, widget_display("out"))
    first.finish()
    second.receive(0, comm_message("comm_msg", "out", msg_id="of the rank"))
    second.receive(0, stream_message("inside\n"))
    second.receive(0, comm_message("comm_msg", "out", msg_id=""))
    second.receive(0, stream_message("outside\n"))
    assert first.tab(0) == "inside" and second.page.captures == ["outside\n"]


@NEEDS_COMM
def test_output_after_the_cell_is_in_the_widgets_state(new_group: NewGroup) -> None:
    """A page that was reloaded captures no output."""
    group = new_group(2)
    cell = Cell(group, 0, 1)
    cell.receive(0, comm_message("comm_open", "out", _model_name="OutputModel", outputs=[]))
    cell.receive(0, comm_message("comm_open", "box", children=["IPY_MODEL_out"]))
    cell.finish()

    def send_late(*messages: dict[str, Any]) -> list[Any]:
        captured = [comm_message("comm_msg", "out", msg_id=name) for name in ("of the rank", "")]
        for message in (captured[0], *messages, captured[1]):
            cell.receive(0, message)
        group.comms.send_outputs(cell.page, at_once=True)
        return list(cell.page.sent[-1]["content"]["data"]["state"]["outputs"])

    cleared = {"header": {"msg_type": "clear_output"}, "content": {"wait": True}}
    text = {"output_type": "stream", "name": "stdout"}
    assert send_late(stream_message("a\n"), stream_message("b\n")) == [{**text, "text": "a\nb\n"}]
    picture = {"output_type": "display_data", "data": {"text/plain": "d"}, "metadata": {}}
    display = {"header": {"msg_type": "display_data"}, "content": {"data": picture["data"]}}
    assert send_late(display) == [{**text, "text": "a\nb\n"}, picture]
    assert send_late(cleared, stream_message("new\n")) == [{**text, "text": "new\n"}]
    assert cell.page.captures == []


@NEEDS_COMM
def test_callback_output_belongs_to_the_cell_showing_the_widget(new_group: NewGroup) -> None:
    group = new_group(2)
    made, seen = Cell(group, 0, 1), Cell(group, 0, 1)
    made.receive(1, comm_message("comm_open", "button"))
    made.receive(1, comm_message("comm_open", "box", children=["IPY_MODEL_button"]))
    made.finish()
    seen.receive(1, widget_display("box"))
    seen.finish()
    update_from_page("button")
    (listener,) = group.scripted.listeners.values()
    listener(stream_message("clicked"))
    assert seen.tab(1) == "clicked" and made.late_messages == []


@NEEDS_COMM
def test_an_unseen_widget_can_be_shown_later(new_group: NewGroup) -> None:
    group = new_group(2)
    made, seen, after = Cell(group, 0), Cell(group, 0, 1), Cell(group, 0)
    made.receive(1, comm_message("comm_open", "layout"))
    made.receive(1, comm_message("comm_open", "slider", value=3, layout="IPY_MODEL_layout"))
    made.receive(1, comm_message("comm_msg", "slider", value=5))
    assert made.page.sent == [] and "slider" not in comms._find_comms()[0].comms
    seen.receive(1, widget_display("slider"))
    assert [message["content"]["comm_id"] for message in seen.page.sent] == ["layout", "slider"]
    assert seen.page.sent[1]["content"]["data"]["state"]["value"] == 5
    after.receive(1, comm_message("comm_msg", "slider", value=7))  # the page still knows the widget
    assert after.page.kinds == ["comm_msg"]
    seen.finish()
    after.receive(1, comm_message("comm_close", "slider"))
    assert after.page.kinds == ["comm_msg", "comm_close"]


def test_an_unseen_widget_keeps_its_last_bytes() -> None:
    opened = comm_message("comm_open", "image", value=None, other=None)
    opened["content"]["data"]["buffer_paths"] = [["value"], ["other"]]
    opened["buffers"] = [b"old", b"kept"]
    changed = comm_message("comm_msg", "image", value=None)
    changed["content"]["data"]["buffer_paths"] = [["value"]]
    changed["buffers"] = [b"new"]
    merge_state(opened, changed)
    assert opened["buffers"] == [b"kept", b"new"]
    assert opened["content"]["data"]["buffer_paths"] == [["other"], ["value"]]
    changed["content"]["data"]["state"] = {}  # a state whose only value is binary
    merge_state(opened, changed)
    assert opened["buffers"] == [b"kept", b"new"]


@NEEDS_COMM
def test_a_reloaded_page_gets_the_bytes_of_a_rank_widget(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = comms._find_comms()[0]
    requested: list[dict[str, Any]] = []
    own = {"method": "update_states", "states": {"own": {}}, "buffer_paths": [["own", "state", "value"]]}
    monkeypatch.setitem(manager.targets, comms.CONTROL, lambda comm, message: comm.send(own, buffers=[b"own"]))
    opened = comm_message("comm_open", "image", _model_name="ImageModel", _model_module="m", _model_module_version="2")
    opened["content"]["data"]["buffer_paths"], opened["buffers"] = [["value"]], [b"of the rank"]
    cell = Cell(new_group(2), 0)
    cell.receive(0, opened)
    cell.receive(1, comm_message("comm_open", "unseen", _model_name="ImageModel"))
    page = SimpleNamespace(send=lambda data, metadata, buffers: requested.append({**data, "buffers": buffers}))
    manager.targets[comms.CONTROL](page, {})
    state = {"_model_name": "ImageModel", "_model_module": "m", "_model_module_version": "2"}
    model = {"model_name": "ImageModel", "model_module": "m", "model_module_version": "2", "state": state}
    (reply,) = requested
    assert reply["states"] == {"own": {}, "image": model}
    assert reply["buffer_paths"] == [["own", "state", "value"], ["image", "state", "value"]]
    assert reply["buffers"] == [b"own", b"of the rank"]


def test_unused_widgets_are_dropped_eventually(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddip.group.cells.comms.MOST_UNANNOUNCED", 2)
    group = new_group(2)
    for name in "abc":
        Cell(group, 0).receive(1, comm_message("comm_open", name))
    assert [name for name in "abc" if group.comms.cell_of(name)] == ["b", "c"]


def test_a_terminal_has_no_widgets(new_group: NewGroup) -> None:
    group = new_group(1)
    cell = Cell(group, 0)
    cell.page.rich = False
    cell.receive(0, comm_message("comm_open", "w3", _model_name="IntProgressModel"))
    cell.receive(0, comm_message("comm_msg", "w3", msg_id="of the rank"))
    assert cell.page.sent == []
    assert group.comms.bars.display(None, 0, {WIDGET: {"model_id": "w3"}}, {}) is None
