"""Relay the messages of ranks' widgets to the page, and user input on the page back to the rank.

A page that is opened or reloaded requests the state of all widgets, in one of two ways:

    comm_open of jupyter.widget.control, {"method": "request_states"}   ->  {"method": "update_states", "states": ...}
    comm_info_request, {"method": "request_state"} to each comm         ->  {"method": "update", "state": ...} from each

The first is that of ipywidgets 8; the second that of ipywidgets 7, and of a page whose first request failed. A rank
could not answer while it runs a cell, so the notebook keeps the last state of each widget that a page knows.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from dataclasses import dataclass
from typing import Any

from IPython.core.getipython import get_ipython

from ddip.cluster.cluster_api import Message
from ddip.group.members.ranks import Ranks
from ddip.output.area import CellOutputArea
from ddip.output.cells.router import CellOutput
from ddip.output.views.tabs import REDRAW_BYTES, REDRAW_SECONDS
from ddip.output.widgets import BARS, TEXTS, WidgetBars, merge_state, referenced_ids, state_in
from ddip.protocol.old_versions import find_comms

KEPT = 200
"""Number of messages from the page whose late output is still shown."""
MOST_UNANNOUNCED = 5_000
"""Most widgets to remember that the page does not know, all ranks together; progress bars on hidden ranks are among
them."""
WIDGETS = "jupyter.widget"
"""Target of the comms of widgets; libraries open comms with others."""
CONTROLS = "@jupyter-widgets/controls"
"""Module of progress bars and texts, which only show the last value of a property. A page may answer each value of a
slider, and libraries use properties to send commands; of such values none may be left out."""
CONTROL = "jupyter.widget.control"
"""Target of the comm on which a page requests the states of all widgets."""


@dataclass
class _Widget:
    """A widget of a rank, or another object with a comm that a library has opened."""

    rank: int
    cell: CellOutput
    """The cell that has shown the widget last, or created it; output of its callbacks belongs to this cell."""
    parts: set[str]
    opening: Message
    """Message that opens the widget in its current state."""
    announced: bool = False
    """True once the page knows the widget. A page does not know the widgets of ranks that are not shown."""
    clears_next: bool = False
    """True if the next output of an Output widget replaces the others."""

    def is_value(self, message: Message) -> bool:
        """Return True if a later value may replace the one in `message` before the page has got it."""
        data, opening = message["content"].get("data"), state_in(self.opening)
        is_update = isinstance(data, dict) and data.get("method") == "update" and bool(state_in(message))
        modules = {opening.get("_model_module"), opening.get("_view_module")}
        return is_update and modules == {CONTROLS} and opening.get("_model_name") in (*BARS, *TEXTS)


def _update_message(name: str, outputs: list[Any]) -> Message:
    data = {"method": "update", "state": {"outputs": outputs}, "buffer_paths": []}
    return {"header": {"msg_type": "comm_msg"}, "content": {"comm_id": name, "data": data}}


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
        self._lock = threading.Lock()
        """Held while states change or are copied; a page may request them while a cell runs, on another thread."""
        self._in_control = False
        """True once the reply to a page that requests the states of all widgets includes those of the ranks."""
        self._changed: dict[str, None] = {}
        """Output widgets whose state is to be sent; a dict as an ordered set."""
        self._next_send = 0.0
        self._held: dict[str, tuple[CellOutputArea, Message]] = {}
        """Values that are not sent yet, by name of the widget, with the page that sends them."""
        self.bars = WidgetBars()

    def relay(self, rank: int, message: Message, cell: CellOutput, shown: bool = True) -> None:
        """Relay a widget message of `rank` from the output of `cell`, unless the page cannot show widgets.

        `shown`: the cell shows this rank. Widgets of other ranks are recorded, but not announced to the page.
        """
        if not cell.page.rich:
            return
        name, kind = message["content"]["comm_id"], message["header"]["msg_type"]
        state = state_in(message)
        if kind == "comm_open":
            self.bars.open(name, state)
            self._widgets[name] = _Widget(rank, cell, referenced_ids(state), message)
            self._note_unannounced(name)
            if shown:
                self.announce(name, cell.page)
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
            self._merge(widget, message)
            for part in new if widget.announced else ():
                self.show(part, widget.cell)
        if widget.announced and kind == "comm_msg" and widget.is_value(message):
            self._hold(name, message, cell.page)
        elif widget.announced:
            self.send_values()  # which came before
            cell.page.send(message)

    def _hold(self, name: str, message: Message, page: CellOutputArea) -> None:
        """Keep values for `send_values`; they replace those of the same properties that are kept already."""
        if name in self._held and state_in(self._held[name][1]).keys() != state_in(message).keys():
            self.send_values()
        self._held[name] = page, message

    def send_values(self) -> None:
        """Send the values that have arrived since the last call, in one message for each widget."""
        while self._held:
            page, message = self._held.pop(next(iter(self._held)))
            page.send(message)

    def _merge(self, widget: _Widget, message: Message) -> None:
        with self._lock:
            merge_state(widget.opening, message)

    def show(self, name: str, cell: CellOutput) -> None:
        """Announce a widget to the page, and attribute it and all its parts to `cell`, which shows it."""
        self.announce(name, cell.page)
        visited, names = set(), [name]
        while names:
            widget = self._widgets.get(names.pop())
            if widget is not None and id(widget) not in visited:
                visited.add(id(widget))
                widget.cell = cell
                names += widget.parts

    def cell_of(self, name: str) -> CellOutput | None:
        """Return the cell that shows the widget or created it; None if there is no such widget."""
        widget = self._widgets.get(name)
        return None if widget is None else widget.cell

    def add_output(self, name: str, output: dict[str, Any]) -> None:
        """Add `output`, in the form of a notebook file, to the state of the Output widget `name`.

        `send_outputs` sends it later.
        """
        widget = self._widgets.get(name)
        if widget is None:
            return
        outputs = [] if widget.clears_next else list(state_in(widget.opening).get("outputs") or ())
        last = outputs[-1] if outputs else {}
        if "text" in output and last.get("name") == output["name"]:
            outputs[-1] = {**last, "text": "".join(last["text"]) + output["text"]}
        else:
            outputs.append(output)
        self._change_outputs(name, widget, outputs)

    def clear_output(self, name: str, wait: bool) -> None:
        """Remove the output of the Output widget `name`; with `wait`, only when the next output comes."""
        widget = self._widgets.get(name)
        if widget is not None and not wait:
            self._change_outputs(name, widget, [])
        elif widget is not None:
            widget.clears_next = True

    def _change_outputs(self, name: str, widget: _Widget, outputs: list[Any]) -> None:
        widget.clears_next = False
        self._merge(widget, _update_message(name, outputs))
        self._changed[name] = None

    def send_outputs(self, page: CellOutputArea, at_once: bool = False) -> None:
        """Send the changed outputs of Output widgets to `page`, but not too often.

        If the pause since the last call that sent some is too short, a later call sends them; the more was sent, the
        longer the pause. `at_once`: send them now in any case.
        """
        if not self._changed or (time.monotonic() < self._next_send and not at_once):
            return
        changed, self._changed = self._changed, {}
        size = 0
        for name in [name for name in changed if name in self._widgets]:
            outputs = state_in(self._widgets[name].opening).get("outputs", [])
            size += sum(len(str(output)) for output in outputs)
            page.send(_update_message(name, outputs))
        self._next_send = time.monotonic() + max(REDRAW_SECONDS, size / REDRAW_BYTES)

    def has_layout(self, name: str) -> bool:
        """Return True if the widget has a size, a border or another property of a layout."""
        widget = self._widgets.get(name)
        layout = None if widget is None else state_in(widget.opening).get("layout")
        states = [state_in(self._widgets[part].opening) for part in referenced_ids(layout) if part in self._widgets]
        return any(value is not None for state in states for key, value in state.items() if not key.startswith("_"))

    def announce(self, name: str, page: CellOutputArea) -> None:
        """Announce a widget to the page, after its parts, unless the page knows it or it does not exist."""
        widget = self._widgets.get(name)
        if widget is None or widget.announced:
            return
        self.send_values()  # which the new widget may read
        widget.announced = True
        self._unannounced.pop(name, None)
        for part in widget.parts:
            self.announce(part, page)
        self._open_comm(widget, widget.opening["content"])
        page.send(widget.opening)

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

        def handle_message(message: Message) -> None:
            if content.get("target_name") == WIDGETS and message["content"]["data"].get("method") == "request_state":
                with self._lock:
                    opened, buffers = widget.opening["content"]["data"], widget.opening.get("buffers")
                    proxy.send({**opened, "method": "update"}, buffers=buffers)
                return
            self._merge(widget, message)
            to_rank(message)

        def close_comm(message: Message | None = None) -> None:
            to_rank({"header": {"msg_type": "comm_close"}, "content": {"comm_id": content["comm_id"], "data": {}}})

        proxy.on_msg(handle_message)
        proxy.on_close(close_comm)
        manager.register_comm(proxy)
        if not self._in_control:
            self._in_control = True
            self._join_control(manager)

    def _join_control(self, manager: Any) -> None:
        """Add the states of ranks' widgets to the reply when a page requests those of all widgets.

        Importing ipywidgets registers the target; if it came later, it would replace this one. Without ipywidgets 8, a
        page requests the state of each widget.
        """
        with contextlib.suppress(ImportError):
            import ipywidgets  # noqa: F401
        opened_before = manager.targets.get(CONTROL)

        def open_control(comm: Any, message: Message) -> None:
            send = comm.send

            def send_with_ranks(data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
                if data.get("method") == "update_states":
                    states, paths, parts = self._states()
                    states, paths = {**data["states"], **states}, [*data["buffer_paths"], *paths]
                    data, buffers = {**data, "states": states, "buffer_paths": paths}, [*(buffers or []), *parts]
                send(data, metadata, buffers)

            comm.send = send_with_ranks
            opened_before(comm, message)

        if opened_before is not None:
            manager.register_target(CONTROL, open_control)

    def _states(self) -> tuple[dict[str, Any], list[list[Any]], list[Any]]:
        """Return the states of the widgets that a page knows, the paths of their buffers, and the buffers."""
        states, paths, buffers = dict[str, Any](), list[list[Any]](), list[Any]()
        with self._lock:
            for name, widget in list(self._widgets.items()):
                state = dict(state_in(widget.opening))
                if not widget.announced or not state.get("_model_name"):
                    continue
                keys = ("model_name", "model_module", "model_module_version")
                states[name] = {**{key: state.get(f"_{key}") for key in keys}, "state": state}
                found = widget.opening["content"]["data"].get("buffer_paths") or []
                paths += [[name, "state", *path] for path in found]
                buffers += widget.opening.get("buffers") or []
        return states, paths, buffers
