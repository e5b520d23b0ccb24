"""Objects to ranks and back, and widgets, on engines that do what a script says."""

from __future__ import annotations

from typing import Any

import comm
import pytest

from ddip.errors import BadInput, RequestInterrupted, TransferError
from ddip.group import transfer
from ddip.output.area import CellOutputArea
from ddip.output.transcript import RankTranscript
from ddip.protocol import on_rank

from .conftest import NewGroup
from .scripted import press_stop


class CannotLeave:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("stays")


def fails(text: str) -> None:
    """What an object does when it arrives."""
    raise ValueError(text)


class CannotArrive:
    """Cannot be unpickled."""

    def __reduce__(self) -> Any:
        return fails, ("not here",)


def test_names_go_to_all_ranks_and_come_back(new_group: NewGroup) -> None:
    group = new_group(3)
    assert group.push({"a": 1, "b": [2]}) == []
    group.push({"a": 5}, ranks=[1])
    assert group.pull(["a", "b"], 2) == {"a": 1, "b": [2]}
    assert group.pull_all(["a"], [0, 1]) == ([{"a": 1}, {"a": 5}], [])
    assert group.has_name("a") and not group.has_name("c")


def test_what_is_large_travels_in_parts(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PART", 100)
    group = new_group(2)
    told: list[tuple[str, float | None]] = []
    text = "x" * 1000
    group.push({"text": text, "n": 1}, progress=lambda text, share=None: told.append((text, share)))
    assert group.pull(["text", "n"], 1, progress=lambda text, share=None: told.append((text, share))) == {
        "text": text,
        "n": 1,
    }
    pushed = [share for text, share in told if text.startswith("ddip: pushing text")]
    pulled = [share for text, share in told if text.startswith("ddip: pulling text from rank 1")]
    assert len(pushed) == len(pulled) == 11 and pushed[0] == 0 < (pushed[-1] or 0) < 1
    assert group.engine(1).calls.count(on_rank.drop.target) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (CannotLeave(), "^nothing was pushed: odd cannot be pickled: .*stays"),
        (CannotArrive(), r"^nothing was pushed: odd cannot be unpickled there: ValueError: not here \(ranks 0, 1\)"),
    ],
)
def test_a_push_of_what_cannot_be_carried_changes_nothing(new_group: NewGroup, value: Any, text: str) -> None:
    group = new_group(2)
    with pytest.raises(TransferError, match=text):
        group.push({"good": 1, "odd": value})
    assert not group.has_name("good")


def test_a_pull_of_what_cannot_be_had_says_why(new_group: NewGroup) -> None:
    group = new_group(1)
    with pytest.raises(
        TransferError, match="nothing was pulled: rank 0 has no variable x; type names that a %%dip cell has defined"
    ):
        group.pull(["x"])
    group.engine(0).names["x"] = CannotArrive()
    with pytest.raises(TransferError, match="x cannot be unpickled in the notebook: ValueError: not here"):
        group.pull(["x"])
    pack = group.engine(0).answers[on_rank.pack.target]
    group.engine(0).answers[on_rank.pack.target] = lambda *args: {**pack(*args), "errors": {"x": "TypeError: no"}}
    with pytest.raises(TransferError, match="x cannot be pickled on rank 0: TypeError: no"):
        group.pull(["x"])


@pytest.mark.parametrize("target", [on_rank.stage.target, on_rank.pack.target])
def test_a_transfer_that_is_stopped_changes_nothing(new_group: NewGroup, target: str) -> None:
    group = new_group(2)
    group.push({"x": 1})
    answer = group.engine(0).answers[target]

    def press(*args: Any) -> Any:
        press_stop()
        return answer(*args)

    group.engine(0).answers[target] = press
    with pytest.raises(RequestInterrupted):
        group.push({"x": 2}) if target == on_rank.stage.target else group.pull(["x"])
    group.engine(0).answers[target] = answer
    assert group.pull(["x"]) in ({"x": 1}, {"x": 2})


def test_ranks_and_names_are_checked(new_group: NewGroup) -> None:
    group = new_group(2)
    with pytest.raises(BadInput, match="there is no rank 9"):
        group.pull(["x"], 9)
    with pytest.raises(BadInput, match="'a.b' is not a name"):
        transfer.check_names(["a.b"], "%dipush")


# -- widgets


class Page(CellOutputArea):
    """A page that shows HTML, and notes what is sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.rich = True
        self.sent: list[dict[str, Any]] = []

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)


def comm_message(kind: str, name: str, **state: Any) -> dict[str, Any]:
    return {
        "header": {"msg_type": kind},
        "content": {"comm_id": name, "target_name": "jupyter.widget", "data": {"state": state}},
    }


def test_a_widget_of_a_rank_is_opened_answered_and_closed(new_group: NewGroup) -> None:
    group = new_group(1)
    page, shown = Page(), []
    relay = group._comms.relay
    relay(0, comm_message("comm_open", "w1"), page, None, lambda rank, message: shown.append((rank, message)))
    proxy = comm.get_comm_manager().comms["w1"]
    proxy.handle_msg({"header": {"msg_type": "comm_msg"}, "content": {"comm_id": "w1", "data": {"method": "update"}}})
    (listener,) = group.scripted.listeners.values()
    listener({"header": {}})
    assert shown == [(0, {"header": {}})]
    relay(0, comm_message("comm_close", "w1"), page, None, lambda *_: None)
    assert "w1" not in comm.get_comm_manager().comms
    assert [message["header"]["msg_type"] for message in page.sent] == ["comm_open", "comm_close"]


def test_what_a_person_does_with_a_widget_of_an_ended_rank_is_lost_without_harm(new_group: NewGroup) -> None:
    group = new_group(1)
    group._comms.relay(0, comm_message("comm_open", "w2"), Page(), None, lambda *_: None)
    group.scripted.end_engine(0, 1)
    proxy = comm.get_comm_manager().comms["w2"]
    proxy.handle_msg({"header": {"msg_type": "comm_msg"}, "content": {"comm_id": "w2", "data": {}}})
    proxy.close()


def test_an_output_widget_captures_into_its_tab(new_group: NewGroup) -> None:
    group = new_group(1)
    page, section = Page(), RankTranscript(1000)
    relay = group._comms.relay
    relay(0, comm_message("comm_open", "out", _model_name="OutputModel"), page, section, lambda *_: None)
    relay(0, comm_message("comm_msg", "out", msg_id="m"), page, section, lambda *_: None)
    assert section.is_area("out") and len(page.sent) == 1
    relay(0, comm_message("comm_open", "box", children=["IPY_MODEL_out"]), page, section, lambda *_: None)
    relay(0, comm_message("comm_msg", "out", msg_id="m"), page, section, lambda *_: None)
    assert len(page.sent) == 3 and page.sent[-1]["content"]["data"]["state"]["msg_id"] == page.message


def test_a_terminal_has_no_widgets(new_group: NewGroup) -> None:
    page = Page()
    page.rich = False
    new_group(1)._comms.relay(0, comm_message("comm_open", "w3"), page, None, lambda *_: None)
    assert page.sent == []
