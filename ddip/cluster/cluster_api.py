"""The interface between a group and the processes of its ranks.

    group  --execute, call, call_on_control_channel, interrupt, send_comm-->  Cluster  -->  engines, one per rank
    group  <--a Reply to each request, messages, exits----------------------  Cluster

The code above this interface knows nothing of ipyparallel, nor on which host an engine runs.
`ddip.cluster.ipyparallel.own_cluster.OwnCluster` implements it with real processes on any hosts; the unit tests have
an implementation whose engines fail on command.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from ddip.cluster.processes.host import Host
from ddip.cluster.reach import Reach
from ddip.protocol.cell_messages import CellOptions
from ddip.protocol.on_rank import RemoteCall
from ddip.protocol.reports import CellReport, Hello

Message: TypeAlias = "dict[str, Any]"
"""A message of Jupyter's protocol: ``header``, ``content``, ``metadata``, ``buffers``."""
Listener: TypeAlias = "Callable[[Message], None]"
"""A callback for each output message of a request, even a late one.

It runs on a cluster thread and must be quick.
"""


@dataclass(frozen=True)
class RemoteException:
    """An exception that a request raised on its engine, or on the way there."""

    name: str
    message: str
    traceback: str = ""
    at: float = 0.0
    """Time of the error by ``time.time``, 0 if unknown; an engine's report has a more exact time."""


@dataclass
class Reply:
    """An engine's answer to a request."""

    value: Any = None
    """Return value of ``ddip.protocol.remote.call_target``, for a call."""
    raised: RemoteException | None = None
    ended: bool = False
    """True if the engine ended and will not answer."""
    report: CellReport | None = None
    """Report on a cell, successful or not; None if the engine could not create one."""
    payload: list[dict[str, Any]] = field(default_factory=list)
    """Payload of a successful cell, such as help pages."""


class Request(concurrent.futures.Future[Reply]):
    """A pending request to the main thread of an engine; done once the engine answered or ended."""

    def __init__(self, msg_id: str) -> None:
        super().__init__()
        self.msg_id = msg_id
        """Message ID, needed to interrupt the request."""
        self.output: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done once the listener of a cell has received the last of its messages."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine to be started."""

    host: int
    """Index of the host in the cluster's hosts."""
    environment: Mapping[str, str]
    """Variables added to the host's environment."""


@dataclass(frozen=True)
class Recipient:
    """An engine that is to run a cell, with the listener for its output."""

    engine: int
    listener: Listener
    limit: int = 0
    """Characters that the cell may show on this engine; 0 means that its output is not displayed."""


class Cluster(Protocol):
    """A set of numbered engines, started and stopped one by one and owned by this process."""

    @property
    def run_folder(self) -> Path:
        """A folder on this machine that only this user can enter."""

    @property
    def hosts(self) -> Sequence[Host]:
        """The hosts that engines can run on, in the order in which ranks are placed."""

    def wait_for_hosts(self, deadline: float, progress: Callable[[str], None]) -> None:
        """Wait until each host has reported its facts; `deadline` on ``time.monotonic``.

        `progress` gets a line for the user. Raises GroupError with a reason for each host that cannot be used.
        """

    def replace_host(self, number: int, name: str, reach: Reach, deadline: float) -> None:
        """Connect to the host `name` in place of the lost host `number`, or to that host again; wait for it.

        `reach`: how hosts are reached from now on; `deadline` on ``time.monotonic``. Raises GroupError, and changes
        nothing then.
        """

    @property
    def off(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """The features that are off in this process, because a library lacks private names that they need.

        By library and version, then by feature, the missing names.
        """

    @property
    def spawned(self) -> str:
        """Reason why engines were spawned although they should be forked; empty if there is none."""

    @property
    def exits(self) -> Mapping[int, int | None]:
        """Exit codes of the engines that ended (negative: the signal; None: unknown)."""

    @property
    def connected(self) -> bool:
        """True once the first start has connected to the controller."""

    @property
    def live(self) -> Collection[int]:
        """The engines that can be reached."""

    def ensure_controller(self) -> None:
        """Raise GroupError if the engines cannot be reached any more."""

    def host_of(self, engine: int) -> Host:
        """Return the host on which `engine` runs or ran."""

    def stopped(self) -> str:
        """Describe what keeps the engines' answers back: stopped processes, and silent hosts; empty if nothing does."""

    def carry_on(self) -> None:
        """Continue the processes between notebook and engines that a signal has stopped."""

    def log_tail(self, engine: int) -> list[str]:
        """Return the last lines that `engine` logged since its last cell was sent, or since its start.

        After a crash, return the lines that show where it happened.
        """

    def start(
        self,
        engines: Sequence[EngineSpec],
        also: Sequence[str],
        deadline: float,
        on_up: Callable[[int], None],
    ) -> dict[int, Hello]:
        """Start `engines`, wait until they can be used, and return the Hello of each by its number, in order.

        `also`: modules to import first; `deadline` on ``time.monotonic``; `on_up` gets the number of engines that can
        be reached so far. Raises GroupError; `stop_engines_but` then ends the engines that were started.
        """

    def stop_engines_but(self, keep: Collection[int]) -> None:
        """End all engines except those in `keep`, and wait until they are gone."""

    def stop(self) -> None:
        """End everything and leave no process, file or thread behind."""

    def execute(self, code: str, to: Sequence[Recipient], asked: CellOptions, *, history: bool = True) -> list[Request]:
        """Send `code` as a cell to each engine of `to`, and return a request for each, in order.

        Does not wait. `asked`: facts about the cell that the engines need; `history`: IPython's history gets the code.
        The request to an engine that has ended is done, with ``ended``.
        """

    def call(self, engine: int, call: RemoteCall[object]) -> Request:
        """Send `call` to the main thread of `engine`, and return the request without waiting.

        If the engine has ended, the request is done, with ``ended``.
        """

    def call_on_control_channel(
        self, engine: int, call: RemoteCall[object]
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Send `call` to `engine`, which does not wait for its cell; return a future without waiting.

        The future has the result of ``ddip.protocol.remote.call_target``. Raises KeyError for an engine that has ended.
        """

    def interrupt(self, engine: int, msg_id: str | None) -> concurrent.futures.Future[dict[str, Any]]:
        """Interrupt only the request `msg_id` to `engine`, or its current one for None, without waiting.

        The future is done when the engine has answered. Raises KeyError for an engine that has ended.
        """

    def send_comm(self, engine: int, message: Message, listener: Listener) -> str:
        """Send a widget's message to `engine`, and return the message ID.

        `listener` gets the output of the widget's callbacks. Raises KeyError for an engine that has ended.
        """

    def stop_listening(self, msg_id: str) -> None:
        """Discard all further output of the request `msg_id`."""
