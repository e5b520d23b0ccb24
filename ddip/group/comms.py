"""Widgets of ranks: their messages -> the page, and what a person does there -> the rank."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable
from typing import Any

import comm

from ddip.cluster.seam import Message
from ddip.group.ranks import Ranks
from ddip.output.area import CellOutputArea
from ddip.output.transcript import RankTranscript

KEPT = 200
"""Messages of the page whose late output is still shown."""


class Comms:
    """Passes on messages of widgets, both ways.

    To the page the notebook's kernel has the comms; the widgets themselves live on the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sent: collections.deque[str] = collections.deque()

    def relay(
        self,
        rank: int,
        message: Message,
        page: CellOutputArea,
        section: RankTranscript | None,
        late: Callable[[int, Message], None],
    ) -> None:
        """A message of a widget of `rank`; what its callbacks show later goes to `late`."""
        if not page.rich:
            return
        name, state = message["content"]["comm_id"], _state_in(message)
        match message["header"]["msg_type"]:
            case "comm_open":
                self._open(rank, message["content"], late)
                if section is not None:
                    _note_areas(section, name, state)
            case "comm_close":
                _close(name)
            case _ if "msg_id" in state:  # of the request whose output an Output widget shall capture
                if section is not None:
                    section.capture(name, bool(state["msg_id"]))
                    if section.is_area(name):
                        return  # the page has no part in it
                if state["msg_id"]:
                    state["msg_id"] = page.message
        page.send(message)

    def _open(self, rank: int, content: dict[str, Any], late: Callable[[int, Message], None]) -> None:
        cluster, engine = self._ranks.cluster, self._ranks.members[rank].engine
        proxy = comm.create_comm(target_name=content.get("target_name", ""), comm_id=content["comm_id"], primary=False)

        def to_rank(message: Message) -> None:
            with contextlib.suppress(KeyError, OSError):  # its rank has ended, or the whole group
                self._sent.append(cluster.send_comm(engine, message, lambda shown: late(rank, shown)))
            if len(self._sent) > KEPT:
                cluster.stop_listening(self._sent.popleft())

        def close(message: Message | None = None) -> None:
            to_rank({"header": {"msg_type": "comm_close"}, "content": {"comm_id": content["comm_id"], "data": {}}})

        proxy.on_msg(to_rank)
        proxy.on_close(close)
        comm.get_comm_manager().register_comm(proxy)


def _state_in(message: Message) -> dict[str, Any]:
    """What of a widget changes with `message`; what a rank sends may be odd."""
    data = message["content"].get("data")
    state = data.get("state") if isinstance(data, dict) else None
    return state if isinstance(state, dict) else {}


def _note_areas(section: RankTranscript, name: str, state: dict[str, Any]) -> None:
    """An Output widget is shown in the tab, unless it is inside another widget: those are below the tabs."""
    if state.get("_model_name") == "OutputModel":
        section.add_area(name)
    children = state.get("children")
    if isinstance(children, list):
        section.drop_areas(str(child).removeprefix("IPY_MODEL_") for child in children)


def _close(name: str) -> None:
    """The rank has closed its widget."""
    proxy = comm.get_comm_manager().comms.pop(name, None)
    if proxy is not None:
        proxy._closed = True  # else it would close the rank's again
