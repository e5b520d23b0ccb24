"""Widgets of ranks: their messages -> the page, and what a person does there -> the rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import comm

from ddip import ipp_private
from ddip.page import Page
from ddip.ranks import Ranks
from ddip.sections import Section

Message = dict[str, Any]


class Comms:
    """Passes on messages of widgets, both ways.

    To the page the notebook's kernel has the comms; the widgets themselves live on the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def relay(
        self,
        rank: int,
        message: Message,
        page: Page,
        section: Section | None,
        late: Callable[[int, Message], None],
    ) -> None:
        """A message of a widget of `rank`; what its callbacks show later goes to `late`."""
        if not page.rich:
            return
        content = message["content"]
        name = content["comm_id"]
        state = (content.get("data") or {}).get("state") or {}
        if message["header"]["msg_type"] == "comm_open":
            if section is not None and state.get("_model_name") == "OutputModel":
                section.add_area(name)
            self._open(rank, content, late)
        if "msg_id" in state:  # of the request whose output an Output widget shall capture
            if section is not None and section.is_area(name):
                section.capture(name, bool(state["msg_id"]))
                return  # the page has no part in it
            if state["msg_id"]:
                state["msg_id"] = page.message
        page.send(message)

    def _open(self, rank: int, content: dict[str, Any], late: Callable[[int, Message], None]) -> None:
        engine = self._ranks.members[rank].engine
        proxy = comm.create_comm(target_name=content.get("target_name", ""), comm_id=content["comm_id"], primary=False)

        def to_rank(message: Message) -> None:
            with contextlib.suppress(KeyError):  # its rank has ended
                ipp_private.send_comm(self._ranks.cluster.client, engine, message, lambda shown: late(rank, shown))

        def close(message: Message | None = None) -> None:
            to_rank({"header": {"msg_type": "comm_close"}, "content": {"comm_id": content["comm_id"], "data": {}}})

        proxy.on_msg(to_rank)
        proxy.on_close(close)
        comm.get_comm_manager().register_comm(proxy)
