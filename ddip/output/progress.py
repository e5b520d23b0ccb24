"""The progress of ddip's operations, shown as one line with a bar that changes in place."""

from __future__ import annotations

import html
import sys
import time
from typing import Protocol

from IPython.core.getipython import get_ipython
from IPython.display import publish_display_data

from ddip.output.area import is_page, new_id


class Report(Protocol):
    """A callback that receives progress."""

    def __call__(self, text: str, share: float | None = None) -> None:
        """Report the step `text`, with the completed share of the whole operation from 0 to 1."""


WIDTH = 20
"""Width of a bar in characters."""


class Progress:
    """A line that shows the current step of an operation, once that has taken `after` seconds."""

    def __init__(self, after: float = 0.0) -> None:
        self._page = is_page()
        self._terminal = (
            not self._page
            and getattr(get_ipython(), "kernel", None) is None
            and sys.stderr is not None
            and sys.stderr.isatty()
        )
        self._id = new_id()
        self._last = ""
        self._visible_from = time.monotonic() + after

    def __call__(self, text: str, share: float | None = None) -> None:
        """Show `text`, and a bar for the completed `share` from 0 to 1, in place of the previous text."""
        if time.monotonic() >= self._visible_from:
            self._show(text, share)

    def _show(self, text: str, share: float | None) -> None:
        line = text if share is None else f"{text}  {_draw_bar(share)}"
        if line == self._last:
            return
        if self._page:
            bundle = {"text/plain": line}
            if share is not None:
                bar = f'<progress value="{share:.3f}" max="1" style="width:14em;vertical-align:middle"></progress>'
                bundle["text/html"] = f'<pre style="display:inline">{html.escape(text)}</pre> {bar}'
            publish_display_data(bundle, transient={"display_id": self._id}, update=bool(self._last))
        elif self._terminal:
            sys.stderr.write(f"\r{line:<{len(self._last)}}")
            sys.stderr.flush()
        self._last = line

    @property
    def shown(self) -> bool:
        """True if this display has shown a text or a bar."""
        return bool(self._last)

    def end(self, text: str) -> None:
        """Replace the progress line with `text`; an empty `text` removes it.

        Outside a page, `text` is printed to stdout, even if no line was shown.
        """
        if self._page:
            if text or self._last:
                self._show(text, None)
            return
        if self._last and self._terminal:
            sys.stderr.write("\r" + " " * len(self._last) + "\r")
            sys.stderr.flush()
        if text:
            print(text)


def _draw_bar(share: float) -> str:
    done = round(WIDTH * min(1.0, max(0.0, share)))
    return "━" * done + "╌" * (WIDTH - done)
