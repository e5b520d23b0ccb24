"""What a running cell prints and displays on the ranks -> the notebook, by rank.

    engine  --stream, display_data, comm_msg...-->  client's thread  --queue-->  CellOutput  -->  view  -->  page
                                                                     (late) --->

The view decides what it looks like (``views.py``, ``labels.py``, ``grouped.py``, ``tabs.py``); the page knows where it
goes (``area.py``).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from ddip.errors import RankError
from ddip.output.area import CellOutputArea
from ddip.output.display_options import DisplayOptions
from ddip.output.grouped import Grouped
from ddip.output.labels import Labels
from ddip.output.tabs import Tabs
from ddip.output.transcript import RankTranscript
from ddip.output.views import Plain, View

log = logging.getLogger("ddip")

Message = dict[str, Any]
LATE_SECONDS = 0.5
"""After which late output is drawn once more: a view does not draw again at once."""


class Comms(Protocol):
    """Whoever passes on the messages of widgets."""

    def relay(
        self,
        rank: int,
        message: Message,
        page: CellOutputArea,
        section: RankTranscript | None,
        late: Callable[[int, Message], None],
    ) -> None:
        """A message of a widget of `rank`; what its callbacks show later goes to `late`."""


class CellOutput:
    """Shows the messages of one cell, from the ranks in `show_ranks`.

    Call it on the notebook's main thread; after `finish`, `late` may come from any.
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
        self._page = CellOutputArea()
        self._comms = comms
        self._view = self._new_view()
        self._captured = Plain(self._page, self.display.max_output_chars)
        """For what a widget on the page captures."""
        self._kept: list[tuple[int, Message]] | None = [] if quiet else None
        self._lock = threading.RLock()
        self._again: threading.Timer | None = None

    @property
    def rich(self) -> bool:
        """Can the page show HTML?"""
        return self._page.rich

    def _new_view(self) -> View:
        ranks = sorted(self.show_ranks) or [0]
        limit = self.display.max_output_chars
        if len(ranks) == 1:
            return Plain(self._page, limit)
        style = self.display.style
        if style == "grouped":
            return Grouped(self._page, ranks, limit)
        if style == "tabs" or (style == "auto" and self._page.changeable):
            return Tabs(self._page, ranks, limit)
        return Labels(self._page, limit)

    def receive(self, rank: int, message: Message) -> None:
        """Show one message, or keep it for the end."""
        if rank not in self.show_ranks:
            return
        with self._lock:
            if self._kept is not None:
                self._kept.append((rank, message))
            else:
                self._show(rank, message)

    def ended(self, rank: int, failed: bool) -> None:
        """The rank has finished the cell, and all that it has shown is here."""
        if rank in self.show_ranks and self._kept is None:
            with self._lock:
                self._view.ended(rank, failed)

    def draw(self) -> None:
        """No message is waiting: bring the page up to date."""
        with self._lock:
            self._view.draw()

    def finish(self, errors: Mapping[int, RankError] | None = None, note: str = "") -> frozenset[int]:
        """The cell has ended on every rank: show what is left, and `note`; returns whose errors are shown."""
        with self._lock:
            kept, self._kept = self._kept or [], None
            for rank in sorted(self.show_ranks) if kept else ():
                for message in (message for other, message in kept if other == rank):
                    self._show(rank, message)
                self._view.ended(rank, rank in (errors or {}))
            shown = self._view.close(errors or {}, note)
            if not shown and note:
                self._page.note(note)
            self._page.close()
        return self.show_ranks if shown else frozenset()

    def late(self, rank: int, message: Message) -> None:
        """Show a message that came when the cell had ended: a thread wrote it, or a widget's callback."""
        with self._lock:
            self.receive(rank, message)
            if (
                message["header"]["msg_type"] == "error" and rank in self.show_ranks
            ):  # the cell's own comes with its reply
                traceback = "\n".join(message["content"]["traceback"])
                self._view.text(rank, "stderr", f"{traceback}\n", None)
            self._draw_late()

    def _draw_late(self) -> None:
        """Draw now, and once more for what comes too soon after that."""
        self._view.draw()
        if self._again is None:
            self._again = threading.Timer(LATE_SECONDS, self._draw_again)
            self._again.daemon = True
            self._again.start()

    def _draw_again(self) -> None:
        with self._lock:
            self._again = None
            self._view.draw()

    def _show(self, rank: int, message: Message) -> None:
        """Have the view show it; what a rank sends may be odd, and shall not end the cell."""
        try:
            self._dispatch(rank, message)
        except Exception as error:
            kind = message["header"]["msg_type"]
            log.warning("a %s of rank %d could not be shown: %s: %s", kind, rank, type(error).__name__, error)

    def _dispatch(self, rank: int, message: Message) -> None:
        content = message["content"]
        section = self._view.section(rank)
        view = self._captured if section is not None and section.outside else self._view
        match message["header"]["msg_type"]:
            case "stream":
                view.text(rank, content["name"], content["text"], content.get("line"))
            case "execute_result":
                view.result(rank, content["execution_count"], content["data"], content.get("metadata") or {})
            case "display_data":
                display_id = (content.get("transient") or {}).get("display_id")
                view.display(rank, content["data"], content.get("metadata") or {}, display_id)
            case "update_display_data":
                view.update(rank, content["data"], content.get("metadata") or {}, content["transient"]["display_id"])
            case "clear_output":
                view.clear(rank, content.get("wait", False))
            case "comm_open" | "comm_msg" | "comm_close" if self._comms is not None:
                self._comms.relay(rank, message, self._page, section, self.late)
