"""The output of a cell that runs in the background while other cells run.

The page gets all displays of the cell before its request ends:

    cell 5 runs in the background on ranks 0-3            becomes: the outcome
    tabs, even for one rank                               updated in place
    (nothing)                                             becomes: a report, such as a profile
    (nothing)                                             becomes: the error

All later output updates these displays, which a page accepts even while other cells run. `Differing` shows a cell that
also ran in the notebook: only the ranks whose output differs from the notebook's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from ddip.output.area import GONE, current_request, new_id, print_late_output
from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.router import CellOutput, Comms, lock
from ddip.output.page.colours import to_html
from ddip.output.terminal_text import strip_escapes
from ddip.output.transcript import Bundle
from ddip.output.views.labels import Labels
from ddip.output.views.tabs import Tabs
from ddip.output.views.views import Beside, Errors, View
from ddip.output.widgets import Message


class BackgroundOutput(CellOutput):
    """The output of a background cell, which shows `begins` at first; any thread may call its methods."""

    def __init__(
        self,
        show_ranks: Sequence[int],
        begins: str,
        display: DisplayOptions | None = None,
        *,
        quiet: bool = False,
        comms: Comms | None = None,
    ) -> None:
        self._begins = begins
        self._status, self._more, self._error = new_id(), new_id(), new_id()
        self._end_arguments: tuple[str, str, Bundle] | None = None
        """Arguments of `end`; None until the cell has ended."""
        super().__init__(show_ranks, display, quiet=quiet, comms=comms)
        if self.page.changeable:
            self.page.show(GONE, None, self._more)
            self.page.show(GONE, None, self._error)
        self.page.close()

    def _new_view(self) -> View:
        if not self.page.changeable:
            if not self.page.script:
                self.page.write("stdout", f"{self._begins}\n")
            return super()._new_view()
        tabs = Tabs(self.page, sorted(self.show_ranks) or [0], self.display.max_output_chars)
        self.page.show(_status_bundle(self._begins), None, self._status)
        tabs.reserve(buttons=True)
        self.page.remembers = True
        return tabs

    def finish(self, errors: Errors | None = None, note: str = "", beside: Beside = dict) -> frozenset[int]:
        """Show the rest of the output as `CellOutput` does, and return the ranks whose errors are shown.

        `note` is omitted, as the first line shows the outcome; `beside` is added to that line if it can be changed.
        """
        shown = super().finish(errors, "", dict if self.page.changeable else beside)
        self._finished = errors or {}, note, beside
        return shown

    def show_more(self, data: Bundle) -> None:
        """Show a report about the cell below the output of its ranks."""
        if self.page.changeable:
            self.page.show(data, None, self._more, update=True)
        else:
            self.page.show(data)
        for copy in self._copies:
            if isinstance(copy, BackgroundOutput):
                copy.show_more(data)

    def end(self, text: str, error: str, beside: Bundle) -> None:
        """Show the outcome `text` in the first line, and `error`, which is empty if the cell succeeded.

        `beside` holds the MIME forms of the output for programs.
        """
        with lock:
            self._show_end(text, error, beside)

    def _show_end(self, text: str, error: str, beside: Bundle) -> None:
        if self.page.changeable:
            self.page.show({**_status_bundle(text), **beside}, None, self._status, update=True)
            if error:
                self.page.show(_error_bundle(error), None, self._error, update=True)
        elif not self.page.script:
            self.page.write("stdout", f"{text}\n")
            if error:
                self.page.write("stderr", f"{error}\n")
        self._end_arguments = text, error, beside
        if self._finished is not None:
            self._finished = *self._finished[:2], lambda: beside
        for copy in self._copies:
            if isinstance(copy, BackgroundOutput):
                copy.end(text, error, beside)

    def show_again(self, into: CellOutput, ended: Mapping[int, bool]) -> None:
        """Show the cell again (see `CellOutput`), with its outcome if it has ended."""
        super().show_again(into, ended)
        if self._end_arguments is not None and isinstance(into, BackgroundOutput):
            into.end(*self._end_arguments)

    @contextlib.contextmanager
    def shown_by_the_cell_that_waits(self) -> Iterator[None]:
        """Send updates as output of the running cell within the context, and first all displays again.

        Some pages, and programs such as nbconvert, accept messages only from the running cell.
        """
        try:
            with lock:  # otherwise a display could be sent again after a newer update
                self.page.carrier = current_request()
                self.page.resend()
                print_late_output()  # a terminal has no separate area for the cell
                self.page.waited_for = True
            yield
        finally:
            self.page.carrier = None
            self.page.waited_for = False


def _status_bundle(text: str) -> Bundle:
    return {
        "text/plain": text,
        "text/html": f'<div class="ddip-status" style="font-size:.85em;opacity:.8">{to_html(text)}</div>',
    }


def _error_bundle(text: str) -> Bundle:
    return {"text/plain": strip_escapes(text), "text/html": f'<pre class="ddip-error">{to_html(text)}</pre>'}


Shown = tuple[str, str]
"""Text of stdout with the value of the last line, and of stderr."""


class Differing(CellOutput):
    """The output of ranks that differs from `here`, the output in the notebook; shown at the end."""

    def __init__(self, ranks: Sequence[int], display: DisplayOptions, here: Shown, *, comms: Comms) -> None:
        super().__init__(ranks, display, quiet=True, comms=comms)
        self._here = here

    def finish(self, errors: Errors | None = None, note: str = "", beside: Beside = dict) -> frozenset[int]:
        """Show only ranks that differ, as `CellOutput` does; return the ranks whose errors are shown.

        Even a single rank has a label, because text without one is the notebook's.
        """
        self.show_ranks = frozenset(rank for rank in self.show_ranks if self._differs(rank))
        self._kept = [(rank, message) for rank, message in self._kept or [] if rank in self.show_ranks]
        limit = self.display.max_output_chars
        self._view: View = Labels(self.page, limit) if len(self.show_ranks) == 1 else self._new_view()
        return super().finish(errors, note, beside)

    def _differs(self, rank: int) -> bool:
        shown = shown_by([message for other, message in self._kept or [] if other == rank])
        return any(shown) and shown != self._here


def shown_by(messages: Sequence[Message]) -> Shown:
    """Return the text that `messages` show: stdout with the value of the last line, and stderr."""
    out, err = "", ""
    for message in messages:
        content = message["content"]
        match message["header"]["msg_type"]:
            case "stream" if content["name"] == "stderr":
                err += content["text"]
            case "stream":
                out += content["text"]
            case "execute_result":
                out += content["data"].get("text/plain", "")
    return out, err
