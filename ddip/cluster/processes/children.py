"""Track processes that another process, the preload process or a host's agent, forks on request.

request ->   {"fork": id, ...}     {"end": id}                end this child, or do not start it
<- report    {"forked": id, "pid": ...}, {"refused": id, "why": ...}, {"exited": id, "code": ...}
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ddip.guard import Guard


class CannotFork(RuntimeError):
    """The requested process cannot be forked; the message says why."""


class Child:
    """A process forked on request."""

    def __init__(
        self,
        number: int,
        cancel: Callable[[int], Future[None]],
        kill: Callable[[int], None],
        mark: Callable[[int], None],
    ) -> None:
        self.number = number
        self.pid: Future[int] = Future()
        """The PID once it is forked; raises CannotFork."""
        self.exit: Future[int | None] = Future()
        """The exit code, or the negative signal number; None if unknown, since the forking process ended first."""
        self.log = ""
        """The log of the ended process since the last mark; only an agent reports it."""
        self._cancel, self._kill, self._mark = cancel, kill, mark

    def mark_log(self) -> None:
        """Leave everything logged until now out of `log`; only agents support this."""
        self._mark(self.number)

    def end(self) -> Future[None]:
        """Kill the process, or cancel its start, without waiting.

        The future is done once it has ended or can no longer start.
        """
        forked = self.pid.done() and self.pid.exception() is None
        ended = self._cancel(self.number)
        if forked:  # the forking process may be busy importing, so kill directly
            self._kill(self.pid.result())
        return ended

    def over(self, outcome: int | CannotFork | None) -> None:
        """Set `pid` and `exit`, since the process has ended or was never forked.

        `outcome`: the exit code, None if unknown, or the reason why it was not forked.
        """
        if not self.pid.done():
            self.pid.set_exception(outcome if isinstance(outcome, CannotFork) else CannotFork("not wanted any more"))
        self.exit.set_result(None if isinstance(outcome, CannotFork) else outcome)


class Children:
    """All children that one process forks on request.

    `send` sends that process a message, `kill` kills a PID of its host at once, and `on_last` is called when the last
    child has ended.
    """

    def __init__(
        self, send: Callable[..., None], kill: Callable[[int], None], on_last: Callable[[], None] = lambda: None
    ) -> None:
        self._send, self._kill, self._on_last = send, kill, on_last
        self._numbers = itertools.count()
        self._children: dict[int, Child] = {}
        self._cancelled: dict[int, Future[None]] = {}
        self._ended: str | None = None
        """Reason why no more processes can be forked; None while they can."""
        self._lock = threading.Lock()
        self._guard = Guard("the end of a process of the group was not noticed as it should be")

    def __len__(self) -> int:
        return len(self._children)

    def ask(self, **request: Any) -> Child:
        """Request a fork, and return the child at once; its `pid` raises CannotFork if the request is refused.

        `request`: the fields that the forking process expects.
        """
        child = Child(next(self._numbers), self._cancel, self._kill, lambda number: self._send(mark=number))
        with self._lock:
            ended = self._ended
            self._children[child.number] = child
        if ended is not None:
            self._report_end(child.number, CannotFork(ended))
        self._send(fork=child.number, **request)
        return child

    def heard(self, message: dict[str, Any]) -> None:
        """Handle a report on a child; ignore other messages."""
        match message:
            case {"forked": number, "pid": pid}:
                child = self._children.get(number)
                if child is not None:
                    child.pid.set_result(pid)
                else:  # the child was cancelled while this message was on its way
                    self._kill(pid)
                    self._confirm_end(number)
            case {"refused": number, "why": why}:
                self._report_end(number, CannotFork(why))
                self._confirm_end(number)
            case {"exited": number, "code": code}:
                child = self._children.get(number)
                if child is not None:
                    child.log = message.get("log", "")
                self._report_end(number, code)
                self._confirm_end(number)

    def end_all(self, why: str) -> None:
        """Report the end of all children, since the process that forks them has ended; `why` is the reason."""
        with self._lock:
            self._ended = why
            children = list(self._children.values())
        for child in children:
            with self._guard:
                self._report_end(child.number, None if child.pid.done() else CannotFork(why))
        for number in list(self._cancelled):
            self._confirm_end(number)

    def _report_end(self, number: int, outcome: int | CannotFork | None) -> None:
        """Report the end of the child `number`, once; `outcome` as in `Child.over`."""
        with self._lock:
            child = self._children.pop(number, None)
            last = not self._children
        if child is not None:
            child.over(outcome)
        if last:
            self._on_last()

    def _cancel(self, number: int) -> Future[None]:
        """Request the end of a child, or of its start; the future is done once the other process confirms it."""
        ended: Future[None] = Future()
        with self._lock:
            self._cancelled[number] = ended
        self._send(end=number)
        self._report_end(number, None)
        if self._ended is not None:
            self._confirm_end(number)
        return ended

    def _confirm_end(self, number: int) -> None:
        """Complete the future of a cancelled child."""
        with self._lock:
            ended = self._cancelled.pop(number, None)
        if ended is not None:
            ended.set_result(None)
