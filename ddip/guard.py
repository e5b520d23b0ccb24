"""Keep the threads that watch ranks running: an exception is reported once, and the thread continues.

A loop that serves ranks puts each step into ``with guard:``. No exception ends the loop, so neither a dead rank nor a
malformed message nor a faulty callback can leave a cell waiting indefinitely. Each exception is logged to ``ddip``; the
user sees it once per exception type, so that a repeated fault does not flood the page.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

log = logging.getLogger("ddip")


def _write_to_stderr(text: str) -> None:
    sys.stderr.write(f"ddip: {text}\n")


show: Callable[[str], object] = _write_to_stderr
"""Function that shows a line to the user; the notebook side replaces it."""


class Guard:
    """Report the exceptions of one task, and keep them from ending its thread.

    ``KeyboardInterrupt`` and ``GeneratorExit`` propagate: they end a task on purpose.
    """

    def __init__(self, fault: str, *, pause_seconds: float = 0.0, shown: bool = True) -> None:
        """Set up a guard whose reports begin with `fault`.

        A loop that could fail in each step sets `pause_seconds`, the sleep after a failure, so that it does not use a
        whole core. `shown`: show reports to the user in addition to the log.
        """
        self._fault, self._pause_seconds, self._shown = fault, pause_seconds, shown
        self._reported: set[str] = set()

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None or isinstance(error, KeyboardInterrupt | GeneratorExit):
            return False
        self.report(error)
        if self._pause_seconds:
            time.sleep(self._pause_seconds)
        return True

    def report(self, error: BaseException) -> None:
        """Log `error`, and show it to the user if it is the first of its type; never raises."""
        name = type(error).__name__
        try:
            cause = str(error)
        except Exception:  # user code, which raises, too
            cause = "its text cannot be shown"
        with contextlib.suppress(Exception):  # a logging handler or `show` may fail
            text = f"{self._fault}: {name}: {cause}"
            is_new = name not in self._reported
            self._reported.add(name)
            log.log(logging.WARNING if is_new else logging.DEBUG, "%s", text, exc_info=error if is_new else None)
            if is_new and self._shown:
                show(text)

    def around(self, function: Callable[..., object]) -> Callable[..., None]:
        """Wrap `function` as a callback that reports exceptions instead of raising them."""

        def run_guarded(*args: object) -> None:
            with self:
                function(*args)

        return run_guarded

    def start_thread(self, name: str, function: Callable[..., object], *args: object, daemon: bool = True) -> None:
        """Start a thread that calls `function` under this guard."""
        threading.Thread(target=self.around(function), args=args, name=name, daemon=daemon).start()
