"""A notebook's kernel, which a benchmark sends cells to over Jupyter's protocol, as JupyterLab does."""

from __future__ import annotations

import contextlib
import queue
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jupyter_client.manager import start_new_kernel


class Kernel:
    """The kernel of a notebook."""

    def __init__(self) -> None:
        self.manager, self.client = start_new_kernel()

    def run(self, code: str, on_first_text: Callable[[str], None] = lambda text: None, may_fail: bool = False) -> float:
        """Run a cell and return its seconds; `on_first_text` gets the first text as soon as it arrives."""
        began = time.perf_counter()
        request = self.client.execute(code)
        seen = False
        while True:
            message = self.client.get_iopub_msg(timeout=120)
            if message["parent_header"].get("msg_id") != request:
                continue
            if message["msg_type"] == "stream" and not seen:
                seen = True
                on_first_text(message["content"]["text"])
            if message["msg_type"] == "error" and not may_fail:
                sys.exit("\n".join(message["content"]["traceback"]))
            if message["msg_type"] == "status" and message["content"]["execution_state"] == "idle":
                break
        self.client.get_shell_msg(timeout=10)
        return time.perf_counter() - began

    def count_messages(self, seconds: float) -> int:
        """Return the number of messages to the page within `seconds`."""
        until, count = time.monotonic() + seconds, 0
        while (left := until - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                self.client.get_iopub_msg(timeout=left)
                count += 1
        return count

    def ask(self, kind: str, code: str) -> float:
        """Return the milliseconds until a completion or help request is answered."""
        began = time.perf_counter()
        getattr(self.client, kind)(code, len(code))
        reply: Any = self.client.get_shell_msg(timeout=10)
        assert reply["content"].get("matches") or reply["content"].get("found"), reply["content"]
        return 1e3 * (time.perf_counter() - began)


@contextlib.contextmanager
def running_kernel() -> Iterator[Kernel]:
    """Start a kernel, and shut it down at the end."""
    started = Kernel()
    try:
        yield started
    finally:
        started.client.stop_channels()
        started.manager.shutdown_kernel()
