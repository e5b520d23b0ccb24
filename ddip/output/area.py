"""The output area below a notebook cell, for use while the cell runs and after it has ended.

This module also detects what the front end can display, prints notices of ddip, and shows a rank's help pages
(``model?``) in the notebook's pager.
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

_prompt_sessions: set[str] = set()
"""Sessions of front ends with a prompt: they have asked the kernel whether the input is complete."""


def watch_front_end(kernel: Any) -> None:
    """Record which front ends of `kernel` have a prompt, until `forget_front_end`.

    Does nothing without a kernel.
    """
    if kernel is None:
        return
    original = kernel.do_is_complete

    def do_is_complete(code: str) -> Any:
        _prompt_sessions.add(kernel.get_parent("shell").get("header", {}).get("session", ""))
        return original(code)

    kernel.do_is_complete = do_is_complete


def forget_front_end(kernel: Any) -> None:
    """Undo `watch_front_end` on `kernel`, if any."""
    _prompt_sessions.clear()
    if kernel is not None:
        del kernel.do_is_complete


def is_page() -> bool:
    """Return True if the running cell has a page whose outputs can be changed.

    A terminal and jupyter-console have none. The kernel recognizes jupyter-console only by its prompt and by its cells,
    which have no id; those of JupyterLab's console have one.
    """
    parent = current_request()
    if parent is None:
        return False
    session = parent.get("header", {}).get("session", "")
    return session not in _prompt_sessions or "cellId" in parent.get("metadata", {})


Bundle = dict[str, Any]

GONE: Bundle = {
    "text/html": (
        '<div class="ddip-gone" hidden><style>.jp-OutputArea-child:has(.ddip-gone){display:none}</style></div>'
    ),
    "text/plain": "",
}
"""Invisible replacement for a display that was removed; the output itself cannot be removed from a page."""

_late_texts: collections.deque[str] = collections.deque(maxlen=1000)
"""The last texts for ended cells of a terminal, printed before its next cell; a thread may keep writing for hours."""
_lock = threading.Lock()
_notice_area: ContextVar[CellOutputArea | None] = ContextVar("ddip_notice_area", default=None)
"""The background cell below which this thread's notices belong; None: the running cell."""


def publish_bundle(data: Bundle, metadata: Bundle | None = None, *, transient: Bundle, update: bool) -> None:
    """Display a MIME bundle without changing ``__main__``.

    In a script, IPython creates a shell for the display, whose module would replace ``__main__``.
    """
    main = sys.modules["__main__"]
    try:
        publish_display_data(data, metadata, transient=transient, update=update)
    finally:
        sys.modules["__main__"] = main


class CellOutputArea:
    """The output area of the cell that is running when this is created.

    While the cell runs, output takes the same path as the cell's own, so that ``%%capture`` captures it. After `close`
    it is sent with the cell's request as parent; a terminal prints it, with a label, before its next cell.
    """

    def __init__(self) -> None:
        shell = get_ipython()
        self._kernel = getattr(shell, "kernel", None)
        self.script = _is_script(shell)
        """True if no one types cells here."""
        self._parent = current_request()
        self._number = cell_number()
        self._stream = ""
        self.capturing = ""
        """Model ID of the page's Output widget that captures the output; empty for none."""
        self.closed = False
        """True if the cell has ended."""
        self.rich = self._kernel is not None
        """True if there is a kernel, to whose front ends HTML and images can be sent."""
        self.changeable = is_page()
        """True if outputs can be changed after they were shown."""
        self.terminal = not self.rich and sys.stdout is not None and sys.stdout.isatty()
        """True on a terminal whose cursor can be moved."""
        self.carrier: dict[str, Any] | None = None
        """Request of a cell that waits for this one, sent as parent of updates: some pages accept no other."""
        self.waited_for = False
        """True while a cell waits for this one, so that a terminal prints output as it comes."""
        self.beside: Bundle = {}
        """MIME forms of the whole output, for programs, sent with the last output of an ended cell."""
        self.remembers = False
        """True to keep displays that have an ID for `resend`."""
        self._shown: dict[str, tuple[Bundle, Bundle | None]] = {}

    @contextlib.contextmanager
    def by_way_of(self, other: CellOutputArea) -> Iterator[None]:
        """Send changes as output of the cell of `other` within the context.

        Some pages accept messages only from the running cell.
        """
        before = self._parent, self.closed
        self._parent, self.closed = other._parent, other.closed
        try:
            yield
        finally:
            self._parent, self.closed = before

    def close(self) -> None:
        """Mark the cell as ended; later output may come from any thread."""
        self.closed = True

    def write(self, stream: str, text: str) -> None:
        """Write `text` to `stream`, ``stdout`` or ``stderr``; after the end of the cell, a terminal adds a label."""
        if not text:
            return
        if not self.closed:
            if stream != self._stream:  # keeps the order of the two streams
                self._stream = stream
                flush_streams()
            _write_stream(stream, text)
        elif self.rich:
            self._send("stream", {"name": stream, "text": text})
        elif self.script or self.waited_for:
            _write_stream(stream, text)
            flush_streams()
        else:
            with _lock:
                _late_texts.append("".join(f"[cell {self._number}] {line}\n" for line in text.splitlines()))

    def show(
        self, data: Bundle, metadata: Bundle | None = None, display_id: str | None = None, update: bool = False
    ) -> None:
        """Display a MIME bundle; with `update` it replaces the one with the same `display_id`."""
        transient = {} if display_id is None else {"display_id": display_id}
        if self.remembers and display_id is not None:
            self._shown[display_id] = data, metadata
        if not self.closed:
            flush_streams()
            publish_bundle(data, metadata, transient=transient, update=update)
        elif self.rich:
            kind = "update_display_data" if update else "display_data"
            self._send(kind, {"data": data, "metadata": metadata or {}, "transient": transient})
        else:
            self.write("stdout", data.get("text/plain", "") + "\n")

    def resend(self) -> None:
        """Send the remembered displays again."""
        for display_id, (data, metadata) in list(self._shown.items()):
            self.show(data, metadata, display_id, update=True)

    def note(self, text: str) -> None:
        """Show a line about the cell, small and grey if the front end supports that."""
        small = f'<div style="font-size:.8em;opacity:.75;text-align:right">{text}</div>'
        grey = self.terminal and str(getattr(get_ipython(), "colors", "")).lower() != "nocolor"
        self.show({"text/plain": f"\x1b[90m{text}\x1b[0m" if grey else text, "text/html": small, **self.beside})

    def clear(self, wait: bool) -> None:
        """Clear the cell's output; with `wait`, when the next output comes."""
        if not self.closed:
            flush_streams()
            clear_output(wait)
        elif self.rich:
            self._send("clear_output", {"wait": wait})

    def send(self, message: dict[str, Any]) -> None:
        """Forward a widget message to the page."""
        if self._kernel is not None:
            if not self.closed:
                flush_streams()
            header = message["header"]
            self._send(header["msg_type"], message["content"], message.get("buffers"), message.get("metadata"))

    def capture(self, model: str) -> None:
        """Make the Output widget `model` on the page capture the output from now on; ``""`` ends capturing.

        A page selects the output to capture by the ID of the cell's request. So the widget captures all output of the
        cell, whichever rank it comes from; it ignores updates of displays.
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
        """ID of the cell's request; empty if there is none."""
        return "" if self._parent is None else str(self._parent.get("header", {}).get("msg_id", ""))


def _is_script(shell: InteractiveShell | None) -> bool:
    """Return True if no one types cells: in a script, IPython creates a plain shell on the first display."""
    return shell is None or type(shell) is InteractiveShell


def cell_number() -> int | None:
    """Return the number of the running notebook cell; None in a script.

    ``execution_count`` does not serve: some releases of IPython increase it when the cell begins, others at its end.
    """
    shell = get_ipython()
    if shell is None or _is_script(shell):
        return None
    return len(shell.history_manager.input_hist_parsed) - 1  # type: ignore[union-attr]


def current_request() -> dict[str, Any] | None:
    """Return the request of the running notebook cell; None without a kernel."""
    kernel = getattr(get_ipython(), "kernel", None)
    return None if kernel is None else kernel.get_parent("shell")  # type: ignore[no-any-return]


def new_id() -> str:
    """Return a display ID that is unique on any page."""
    return f"{OUR_IDS}{uuid.uuid4().hex[:12]}"


def _write_stream(stream: str, text: str) -> None:
    file = sys.stderr if stream == "stderr" else sys.stdout
    if file is not None:  # None if it was closed when Python started
        file.write(text)


def flush_streams() -> None:
    """Flush stdout and stderr, so that their text reaches the page before the next message."""
    for file in (sys.stdout, sys.stderr):
        if file is not None:
            file.flush()


@contextlib.contextmanager
def notices_in(page: CellOutputArea) -> Iterator[None]:
    """Show notices of this thread below the cell of `page` within the context."""
    token = _notice_area.set(page)
    try:
        yield
    finally:
        _notice_area.reset(token)


def notify(text: str) -> None:
    """Print a warning of ddip to stderr below the running cell, or below that of `notices_in`."""
    _print_notice("stderr", text)


def inform(text: str) -> None:
    """Print news of ddip that needs no action.

    It goes to stdout in a notebook, which shows stderr in red, and to stderr elsewhere.
    """
    _print_notice("stdout" if getattr(get_ipython(), "kernel", None) is not None else "stderr", text)


def _print_notice(stream: str, text: str) -> None:
    page = _notice_area.get()
    if page is not None:
        page.write(stream, f"ddip: {text}\n")
        return
    _write_stream(stream, f"ddip: {text}\n")
    flush_streams()


class Notice:
    """A notice of ddip that is replaced when it is no longer true."""

    def __init__(self, text: str) -> None:
        self._page = _notice_area.get()
        changeable = is_page() if self._page is None else self._page.changeable
        self._id = new_id() if changeable else ""
        self._show(text, update=False)

    def replace(self, text: str) -> None:
        """Replace the notice with `text`; if the front end cannot change outputs, the notice stays."""
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
        flush_streams()
        publish_bundle(data, transient={"display_id": self._id}, update=update)


def stop_name() -> str:
    """Return the name of what stops a cell: the button of a notebook, or Ctrl-C in a terminal."""
    return "the stop button" if is_page() else "Ctrl-C"


def print_late_output() -> None:
    """Print the output of background cells that a terminal holds back until its next cell.

    Called before each cell, and when a cell waits for a background cell.
    """
    with _lock:
        texts = list(_late_texts)
        _late_texts.clear()
    if texts:
        _write_stream("stdout", "".join(texts))
        flush_streams()


PAGES = ("page", "set_next_input")
"""Payload sources that a rank's cell may send to the notebook: a page for the pager, text for the next cell."""


def show_pages(payload: Sequence[dict[str, Any]]) -> bool:
    """Show a rank's help pages and set next inputs; return True if the reply `payload` has any.

    A terminal shows no next inputs. Returns False outside IPython.
    """
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
