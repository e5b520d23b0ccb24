"""Processes that another one forks for us, known by what it tells of them: the warm process, or a host's agent.

here -> there   {"fork": id, ...}     {"end": id}                end this child, or do not start it
there -> here   {"forked": id, "pid": ...}, {"refused": id, "why": ...}, {"exited": id, "code": ...}
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ddip.guard import Guard


class CannotFork(RuntimeError):
    """This cannot be forked; the message says why."""


class Child:
    """A process that was forked for us."""

    def __init__(
        self,
        number: int,
        cancel: Callable[[int], Future[None]],
        kill: Callable[[int], None],
        mark: Callable[[int], None],
    ) -> None:
        self.number = number
        self.pid: Future[int] = Future()
        """Raises CannotFork."""
        self.exit: Future[int | None] = Future()
        """The exit code, negative: the signal; None: unknown, since who forked it ended first."""
        self.log = ""
        """What it had logged when it ended, where that is told; since the last mark."""
        self._cancel, self._kill, self._mark = cancel, kill, mark

    def mark_log(self) -> None:
        """What it has logged by now need not be told when it ends; only to who tells that."""
        self._mark(self.number)

    def end(self) -> Future[None]:
        """Kill it, or do not start it; done when there is no such process, and will be none."""
        forked = self.pid.done() and self.pid.exception() is None
        gone = self._cancel(self.number)
        if forked:  # who forked it may be importing something
            self._kill(self.pid.result())
        return gone

    def over(self, outcome: int | CannotFork | None) -> None:
        """It has ended with this exit code, or was never there."""
        if not self.pid.done():
            self.pid.set_exception(outcome if isinstance(outcome, CannotFork) else CannotFork("not wanted any more"))
        self.exit.set_result(None if isinstance(outcome, CannotFork) else outcome)


class Children:
    """All that one process forks for us.

    `send` gives it a message, `kill` ends a pid of its host at once, and `on_last` is told when the last one has ended.
    """

    def __init__(
        self, send: Callable[..., None], kill: Callable[[int], None], on_last: Callable[[], None] = lambda: None
    ) -> None:
        self._send, self._kill, self._on_last = send, kill, on_last
        self._numbers = itertools.count()
        self._children: dict[int, Child] = {}
        self._cancelled: dict[int, Future[None]] = {}
        self._ended: str | None = None
        """Why none can be forked any more."""
        self._lock = threading.Lock()
        self._guard = Guard("the end of a process of the group was not noticed as it should be")

    def __len__(self) -> int:
        return len(self._children)

    def ask(self, **request: Any) -> Child:
        """Ask for a process."""
        child = Child(next(self._numbers), self._cancel, self._kill, lambda number: self._send(mark=number))
        with self._lock:
            ended = self._ended
            self._children[child.number] = child
        if ended is not None:
            self._over(child.number, CannotFork(ended))
        self._send(fork=child.number, **request)
        return child

    def heard(self, message: dict[str, Any]) -> None:
        """Take what is told of them; other messages are none of ours."""
        match message:
            case {"forked": number, "pid": pid}:
                child = self._children.get(number)
                if child is not None:
                    child.pid.set_result(pid)
                else:  # it was not wanted any more when this was on its way
                    self._kill(pid)
                    self._gone(number)
            case {"refused": number, "why": why}:
                self._over(number, CannotFork(why))
                self._gone(number)
            case {"exited": number, "code": code}:
                child = self._children.get(number)
                if child is not None:
                    child.log = message.get("log", "")
                self._over(number, code)
                self._gone(number)

    def end_all(self, why: str) -> None:
        """Who forks them has ended; `why`."""
        with self._lock:
            self._ended = why
            children = list(self._children.values())
        for child in children:
            with self._guard:
                self._over(child.number, None if child.pid.done() else CannotFork(why))
        for number in list(self._cancelled):
            self._gone(number)

    def _over(self, number: int, outcome: int | CannotFork | None) -> None:
        """Tell the end of a child, once."""
        with self._lock:
            child = self._children.pop(number, None)
            last = not self._children
        if child is not None:
            child.over(outcome)
        if last:
            self._on_last()

    def _cancel(self, number: int) -> Future[None]:
        """Kill the child if it has been forked, and do not fork it if not; done when that is so."""
        gone: Future[None] = Future()
        with self._lock:
            self._cancelled[number] = gone
        self._send(end=number)
        self._over(number, None)
        if self._ended is not None:
            self._gone(number)
        return gone

    def _gone(self, number: int) -> None:
        with self._lock:
            gone = self._cancelled.pop(number, None)
        if gone is not None:
            gone.set_result(None)
