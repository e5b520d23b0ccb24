"""What a group needs of the processes below it. Nothing above knows ipyparallel, or on which host an engine is.

    group  --execute, call, call_on_control_channel, interrupt, send_comm-->  Cluster  -->  engines, one a rank
    group  <--a Reply to each request, messages, exits----------------------  Cluster

`ddip.cluster.ipyparallel.own_cluster.OwnCluster` is the one of real processes, on any hosts. The unit tests have
another, whose engines fail on command.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ddip.cluster.processes.host import Host
from ddip.cluster.reach import Reach
from ddip.protocol.cell_messages import Asked
from ddip.protocol.on_rank import RemoteCall
from ddip.protocol.reports import CellReport, Hello

Message: TypeAlias = "dict[str, Any]"
"""Of Jupyter's protocol: ``header``, ``content``, ``metadata``, ``buffers``."""
Listener: TypeAlias = "Callable[[Message], None]"
"""Gets each message that a request shows, early or late, on a thread of the cluster's own; must be quick."""


@dataclass(frozen=True)
class Raised:
    """What a request raised on its engine, or on the way there."""

    name: str
    message: str
    traceback: str = ""
    at: float = 0.0
    """On ``time.time``; a report of the engine knows better."""


@dataclass
class Reply:
    """An engine's answer to a request."""

    value: Any = None
    """Of a call: what ``ddip.protocol.remote.call`` returns."""
    raised: Raised | None = None
    ended: bool = False
    """The engine ended, and will not answer."""
    report: CellReport | None = None
    """Of a cell, good or not; None: the engine could not make it."""
    payload: list[dict[str, Any]] = field(default_factory=list)
    """Of a good cell: pages of help, and the like."""


class Request(concurrent.futures.Future[Reply]):
    """A request that is under way to the main thread of an engine; done when that has answered, or has ended."""

    def __init__(self, msg_id: str) -> None:
        super().__init__()
        self.msg_id = msg_id
        """By which it can be interrupted."""
        self.output: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Of a cell: done when the last of its messages has been given to its listener."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine to be started."""

    host: int
    """On which of the cluster's hosts."""
    environment: Mapping[str, str]
    """Added to that of the host."""


@dataclass(frozen=True)
class Recipient:
    """Where a cell is to run."""

    engine: int
    listener: Listener
    limit: int = 0
    """Characters that it may show there; 0: nobody looks."""


class Cluster(Protocol):
    """Engines that are started and stopped one by one, each with a number of its own; owned by this process."""

    @property
    def run_folder(self) -> Path:
        """A folder on this machine that only this user can enter."""

    @property
    def hosts(self) -> Sequence[Host]:
        """Where engines can be, in the order in which ranks are placed."""

    def wait_for_hosts(self, deadline: float, progress: Callable[[str], None]) -> None:
        """Until each host has told what it is and has; `deadline` on ``time.monotonic``. Raises GroupError."""

    def replace_host(self, number: int, name: str, reach: Reach, deadline: float) -> None:
        """Have the host `name`, reached as `reach` says, in place of one that was lost, with its number, or reach that
        once more. Raises GroupError; nothing has changed then."""

    @property
    def off(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """By library and version: features that are off in this process, with the private names that they lack."""

    @property
    def spawned(self) -> str:
        """Why engines were not forked, though they should be; empty if they were, or should not be."""

    @property
    def exits(self) -> Mapping[int, int | None]:
        """Exit codes of the engines that ended (negative: the signal; None: unknown)."""

    @property
    def connected(self) -> bool:
        """Has it been started?"""

    @property
    def live(self) -> Collection[int]:
        """The engines that can be reached."""

    def ensure_controller(self) -> None:
        """Raise GroupError if there is no way to the engines any more."""

    def host_of(self, engine: int) -> Host:
        """Where `engine` is, or was."""

    def stopped(self) -> str:
        """Which of the processes on the way to the engines a signal has stopped; empty for none."""

    def log_tail(self, engine: int) -> list[str]:
        """The last lines that `engine` has logged since its last cell was sent, or since its start before the first;
        of a crash, those that tell where it was."""

    def start(
        self,
        engines: Sequence[EngineSpec],
        also: Sequence[str],
        deadline: float,
        on_up: Callable[[int], None],
    ) -> dict[int, Hello]:
        """Start `engines`, until `deadline` on ``time.monotonic``; returns what each tells of itself, in order.

        Modules `also` are imported before anything else. `on_up` is told how many of the engines can be reached. Raises
        GroupError; `stop_engines_but` then ends what was begun.
        """

    def stop_engines_but(self, keep: Collection[int]) -> None:
        """End all engines but those in `keep`, and wait until they are gone."""

    def stop(self) -> None:
        """End everything and leave no process, file or thread behind."""

    def execute(self, code: str, to: Sequence[Recipient], asked: Asked, *, history: bool = True) -> list[Request]:
        """Run `code` as a cell of each engine, which may have ended; `asked` is what they must know of it."""

    def call(self, engine: int, call: RemoteCall[object]) -> Request:
        """Make `call` on the main thread of `engine`, which may have ended."""

    def call_on_control_channel(
        self, engine: int, call: RemoteCall[object]
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Make `call` beside what `engine` runs; returns what ``ddip.protocol.remote.call`` does, once it has answered.

        Raises KeyError for an engine that has ended.
        """

    def interrupt(self, engine: int, msg_id: str | None) -> concurrent.futures.Future[dict[str, Any]]:
        """Interrupt one request to `engine`, and no other; None: what it runs now.

        Raises KeyError for an engine that has ended.
        """

    def send_comm(self, engine: int, message: Message, listener: Listener) -> str:
        """Send a widget's message to `engine`, and what its callbacks show to `listener`; returns the message's id.

        Raises KeyError for an engine that has ended.
        """

    def stop_listening(self, msg_id: str) -> None:
        """What this request still shows is wanted no more."""
