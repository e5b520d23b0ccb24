"""Widgets of ranks: their messages -> the page, and what a person does there -> the rank."""

from __future__ import annotations

import collections
import contextlib
from dataclasses import dataclass
from typing import Any

import comm

from ddip.cluster.cluster_api import Message
from ddip.group.members.ranks import Ranks
from ddip.output.area import CellOutputArea
from ddip.output.widgets import WidgetBars, WidgetCell, merge, parts, state_in

KEPT = 200
"""Messages of the page whose late output is still shown."""
UNTOLD = 5_000
"""Widgets that the page has not been told of, all ranks together: those of bars that nobody looks at are among them."""


@dataclass
class _Widget:
    """One of a rank; or the like, which a library has."""

    rank: int
    cell: WidgetCell
    """In which it was shown last, or made: what its callbacks show belongs to that."""
    parts: set[str]
    untold: Message | None
    """What opens it, as it is now, while the page does not know it: it was made on a rank that was not shown."""


class Comms:
    """Passes on messages of widgets, both ways.

    To the page the notebook's kernel has the comms; the widgets themselves live on the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sent: collections.deque[str] = collections.deque()
        self._widgets: dict[str, _Widget] = {}
        self._untold: dict[str, None] = {}
        """Names of the widgets that the page does not know, the oldest first."""
        self.bars = WidgetBars()

    def relay(self, rank: int, message: Message, cell: WidgetCell, shown: bool = True) -> None:
        """A message of a widget of `rank`, which came with the output of `cell`; `shown`: is the rank shown there?"""
        if not cell.page.rich:
            return
        name, kind = message["content"]["comm_id"], message["header"]["msg_type"]
        state = state_in(message)
        if kind == "comm_open":
            self.bars.open(name, state)
            self._widgets[name] = _Widget(rank, cell, parts(state), message)
            self._keep(name)
            if shown:
                self.tell(name, cell.page)
            return
        widget = self._widgets.get(name)
        if widget is None:
            return
        if kind == "comm_close":
            self.bars.close(name)
            self._forget(name)
        else:
            self.bars.change(name, state)
            new = parts(state) - widget.parts
            widget.parts |= new
            if widget.untold is not None:
                merge(widget.untold, message)
                return
            for part in new:
                self.show(part, widget.cell)
        if widget.untold is None:
            cell.page.send(message)

    def show(self, name: str, cell: WidgetCell) -> None:
        """`cell` shows the widget, and all that is in it."""
        self.tell(name, cell.page)
        seen, todo = set(), [name]
        while todo:
            widget = self._widgets.get(todo.pop())
            if widget is not None and id(widget) not in seen:
                seen.add(id(widget))
                widget.cell = cell
                todo += widget.parts

    def cell_of(self, name: str) -> WidgetCell | None:
        """Where the widget is shown, or was made; None: there is none."""
        widget = self._widgets.get(name)
        return None if widget is None else widget.cell

    def tell(self, name: str, page: CellOutputArea) -> None:
        """Tell the page of the widget, if it does not know it, and first of what is in it."""
        widget = self._widgets.get(name)
        if widget is None or widget.untold is None:
            return
        message, widget.untold = widget.untold, None
        self._untold.pop(name, None)
        for part in widget.parts:
            self.tell(part, page)
        self._open(widget, message["content"])
        page.send(message)

    def _keep(self, name: str) -> None:
        self._untold[name] = None
        if len(self._untold) > UNTOLD:
            self._forget(next(iter(self._untold)))

    def _forget(self, name: str) -> None:
        self._widgets.pop(name, None)
        self._untold.pop(name, None)
        proxy = comm.get_comm_manager().comms.pop(name, None)
        if proxy is not None:
            proxy._closed = True  # else it would close the rank's again

    def _open(self, widget: _Widget, content: dict[str, Any]) -> None:
        cluster, engine = self._ranks.cluster, self._ranks.members[widget.rank].engine
        proxy = comm.create_comm(target_name=content.get("target_name", ""), comm_id=content["comm_id"], primary=False)

        def to_rank(message: Message) -> None:
            late = widget.cell.late
            with contextlib.suppress(KeyError, OSError):  # its rank has ended, or the whole group
                self._sent.append(cluster.send_comm(engine, message, lambda shown: late(widget.rank, shown)))
            if len(self._sent) > KEPT:
                cluster.stop_listening(self._sent.popleft())

        def close(message: Message | None = None) -> None:
            to_rank({"header": {"msg_type": "comm_close"}, "content": {"comm_id": content["comm_id"], "data": {}}})

        proxy.on_msg(to_rank)
        proxy.on_close(close)
        comm.get_comm_manager().register_comm(proxy)
