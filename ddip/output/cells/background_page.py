"""The output of a cell that goes on while others run: all its places are on the page before its request has ended.

    cell 5 runs in the background on ranks 0-3            becomes: how it has ended
    tabs, also of one rank                                changed in place
    (nothing)                                             becomes: a report, such as a profile
    (nothing)                                             becomes: the error

Then all that follows are changes of displays, which a page that has gone on to other cells still takes. `Differing`
is the output of a cell that the notebook has run as well: only ranks that have shown something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

from ddip.output.area import GONE, new_id, notify_late, request
from ddip.output.cells.display_options import DisplayOptions
from ddip.output.cells.router import CellOutput, lock
from ddip.output.page.colours import to_html
from ddip.output.terminal_text import plain
from ddip.output.transcript import Bundle
from ddip.output.views.labels import Labels
from ddip.output.views.tabs import Tabs
from ddip.output.views.views import Beside, Errors, View
from ddip.output.widgets import Comms, Message


class BackgroundOutput(CellOutput):
    """May be called on any thread, from the beginning. `begins` is what it says first."""

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
        self._how: tuple[str, str, Bundle] | None = None
        """It has ended."""
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
        self.page.show(_small(self._begins), None, self._status)
        tabs.reserve(buttons=True)
        self.page.remembers = True
        return tabs

    def finish(self, errors: Errors | None = None, note: str = "", beside: Beside = dict) -> frozenset[int]:
        """See `CellOutput`; the line at the top says what the note says, and has what is `beside` all that."""
        shown = super().finish(errors, "", dict if self.page.changeable else beside)
        self._finished = errors or {}, note, beside
        return shown

    def show_more(self, data: Bundle) -> None:
        """Something about the cell, below what its ranks show."""
        if self.page.changeable:
            self.page.show(data, None, self._more, update=True)
        else:
            self.page.show(data)
        for copy in self._copies:
            if isinstance(copy, BackgroundOutput):
                copy.show_more(data)

    def end(self, text: str, told: str, beside: Bundle) -> None:
        """The cell has ended, as `text` says; `told` is its error, empty if it went well. `beside` it is the same for
        programs."""
        with lock:
            self._end(text, told, beside)

    def _end(self, text: str, told: str, beside: Bundle) -> None:
        if self.page.changeable:
            self.page.show({**_small(text), **beside}, None, self._status, update=True)
            if told:
                self.page.show(_error(told), None, self._error, update=True)
        elif not self.page.script:
            self.page.write("stdout", f"{text}\n")
            if told:
                self.page.write("stderr", f"{told}\n")
        self._how = text, told, beside
        if self._finished is not None:
            self._finished = *self._finished[:2], lambda: beside
        for copy in self._copies:
            if isinstance(copy, BackgroundOutput):
                copy.end(text, told, beside)

    def show_again(self, into: CellOutput, ended: Mapping[int, bool]) -> None:
        """See `CellOutput`."""
        super().show_again(into, ended)
        if self._how is not None and isinstance(into, BackgroundOutput):
            into.end(*self._how)

    @contextlib.contextmanager
    def shown_by_the_cell_that_waits(self) -> Iterator[None]:
        """While this lasts, changes are sent as the cell that runs now would send them, and once all that is there.

        Some pages, and programs such as nbconvert, listen to no other.
        """
        try:
            with lock:  # else what is sent again could come behind what has changed meanwhile
                self.page.carrier = request()
                self.page.resend()
                notify_late()  # it has no place of its own in a terminal
                self.page.waited_for = True
            yield
        finally:
            self.page.carrier = None
            self.page.waited_for = False


def _small(text: str) -> Bundle:
    return {
        "text/plain": text,
        "text/html": f'<div class="ddip-status" style="font-size:.85em;opacity:.8">{to_html(text)}</div>',
    }


def _error(text: str) -> Bundle:
    return {"text/plain": plain(text), "text/html": f'<pre class="ddip-error">{to_html(text)}</pre>'}


Shown = tuple[str, str]
"""stdout with the value of the last line, and stderr."""


class Differing(CellOutput):
    """Shows what ranks have to say when the cell has ended, of those that do not repeat what it has shown `here`."""

    def __init__(self, ranks: Sequence[int], display: DisplayOptions, here: Shown, *, comms: Comms) -> None:
        super().__init__(ranks, display, quiet=True, comms=comms)
        self._here = here

    def finish(self, errors: Errors | None = None, note: str = "", beside: Beside = dict) -> frozenset[int]:
        """See `CellOutput`; each rank is named, since a line without a name is the notebook's."""
        self.show_ranks = frozenset(rank for rank in self.show_ranks if self._differs(rank))
        self._kept = [(rank, message) for rank, message in self._kept or [] if rank in self.show_ranks]
        limit = self.display.max_output_chars
        self._view: View = Labels(self.page, limit) if len(self.show_ranks) == 1 else self._new_view()
        return super().finish(errors, note, beside)

    def _differs(self, rank: int) -> bool:
        shown = shown_by([message for other, message in self._kept or [] if other == rank])
        return any(shown) and shown != self._here


def shown_by(messages: Sequence[Message]) -> Shown:
    """What they say, as text."""
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
