"""The place below the notebook's cell: what is shown there while the cell runs, and when it has ended.

It asks what the front end can do, and shows pages of help (``model?``) of a rank as the notebook shows its own.
"""

from __future__ import annotations

import collections
import contextlib
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.page import page as page_text
from IPython.display import clear_output, publish_display_data

from ddip.output.transcript import OUR_IDS

_asked: set[str] = set()
"""Sessions of front ends that have asked whether what was typed is complete: those with a prompt."""


def watch_front_end(kernel: Any) -> None:
    """Note which front ends of `kernel`, if there is one, have a prompt; until `forget`."""
    if kernel is None:
        return
    own = kernel.do_is_complete

    def do_is_complete(code: str) -> Any:
        _asked.add(kernel.get_parent("shell").get("header", {}).get("session", ""))
        return own(code)

    kernel.do_is_complete = do_is_complete


def forget_front_end(kernel: Any) -> None:
    """Leave the kernel, if there is one, as it was."""
    _asked.clear()
    if kernel is not None:
        del kernel.do_is_complete


def is_page() -> bool:
    """Does the cell that runs have a page below it, on which what is shown can be changed?

    jupyter-console has none, nor has a terminal. It has a kernel, and tells it nothing of itself; but it has a prompt,
    and its cells have no id, unlike those of JupyterLab's console.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    parent = kernel.get_parent("shell")
    session = parent.get("header", {}).get("session", "")
    return session not in _asked or "cellId" in parent.get("metadata", {})


Bundle = dict[str, Any]

GONE: Bundle = {
    "text/html": (
        '<div class="ddip-gone" hidden><style>.jp-OutputArea-child:has(.ddip-gone){display:none}</style></div>'
    ),
    "text/plain": "",
}
"""In place of what is not there any more; the output itself cannot be taken away."""

_late: collections.deque[str] = collections.deque(maxlen=1000)
"""What came last for cells that had ended, where a terminal waits for input: a thread may go on writing for hours."""
_lock = threading.Lock()
_told_in: ContextVar[CellOutputArea | None] = ContextVar("ddip_told_in", default=None)
"""Where notices of this thread belong: below a cell that runs in the background."""


def publish(data: Bundle, metadata: Bundle | None = None, *, transient: Bundle, update: bool) -> None:
    """Display a MIME bundle. In a script IPython makes a shell for it, whose module must not become ``__main__``."""
    main = sys.modules["__main__"]
    try:
        publish_display_data(data, metadata, transient=transient, update=update)
    finally:
        sys.modules["__main__"] = main


class CellOutputArea:
    """The output of the cell that runs when this is made.

    While it runs, what is shown goes the way of the cell's own output, so that ``%%capture`` has it too. After `close`
    it goes to the same cell by its message, and a terminal gets it, with a label, before its next cell.
    """

    def __init__(self) -> None:
        shell = get_ipython()
        self._kernel = getattr(shell, "kernel", None)
        self.script = _is_script(shell)
        """Nobody types cells here."""
        self._parent = request()
        self._number = cell_number()
        self._stream = ""
        self.capturing = ""
        """Which Output widget of the page has what is shown."""
        self.closed = False
        """Has the cell ended?"""
        self.rich = self._kernel is not None
        """A notebook's page: shows HTML and images, and can change what it shows."""
        self.changeable = is_page()
        """Can change what it has shown."""
        self.terminal = not self.rich and sys.stdout is not None and sys.stdout.isatty()
        """Can move its cursor."""
        self.carrier: dict[str, Any] | None = None
        """Request of a cell that waits for this one: changes are sent as its own, for pages that listen to no other."""
        self.waited_for = False
        """Does a cell wait for this one? Then a terminal gets what it shows as it comes."""
        self.beside: Bundle = {}
        """Forms of all that the cell has shown, for programs, when it has ended: beside what is shown last."""
        self.remembers = False
        """Can what is shown be sent again?"""
        self._shown: dict[str, tuple[Bundle, Bundle | None]] = {}

    @contextlib.contextmanager
    def by_way_of(self, other: CellOutputArea) -> Iterator[None]:
        """While this lasts, what is changed here is sent as if the cell of `other` did it: some pages listen to no cell
        but the one that runs."""
        own = self._parent, self.closed
        self._parent, self.closed = other._parent, other.closed
        try:
            yield
        finally:
            self._parent, self.closed = own

    def close(self) -> None:
        """The cell has ended; what comes now may come from any thread."""
        self.closed = True

    def write(self, stream: str, text: str) -> None:
        """Write to ``stdout`` or ``stderr``; a terminal gets what comes late with a label."""
        if not text:
            return
        if not self.closed:
            if stream != self._stream:  # what was written before leaves before
                self._stream = stream
                flush()
            _write(stream, text)
        elif self.rich:
            self._send("stream", {"name": stream, "text": text})
        elif self.script or self.waited_for:
            _write(stream, text)
            flush()
        else:
            with _lock:
                _late.append("".join(f"[cell {self._number}] {line}\n" for line in text.splitlines()))

    def show(
        self, data: Bundle, metadata: Bundle | None = None, display_id: str | None = None, update: bool = False
    ) -> None:
        """Display a MIME bundle, or put it in place of the one with the same `display_id`."""
        transient = {} if display_id is None else {"display_id": display_id}
        if self.remembers and display_id is not None:
            self._shown[display_id] = data, metadata
        if not self.closed:
            flush()
            publish(data, metadata, transient=transient, update=update)
        elif self.rich:
            kind = "update_display_data" if update else "display_data"
            self._send(kind, {"data": data, "metadata": metadata or {}, "transient": transient})
        else:
            self.write("stdout", data.get("text/plain", "") + "\n")

    def resend(self) -> None:
        """Send once more what can be changed, if it is remembered."""
        for display_id, (data, metadata) in list(self._shown.items()):
            self.show(data, metadata, display_id, update=True)

    def note(self, text: str) -> None:
        """Show a line about the cell, small and grey where that can be."""
        small = f'<div style="font-size:.8em;opacity:.75;text-align:right">{text}</div>'
        grey = self.terminal and str(getattr(get_ipython(), "colors", "")).lower() != "nocolor"
        self.show({"text/plain": f"\x1b[90m{text}\x1b[0m" if grey else text, "text/html": small, **self.beside})

    def clear(self, wait: bool) -> None:
        """Clear what the cell has shown."""
        if not self.closed:
            flush()
            clear_output(wait)
        elif self.rich:
            self._send("clear_output", {"wait": wait})

    def send(self, message: dict[str, Any]) -> None:
        """Pass on a widget's message."""
        if self._kernel is not None:
            if not self.closed:
                flush()
            header = message["header"]
            self._send(header["msg_type"], message["content"], message.get("buffers"), message.get("metadata"))

    def capture(self, model: str) -> None:
        """From here on the Output widget `model` on the page has what is shown; ``""``: no widget has.

        A page knows by the id of the cell what it is to capture. While it does, that widget has all that belongs to the
        cell, whichever rank it is from, and passes over updates of displays.
        """
        if model != self.capturing:
            for name, message in ((self.capturing, ""), (model, self.message)):
                if name:
                    data = {"method": "update", "state": {"msg_id": message}, "buffer_paths": []}
                    self.send({"header": {"msg_type": "comm_msg"}, "content": {"comm_id": name, "data": data}})
            self.capturing = model

    def _send(self, kind: str, content: Bundle, buffers: Any = None, metadata: Any = None) -> None:
        assert self._kernel is not None
        kernel = self._kernel
        parent = self.carrier if self.carrier is not None and kind == "update_display_data" else self._parent
        kernel.session.send(kernel.iopub_socket, kind, content, parent=parent, buffers=buffers, metadata=metadata)

    @property
    def message(self) -> str:
        """Id of the request of the cell; empty where there is none."""
        return "" if self._parent is None else str(self._parent.get("header", {}).get("msg_id", ""))


def _is_script(shell: InteractiveShell | None) -> bool:
    """Is there nobody who types cells? IPython makes a plain shell where there is none, to display."""
    return shell is None or type(shell) is InteractiveShell


def cell_number() -> int | None:
    """Number of the notebook's cell that runs now; None in a script.

    Not ``execution_count``, which some releases of IPython count up when the cell begins, and others when it ends.
    """
    shell = get_ipython()
    if shell is None or _is_script(shell):
        return None
    return len(shell.history_manager.input_hist_parsed) - 1  # type: ignore[union-attr]


def request() -> dict[str, Any] | None:
    """That of the notebook's cell that runs now; None where there is none."""
    kernel = getattr(get_ipython(), "kernel", None)
    return None if kernel is None else kernel.get_parent("shell")  # type: ignore[no-any-return]


def new_id() -> str:
    """An id that no other output on any page has."""
    return f"{OUR_IDS}{uuid.uuid4().hex[:12]}"


def _write(stream: str, text: str) -> None:
    file = sys.stderr if stream == "stderr" else sys.stdout
    if file is not None:  # it was closed when Python started: what is printed goes nowhere
        file.write(text)


def flush() -> None:
    """Send what was written to the notebook's page."""
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            file.flush()


@contextlib.contextmanager
def notices_in(page: CellOutputArea) -> Iterator[None]:
    """What ddip says of itself on this thread belongs there."""
    token = _told_in.set(page)
    try:
        yield
    finally:
        _told_in.reset(token)


def notify(text: str) -> None:
    """Say something of ddip's own while a cell runs."""
    page = _told_in.get()
    if page is not None:
        page.write("stderr", f"ddip: {text}\n")
        return
    _write("stderr", f"ddip: {text}\n")
    flush()


class Notice:
    """Something of ddip's own that is true for a while."""

    def __init__(self, text: str) -> None:
        self._page = _told_in.get()
        changeable = is_page() if self._page is None else self._page.changeable
        self._id = new_id() if changeable else ""
        self._show(text, update=False)

    def replace(self, text: str) -> None:
        """It is not true any more; where what was shown cannot be changed, it stays."""
        if self._id:
            self._show(text, update=True)

    def _show(self, text: str, update: bool) -> None:
        if not self._id:
            notify(text)
            return
        data = {"text/plain": f"ddip: {text}"}
        if self._page is not None:
            self._page.show(data, display_id=self._id, update=update)
            return
        flush()
        publish(data, transient={"display_id": self._id}, update=update)


def stop_name() -> str:
    """What ends a cell here: a notebook has a button, a terminal has not."""
    return "the stop button" if is_page() else "Ctrl-C"


def notify_late() -> None:
    """Before a terminal's cell: what came since the last."""
    with _lock:
        texts = list(_late)
        _late.clear()
    if texts:
        _write("stdout", "".join(texts))
        flush()


PAGES = ("page", "set_next_input")
"""What a cell may ask of the notebook, besides output."""


def show_pages(payload: Sequence[dict[str, Any]]) -> bool:
    """Show what is in the `payload` of a rank's reply; returns False if there is nothing."""
    shell = get_ipython()
    pages = [page for page in payload if page.get("source") in PAGES]
    if not pages or shell is None:
        return False
    for page in pages:
        if getattr(shell, "kernel", None) is not None:
            shell.payload_manager.write_payload(page)  # type: ignore[union-attr]
        elif page["source"] == PAGES[0]:
            page_text(page["data"])
    return True
