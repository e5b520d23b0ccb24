"""Relay the messages of ranks' widgets to the page, and user input on the page back to the rank."""

from __future__ import annotations

import collections
import contextlib
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython

from ddip.cluster.cluster_api import Message
from ddip.group.members.ranks import Ranks
from ddip.output.area import CellOutputArea
from ddip.output.widgets import WidgetBars, WidgetCell, merge_state, referenced_ids, state_in
from ddip.protocol.old_versions import find_comms

KEPT = 200
"""Number of messages from the page whose late output is still shown."""
MOST_UNANNOUNCED = 5_000
"""Most widgets to remember that the page does not know, all ranks together; progress bars on hidden ranks are among
them."""


@dataclass
class _Widget:
    """A widget of a rank, or another object with a comm that a library has opened."""

    rank: int
    cell: WidgetCell
    """The cell that has shown the widget last, or created it; output of its callbacks belongs to this cell."""
    parts: set[str]
    opening: Message | None
    """Message that opens the widget in its current state; None once the page knows the widget. A page does not know the
    widgets of ranks that are not shown."""


def _find_comms() -> tuple[Any, Any]:
    return find_comms(getattr(get_ipython(), "kernel", None))


class Comms:
    """Relays messages of widgets in both directions.

    To the page, the notebook's kernel owns the comms; the widgets themselves live on the ranks.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._sent: collections.deque[str] = collections.deque()
        self._widgets: dict[str, _Widget] = {}
        self._unannounced: dict[str, None] = {}
        """Names of the widgets that the page does not know, the oldest first; a dict as an ordered set."""
        self.bars = WidgetBars()

    def relay(self, rank: int, message: Message, cell: WidgetCell, shown: bool = True) -> None:
        """Relay a widget message of `rank` from the output of `cell`; `shown`: the cell shows this rank."""
        if not cell.page.rich:
            return
        name, kind = message["content"]["comm_id"], message["header"]["msg_type"]
        state = state_in(message)
        if kind == "comm_open":
            self.bars.open(name, state)
            self._widgets[name] = _Widget(rank, cell, referenced_ids(state), message)
            self._note_unannounced(name)
            if shown:
                self.tell(name, cell.page)
            return
        widget = self._widgets.get(name)
        if widget is None:
            return
        if kind == "comm_close":
            self.bars.close(name)
            self._drop_widget(name)
        else:
            self.bars.change(name, state)
            new = referenced_ids(state) - widget.parts
            widget.parts |= new
            if widget.opening is not None:
                merge_state(widget.opening, message)
                return
            for part in new:
                self.show(part, widget.cell)
        if widget.opening is None:
            cell.page.send(message)

    def show(self, name: str, cell: WidgetCell) -> None:
        """Announce a widget to the page, and attribute it and all its parts to `cell`, which shows it."""
        self.tell(name, cell.page)
        visited, names = set(), [name]
        while names:
            widget = self._widgets.get(names.pop())
            if widget is not None and id(widget) not in visited:
                visited.add(id(widget))
                widget.cell = cell
                names += widget.parts

    def cell_of(self, name: str) -> WidgetCell | None:
        """Return the cell that shows the widget or created it; None if there is no such widget."""
        widget = self._widgets.get(name)
        return None if widget is None else widget.cell

    def tell(self, name: str, page: CellOutputArea) -> None:
        """Announce a widget to the page, after its parts, unless the page knows it."""
        widget = self._widgets.get(name)
        if widget is None or widget.opening is None:
            return
        message, widget.opening = widget.opening, None
        self._unannounced.pop(name, None)
        for part in widget.parts:
            self.tell(part, page)
        self._open_comm(widget, message["content"])
        page.send(message)

    def _note_unannounced(self, name: str) -> None:
        self._unannounced[name] = None
        if len(self._unannounced) > MOST_UNANNOUNCED:
            self._drop_widget(next(iter(self._unannounced)))

    def _drop_widget(self, name: str) -> None:
        self._widgets.pop(name, None)
        self._unannounced.pop(name, None)
        manager, _ = _find_comms()
        proxy = manager.comms.pop(name, None)
        if proxy is not None:
            proxy._closed = True  # otherwise its finalizer would also close the rank's comm

    def _open_comm(self, widget: _Widget, content: dict[str, Any]) -> None:
        cluster, engine = self._ranks.cluster, self._ranks.members[widget.rank].engine
        manager, create_comm = _find_comms()
        proxy = create_comm(target_name=content.get("target_name", ""), comm_id=content["comm_id"], primary=False)

        def to_rank(message: Message) -> None:
            late = widget.cell.late
            with contextlib.suppress(KeyError, OSError):  # the rank, or the whole group, has ended
                self._sent.append(cluster.send_comm(engine, message, lambda shown: late(widget.rank, shown)))
            if len(self._sent) > KEPT:
                cluster.stop_listening(self._sent.popleft())

        def close_comm(message: Message | None = None) -> None:
            to_rank({"header": {"msg_type": "comm_close"}, "content": {"comm_id": content["comm_id"], "data": {}}})

        proxy.on_msg(to_rank)
        proxy.on_close(close_comm)
        manager.register_comm(proxy)
