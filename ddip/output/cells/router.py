"""Route the output of a cell on ranks to the notebook.

    engine  --stream, display_data, comm_msg...-->  client's thread  --queue-->  CellOutput  -->  view  -->  page
                                                                     (late) --->      |
                                                     output captured by an Output widget of another cell --> that cell
                                                   Recording, and CellOutputs that show the cell again (``%dipcell``)

The view defines the layout (``views.py``, ``labels.py``, ``grouped.py``, ``tabs.py``); the page sends output to the
right cell (``area.py``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from ddip.guard import Guard
from ddip.output.area import CellOutputArea
from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.recording import Recording, without_widget
from ddip.output.transcript import WIDGET, Area, Bundle, Display, Item, RankTranscript, Text, is_ours
from ddip.output.views.grouped import Grouped
from ddip.output.views.labels import Labels
from ddip.output.views.tabs import Tabs
from ddip.output.views.views import Beside, Errors, Plain, View
from ddip.output.widgets import Message, ShownBar, WidgetBars, referenced_ids, state_in

log = logging.getLogger("ddip")

COMM = ("comm_open", "comm_msg", "comm_close")
LATE_SECONDS = 0.5
"""Seconds after which late output is drawn again, because views limit how often they redraw."""
lock = threading.RLock()
"""Shared by all cells, because a widget of one cell may capture the output of another."""
_late_thread = ThreadPoolExecutor(1, thread_name_prefix="ddip-late-output")


@dataclass(eq=False)
class _Capture:
    """An Output widget that captures the output of a rank."""

    model: str
    cell: CellOutput
    """The cell that shows the widget."""
    view: Plain | None
    """View for the page's widget; None if a tab shows the captured output."""
    by_page: bool = False
    """True if the page captures what is sent to it, as it does while the cell runs."""


class CellOutput:
    """The output of one cell from the ranks in `show_ranks`.

    The methods are called on the notebook's main thread; after `finish`, any thread may call `late` and `show_late`.
    """

    def __init__(
        self,
        show_ranks: Sequence[int],
        display: DisplayOptions | None = None,
        *,
        quiet: bool = False,
        comms: Comms | None = None,
    ) -> None:
        self.show_ranks = frozenset(show_ranks)
        self.display = display or DisplayOptions()
        self.page = CellOutputArea()
        self.recording = Recording()
        self._comms = comms
        self._copies: list[CellOutput] = []
        """Outputs that show this cell again."""
        self._finished: tuple[Errors, str, Beside] | None = None
        """Arguments of `finish`; None until it is called."""
        self._view = self._new_view()
        self._captures: dict[int, list[_Capture]] = {}
        """Active captures by rank, the innermost last."""
        self._kept: list[tuple[int, Message]] | None = [] if quiet else None
        """Messages to show at the end of the cell; None: they are shown at once."""
        self._redraw_timer: threading.Timer | None = None
        self._guard = Guard("what a cell has shown cannot be drawn", shown=False)

    @property
    def rich(self) -> bool:
        """True if the page can show HTML."""
        return self.page.rich

    def _new_view(self) -> View:
        ranks, limit = sorted(self.show_ranks) or [0], self.display.max_output_chars
        if len(ranks) == 1:
            return Plain(self.page, limit)
        style = self.display.style
        if style == "grouped":
            return Grouped(self.page, ranks, limit)
        if style == "tabs" or (style == "auto" and self.page.changeable):
            return Tabs(self.page, ranks, limit)
        return Labels(self.page, limit)

    def receive(self, rank: int, message: Message) -> None:
        """Show one message, or keep it for the end of the cell if the cell is quiet.

        Of ranks that are not in `show_ranks`, only widget messages are used.
        """
        with lock:
            if rank not in self.show_ranks:
                if message["header"]["msg_type"] in COMM:
                    self._show(rank, message)
            elif self._kept is not None:
                self._kept.append((rank, message))
            else:
                self._show(rank, message)

    def ended(self, rank: int, failed: bool) -> None:
        """Mark the rank as finished, once all its messages have been received."""
        if rank in self.show_ranks and self._kept is None:
            with lock:
                with self._guard:
                    self._view.ended(rank, failed)
                for copy in self._copies:
                    copy.ended(rank, failed)

    def draw(self) -> None:
        """Update the page; called when no message is waiting."""
        with lock:
            self._send_values()
            with self._guard:
                self.page.capture("")
                self._view.draw()
                if self._comms is not None:
                    self._comms.send_outputs(self.page)
            for copy in self._copies:
                copy.draw()

    def finish(self, errors: Errors | None = None, note: str = "", beside: Beside = dict) -> frozenset[int]:
        """Show the rest of the output, and `note`; return the ranks whose errors are shown.

        Called when the cell has ended on every rank. `beside` returns additional MIME forms of the whole output for
        programs.
        """
        with lock:
            kept, self._kept = self._kept or [], None
            for rank in sorted(self.show_ranks) if kept else ():
                for message in (message for other, message in kept if other == rank):
                    self._show(rank, message)
                with self._guard:
                    self._view.ended(rank, rank in (errors or {}))
            shown, data = False, Message()
            self._send_values()
            with self._guard:
                for rank in self._captures:
                    self._end_captures(rank, 0)
                self.page.capture("")
                self._write_bars()
                data = self.page.beside = beside()
                shown = self._view.close(errors or {}, note)
                if not shown and note:
                    self.page.note(note)
            self.page.close()
            self._finished = errors or {}, note, lambda: data
            for copy in self._copies:
                copy.finish(*self._finished)
        return self.show_ranks if shown else frozenset()

    def show_late(self, rank: int, message: Message) -> None:
        """Call `late` on a separate thread, which may wait for the page; callable from any thread."""
        _late_thread.submit(self._guard.around(self.late), rank, message)

    def late(self, rank: int, message: Message) -> None:
        """Show a message that came after the end of the cell, from a thread or a widget's callback.

        It may wait for the page; `show_late` does not.
        """
        if message["header"]["msg_type"] == "error":  # not the cell's error, which comes with its reply
            traceback = "\n".join(message["content"]["traceback"])
            message = {"header": {"msg_type": "stream"}, "content": {"name": "stderr", "text": f"{traceback}\n"}}
        with lock:
            self.receive(rank, message)
            self._draw_late()

    def show_again(self, into: CellOutput, ended: Mapping[int, bool]) -> None:
        """Show the recorded output in `into`, and later output as it comes.

        `ended` maps each rank that has finished the cell to True if the cell failed there.
        """
        with lock:
            for rank, message in self.recording.messages():
                into.receive(rank, message)
            for rank, failed in ended.items():
                into.ended(rank, failed)
            into.draw()
            if self._finished is not None:
                into.finish(*self._finished)
            self._copies.append(into)

    def _draw_late(self) -> None:
        """Draw now, and again after `LATE_SECONDS` for output that comes too soon after this."""
        self.draw()
        if self._redraw_timer is None:
            self._redraw_timer = threading.Timer(LATE_SECONDS, self._guard.around(self._draw_again))
            self._redraw_timer.daemon = True
            self._redraw_timer.start()

    def _draw_again(self) -> None:
        with lock:
            self._redraw_timer = None
            self._write_bars()
            self.draw()
            if self._comms is not None:
                self._comms.send_outputs(self.page, at_once=True)

    def _send_values(self) -> None:
        """Send the values of widgets that have changed."""
        with self._guard:
            if self._comms is not None:
                self._comms.send_values()

    def _write_bars(self) -> None:
        """Update the text of widget bars that have changed, each in the cell that shows it."""
        for bar in self._comms.bars.take_changed() if self._comms is not None else ():
            bar.cell.write_bar(bar, bar.cell.page if self.page.closed else self.page)

    def write_bar(self, bar: ShownBar, page: CellOutputArea) -> None:
        """Update the text of a bar that this cell shows, as output of the cell of `page`."""
        with self.page.by_way_of(page):
            self._view.update(bar.rank, bar.data, bar.metadata, bar.display_id)
        transient = {"display_id": bar.display_id}
        content = {"data": without_widget(bar.data), "metadata": bar.metadata, "transient": transient}
        self.recording.add(bar.rank, {"header": {"msg_type": "update_display_data"}, "content": content})

    def _show(self, rank: int, message: Message) -> None:
        """Show a message; a malformed one is logged and does not end the cell."""
        try:
            self._dispatch(rank, message)
        except Exception as error:
            kind = message["header"]["msg_type"]
            log.warning("a %s of rank %d could not be shown: %s: %s", kind, rank, type(error).__name__, error)

    def _dispatch(self, rank: int, message: Message) -> None:
        content, kind = message["content"], message["header"]["msg_type"]
        if kind in COMM:
            if self._comms is not None:
                self._widget_message(rank, message, self._comms)
            return
        captures = self._captures.get(rank)
        capture = captures[-1] if captures else None
        if capture is not None and capture.cell is not self:
            capture.cell.late(rank, message)
            return
        if kind == "display_data":
            message = self._with_id(rank, message)
            content = message["content"]
        self._record(rank, message, capture is not None)
        view = self._view if capture is None or capture.view is None else capture.view
        self.page.capture(capture.model if capture is not None and capture.by_page else "")
        model = (content.get("data") or {}).get(WIDGET, {}).get("model_id")
        if model is not None and self._comms is not None:
            self._show_widget(rank, model, self._comms)
        match kind:
            case "stream":
                view.text(rank, content["name"], content["text"], content.get("line"), content.get("cut", 0))
            case "execute_result":
                view.result(rank, content["execution_count"], content["data"], content.get("metadata") or {})
            case "display_data":
                data, metadata = content["data"], content.get("metadata") or {}
                view.display(rank, data, metadata, (content.get("transient") or {}).get("display_id"))
            case "update_display_data":
                view.update(rank, content["data"], content.get("metadata") or {}, content["transient"]["display_id"])
            case "clear_output":
                view.clear(rank, content.get("wait", False))

    def _with_id(self, rank: int, message: Message) -> Message:
        """Give the display of a widget bar an ID, so that its text can be updated."""
        content = message["content"]
        if self._comms is None or (content.get("transient") or {}).get("display_id") is not None:
            return message
        display_id = self._comms.bars.display(self, rank, content["data"], content.get("metadata") or {})
        if display_id is None:
            return message
        return {**message, "content": {**content, "transient": {"display_id": display_id}}}

    def _record(self, rank: int, message: Message, captured: bool) -> None:
        """Record a message to show it again, and pass it to the outputs that already show the cell again."""
        content = message["content"]
        if is_ours((content.get("transient") or {}).get("display_id") or ""):  # a bar, of which only the text is kept
            message = {**message, "content": {**content, "data": without_widget(content["data"])}}
        self.recording.add(rank, message, captured)
        for copy in self._copies:
            copy.receive(rank, message)

    # -- widgets

    def _widget_message(self, rank: int, message: Message, comms: Comms) -> None:
        name, kind, state = message["content"]["comm_id"], message["header"]["msg_type"], state_in(message)
        shown = rank in self.show_ranks
        if kind == "comm_msg" and "msg_id" in state:  # an Output widget begins or ends to capture
            if shown and self.page.rich:
                self._capture(rank, name, bool(state["msg_id"]), message, comms)
            return
        if kind == "comm_close":
            (comms.cell_of(name) or self).widget_closed(rank, name)
        comms.relay(rank, message, self, shown)
        tabs = self._tab(rank)
        if kind == "comm_open" and shown and tabs is not None and state.get("_model_name") == "OutputModel":
            tabs.add_area(name)
        for part in referenced_ids(state):
            self._give_to_page(rank, part, comms)

    def _tab(self, rank: int) -> RankTranscript | None:
        """Return the transcript of the rank's tab; None in other views, which cannot hold captured output."""
        return self._view.section(rank) if isinstance(self._view, Tabs) and rank in self.show_ranks else None

    def _capture(self, rank: int, model: str, on: bool, message: Message, comms: Comms) -> None:
        """Begin (if `on`) or end to capture the output of `rank` in the Output widget with the model ID `model`.

        The cell that keeps the widget then shows the output, or this cell if none does.
        """
        captures = self._captures.setdefault(rank, [])
        if not on:
            found = [at for at, capture in enumerate(captures) if capture.model == model]
            if found:
                self._end_captures(rank, found[-1], message)
            return
        cell = comms.cell_of(model)
        if cell is not None and cell.keeps(rank, model):
            captures.append(_Capture(model, cell, None))
            if cell is not self:
                cell.late(rank, message)
        else:
            comms.announce(model, self.page)
            page = OutputState(comms, model) if self.page.closed else self.page
            view = Plain(page, self.display.max_output_chars, changeable=False)
            captures.append(_Capture(model, self, view, by_page=not self.page.closed))
        self._note_in_tab(rank, model, True)

    def _note_in_tab(self, rank: int, model: str, on: bool) -> None:
        tab = self._tab(rank)
        if tab is not None and tab.is_area(model):
            tab.capture(model, on)

    def _end_captures(self, rank: int, first: int, message: Message | None = None) -> None:
        """End the captures of `rank` from index `first` on; `message` is the widget's, if that ends them."""
        captures = self._captures.get(rank, [])
        for capture in captures[first:]:
            if capture.view is not None and capture.view.has_flood:
                self.page.capture(capture.model if capture.by_page else "")
                capture.view.close({}, "")
            if capture.cell is not self and message is not None:
                capture.cell.late(rank, message)
            self._note_in_tab(rank, capture.model, False)
        del captures[first:]

    def _show_widget(self, rank: int, model: str, comms: Comms) -> None:
        """Show the widget `model` on the page below the tabs, or its captured output in the rank's tab.

        A tab is above all widgets. So it shows only the output of an Output widget without a layout, such as that of a
        ``rich`` bar, and only if the rank has shown no other widget in this cell.
        """
        tab = self._tab(rank)
        if not self.keeps(rank, model) or comms.has_layout(model) or (tab is not None and tab.has_widgets):
            self._give_to_page(rank, model, comms)
        comms.show(model, self)

    def _give_to_page(self, rank: int, model: str, comms: Comms) -> None:
        """Move the output that an Output widget captured for a tab to the page's widget."""
        cell = comms.cell_of(model)
        items = [] if cell is None else cell.take(rank, model)
        if items:
            before = self.page.capturing
            self.page.capture(model)
            replay_items(Plain(self.page, self.display.max_output_chars, changeable=False), rank, items)
            self.page.capture(before)

    def keeps(self, rank: int, model: str) -> bool:
        """Return True if the rank's tab shows the captured output of this Output widget."""
        tab = self._tab(rank)
        return tab is not None and tab.is_area(model)

    def take(self, rank: int, model: str) -> list[Item]:
        """Remove the captured output of an Output widget from the tab and return it; the page then shows it."""
        tab = self._tab(rank)
        return [] if tab is None else tab.drop_area(model)

    def widget_closed(self, rank: int, model: str) -> None:
        """Remove a widget that the rank has closed."""
        if rank in self.show_ranks:
            self.page.capture("")
            self._view.widget_closed(rank, model)


class Comms(Protocol):
    """The relay of widget messages between ranks and pages."""

    bars: WidgetBars
    """The progress bars among the widgets."""

    def relay(self, rank: int, message: Message, cell: CellOutput, shown: bool = True) -> None:
        """Relay a widget message of `rank` that came with the output of `cell`."""

    def show(self, name: str, cell: CellOutput) -> None:
        """Record that `cell` shows the widget, so that later output of its callbacks belongs there."""

    def cell_of(self, name: str) -> CellOutput | None:
        """Return the cell that shows the widget, else the one that created it; None if it is unknown."""

    def add_output(self, name: str, output: Bundle) -> None:
        """Add `output`, in the form of a notebook file, to the state of an Output widget."""

    def clear_output(self, name: str, wait: bool) -> None:
        """Remove the output in the state of an Output widget; with `wait`, when the next output comes."""

    def send_values(self) -> None:
        """Send the values of widgets that have changed since the last call."""

    def send_outputs(self, page: CellOutputArea, at_once: bool = False) -> None:
        """Send the changed outputs of Output widgets to `page`, at a limited rate; with `at_once`, now in any case."""

    def has_layout(self, name: str) -> bool:
        """Return True if the widget has a size, a border or another property of a layout."""

    def announce(self, name: str, page: CellOutputArea) -> None:
        """Send the widget, and those in it, to `page`, unless the page has them."""


class OutputState(CellOutputArea):
    """The output area of an Output widget after the end of the cell: the widget's state.

    A page captures only output of cells that it has run itself, and thus none after a reload.
    """

    def __init__(self, comms: Comms, model: str) -> None:
        super().__init__()
        self._comms, self._model = comms, model

    def write(self, stream: str, text: str) -> None:
        """Add text of a stream."""
        if text:
            self._comms.add_output(self._model, {"output_type": "stream", "name": stream, "text": text})

    def show(
        self, data: Bundle, metadata: Bundle | None = None, display_id: str | None = None, update: bool = False
    ) -> None:
        """Add a MIME bundle; an Output widget ignores updates."""
        if not update:
            output = {"output_type": "display_data", "data": data, "metadata": metadata or {}}
            self._comms.add_output(self._model, output)

    def clear(self, wait: bool) -> None:
        """Clear the widget; with `wait`, when the next output comes."""
        self._comms.clear_output(self._model, wait)


def replay_items(view: Plain, rank: int, items: Sequence[Item]) -> None:
    """Show `items` of `rank` again in `view`."""
    for item in items:
        if isinstance(item, Text):
            view.text(rank, item.stream, item.screen.text, None)
        elif isinstance(item, Display):
            view.display(rank, item.data, item.metadata, item.display_id)
        elif isinstance(item, Area):
            replay_items(view, rank, item.items)
