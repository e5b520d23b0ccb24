"""The messages between a group and the engines of an ipyparallel cluster, as types of ``cluster_api``."""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Sequence
from typing import Any

from ipyparallel.error import EngineError, RemoteError, TaskAborted

from ddip.cluster import ipp_private
from ddip.cluster.cluster_api import Listener, Message, Recipient, RemoteException, Reply, Request
from ddip.cluster.ipp_private import RankClient
from ddip.cluster.processes.exit_diagnosis import EngineLogs
from ddip.protocol.cell_messages import CellOptions
from ddip.protocol.on_rank import RemoteCall
from ddip.protocol.remote import call_target as run_call


class Channels:
    """The channels to the engines that one client is connected to; part of `OwnCluster`."""

    def __init__(self) -> None:
        self._client: RankClient | None = None
        self.exits: dict[int, int | None] = {}
        self._logs = EngineLogs()

    @property
    def connected(self) -> bool:
        """True once a client is connected to a controller."""
        return self._client is not None

    @property
    def client(self) -> RankClient:
        """The ``ipyparallel.Client``, which exists from the first start on."""
        assert self._client is not None
        return self._client

    @property
    def live(self) -> set[int]:
        """The engines that are registered with the controller and have not ended."""
        return set(self.client.ids) - self.exits.keys()

    def log_tail(self, engine: int) -> list[str]:
        """Return the last lines that `engine` has logged since its last cell was sent; see `EngineLogs.tail`."""
        return self._logs.tail(engine)

    def execute(self, code: str, to: Sequence[Recipient], asked: CellOptions, *, history: bool = True) -> list[Request]:
        """Send `code` as a cell to each of these engines; see ``Cluster.execute``.

        Their logs count from here on.
        """
        for recipient in to:
            self._logs.cell_begins(recipient.engine)
        return ipp_private.execute_cell(self.client, code, to, asked, history=history)

    def call(self, engine: int, call: RemoteCall[object]) -> Request:
        """Send `call` to the main thread of `engine`; see ``Cluster.call``."""
        return _wrap_future(
            ipp_private.call_on_engine(self.client, engine, run_call, [call.target, *call.args], call.label)
        )

    def call_on_control_channel(
        self, engine: int, call: RemoteCall[object]
    ) -> concurrent.futures.Future[dict[str, Any]]:
        """Send `call` to `engine`, which does not wait for its cell.

        Raises KeyError for an engine that has ended.
        """
        content = {"target": call.target, "args": [*call.args], "own_thread": call.own_thread}
        return ipp_private.send_control_request(self.client, engine, "ddip_request", content)

    def interrupt(self, engine: int, msg_id: str | None) -> concurrent.futures.Future[dict[str, Any]]:
        """Interrupt only the request `msg_id` to `engine`, or its current one for None, without waiting.

        Raises KeyError for an engine that has ended.
        """
        return ipp_private.send_control_request(self.client, engine, "ddip_interrupt", {"cell": msg_id})

    def send_comm(self, engine: int, message: Message, listener: Listener) -> str:
        """Send a widget's message to `engine`, and return its ID; `listener` gets the output of the callbacks.

        Raises KeyError for an engine that has ended.
        """
        return ipp_private.send_comm(self.client, engine, message, listener)

    def stop_listening(self, msg_id: str) -> None:
        """Discard all further output of the request `msg_id`."""
        self.client.listeners.pop(msg_id, None)


def _wrap_future(future: Any) -> Request:
    """Wrap ipyparallel's `future` in a Request."""
    request = Request(future.msg_id)
    future.output.add_done_callback(lambda _: request.output.set_result(None))
    future.add_done_callback(lambda done: request.set_result(_read_result_safely(done.result())))
    return request


def _read_result_safely(result: Any) -> Reply:
    """Convert a result as `_read_result` does, but turn any exception into an error reply.

    This way the request always completes.
    """
    try:
        return _read_result(result)
    except Exception as error:
        return Reply(
            raised=RemoteException(type(error).__name__, f"its answer cannot be read: {error}", at=time.time())
        )


def _read_result(result: Any) -> Reply:
    """Convert ipyparallel's result of a call, an exception or a value, into a Reply."""
    if isinstance(result, TaskAborted):
        return Reply(raised=RemoteException(KeyboardInterrupt.__name__, "before it began", at=time.time()))
    if isinstance(result, RemoteError):
        if (
            result.ename == EngineError.__name__ and not result.engine_info
        ):  # else the call itself raised an EngineError
            return Reply(ended=True)
        return Reply(raised=RemoteException(result.ename, result.evalue, result.traceback))
    if isinstance(result, BaseException):
        return Reply(raised=RemoteException(type(result).__name__, str(result), at=time.time()))
    return Reply(result)
