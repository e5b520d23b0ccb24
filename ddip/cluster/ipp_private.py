"""Use private names of ipyparallel, all in this file, where no public name does the job.

``tests/unit/test_private_names.py`` fails when a release changes one of them.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import zmq
from ipyparallel import Client
from ipyparallel.client.futures import MessageFuture
from ipyparallel.error import EngineError, RemoteError
from ipyparallel.serialize import can
from IPython.core.getipython import get_ipython

from ddip.cluster import folder
from ddip.cluster.cluster_api import Listener, Message, Recipient, RemoteException, Reply, Request
from ddip.guard import Guard
from ddip.protocol import cell_messages
from ddip.protocol.cell_messages import CellOptions, CellReply, CellRequest
from ddip.protocol.remote import with_bytes


def import_numpy() -> None:
    """Import NumPy now, for a tenth of a second; otherwise ipyparallel imports it with the first request.

    ipyparallel is not prepared for two threads that do this at once, so `left_out` lets them take turns.
    """
    with folder.left_out():
        can(None)


def _of_message(take: Callable[[Any, Message], None]) -> Callable[[Any, Sequence[Any]], None]:
    """Wrap a client method that takes a message, so that it takes the frames of the message instead."""

    @functools.wraps(take)
    def take_frames(self: Any, frames: Sequence[Any]) -> None:
        _, parts = self.session.feed_identities(frames, copy=False)
        take(self, self.session.deserialize(parts, content=True, copy=False))

    return take_frames


class RankClient(Client):  # type: ignore[misc]
    """An ``ipyparallel.Client`` that passes the output of cells to listeners instead of storing it.

    Listeners also receive output that arrives after the reply. ipyparallel itself stores all output of a request, which
    takes longer the more there is, drops updates of displays, and relays widgets ahead of earlier output.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.listeners: dict[str, Listener] = {}
        """Listeners by the ID of the request; called on the client's own thread."""
        self.cells: dict[str, tuple[str, Request]] = {}
        """Running cells by the ID of the request, with the name of their engine at the controller."""
        self._guard = Guard("a message of a rank could not be used")
        super().__init__(*args, **kwargs)

    def create_message_futures(self, *args: Any, **kwargs: Any) -> list[MessageFuture]:
        """Create the futures of requests as ipyparallel does, and clear its list of all earlier request IDs."""
        self.history.clear()
        return super().create_message_futures(*args, **kwargs)  # type: ignore[no-any-return]

    def close(self, linger: int | None = None) -> None:
        """Close the client; `linger`: keep unsent messages for this many milliseconds.

        ipyparallel closes the sockets without a linger time: messages to a controller that has ended would be kept
        indefinitely, and a descriptor with them.
        """
        sockets = [getattr(self, name) for name in self.trait_names() if name.endswith("_socket")]

        def set_linger() -> None:
            for socket in sockets:
                if socket is not None and not socket.closed:
                    socket.linger = linger

        if linger is not None and self._io_loop is not None and not self._closed:
            self._io_loop.add_callback(set_linger)
        super().close(linger)

    def _dispatch_iopub(self, frames: Sequence[Any]) -> None:
        with self._guard:  # the notebook may be shutting down; the next message must not be lost
            self._take_output(frames)

    @_of_message
    def _take_output(self, message: Message) -> None:
        parent = message["parent_header"]
        kind = message["header"]["msg_type"]
        number = parent.get("msg_id")
        if parent.get("session") != self.session.session:
            return
        if kind == "status" and number in self.cells:
            if message["content"]["execution_state"] == "idle":
                self._note_last_message(number)
        elif number in self.listeners and kind != "status":
            self.listeners[number](message)
        elif kind.startswith("comm_") and getattr(get_ipython(), "kernel", None) is None:
            pass  # a widget that a request has begun or ended; ipyparallel takes any shell for that of a kernel
        elif number in self._futures or number in self._output_futures:
            Client._dispatch_iopub.__wrapped__(self, message)

    def send_cells(self, cells: Sequence[tuple[int, Request, Message]]) -> None:
        """Send each cell to its engine, or end its request if the engine has ended.

        Such a request gets ``Reply(ended=True)``; nothing is raised. Call this on the client's own thread, which also
        handles the end of engines.
        """
        stream = self._mux_stream
        stream.flush(zmq.POLLOUT)  # messages that were sent earlier go first
        for engine, request, message in cells:
            name = self._engines.get(engine)
            if name is None:
                _end_request(request)
            else:
                self.cells[request.msg_id] = name, request
                frames = self.session.serialize(message, name.encode())
                try:
                    stream.socket.send_multipart(frames, zmq.NOBLOCK)
                except zmq.Again:  # the controller takes nothing now
                    stream.send_multipart(frames)
        stream.flush(zmq.POLLIN)

    def _dispatch_reply(self, frames: Sequence[Any]) -> None:
        """Take a reply from the channel of requests, and all replies that have arrived after it."""
        socket = self._mux_stream.socket
        with self._guard:
            self._take_reply(frames)
        while socket.get(zmq.EVENTS) & zmq.POLLIN:
            with self._guard:
                self._take_reply(socket.recv_multipart(zmq.NOBLOCK, copy=False))

    @_of_message
    def _take_reply(self, message: Message) -> None:
        if message["header"]["msg_type"] != cell_messages.REPLY:
            Client._dispatch_reply.__wrapped__(self, message)
            return
        number, content = message["parent_header"]["msg_id"], message["content"]
        _, request = self.cells.get(number, ("", None))
        if request is not None and not request.done():
            request.set_result(cell_reply(content))
            if content.get("silent") or request.output.done():
                self._note_last_message(number)

    def _note_last_message(self, number: str) -> None:
        """Note that the last message of a cell has arrived; its reply may have arrived before or may follow."""
        _, request = self.cells[number]
        if not request.output.done():
            request.output.set_result(None)
        if request.done():
            del self.cells[number]

    def _handle_stranded_msgs(self, eid: int, uuid: str) -> None:
        """End the requests to an engine that has ended."""
        super()._handle_stranded_msgs(eid, uuid)
        for number, (name, request) in list(self.cells.items()):
            if name == uuid:
                del self.cells[number]
                _end_request(request)


def _end_request(request: Request) -> None:
    """End a request whose engine has ended; its reply may have arrived."""
    if not request.done():
        request.set_result(Reply(ended=True))
    if not request.output.done():
        request.output.set_result(None)


def _engine_identity(client: Client, engine: int) -> bytes:
    """Return the ZeroMQ identity of `engine`. Raises KeyError if it has ended."""
    return str(client._engines[engine]).encode()


def _ended_future() -> MessageFuture:
    """Return a completed future for a request to an engine that has ended; its result is a RemoteError."""
    future = MessageFuture("")
    future.output = Future()
    future.output.set_result(None)
    future.set_result(RemoteError(EngineError.__name__, "", "", {}))
    return future


def execute_cell(
    client: RankClient,
    code: str,
    to: Sequence[Recipient],
    asked: CellOptions,
    *,
    silent: bool = False,
    history: bool = True,
) -> list[Request]:
    """Send `code` as a cell to each engine of `to`, and return the requests in order.

    The message has ddip's own type. Does not wait. `asked`: options of the cell for the ranks. The listeners stay in
    ``client.listeners`` for late output. A `silent` cell has no listener. IPython's history gets the code unless the
    cell is silent or `history` is False. Raises OSError if the client is closed.
    """
    if client._closed:
        raise OSError("the client is closed")
    cell: CellRequest = {"code": code, "silent": silent, "history": history and not silent, "asked": asked}
    contents = {
        limit: client.session.pack({**cell, "asked": {**asked, "limit": limit}}) for limit in {one.limit for one in to}
    }
    cells = []
    for one in to:
        header = client.session.msg_header(cell_messages.REQUEST)
        message = {"header": header, "parent_header": {}, "metadata": {}, "content": contents[one.limit]}
        cells.append((one.engine, Request(header["msg_id"]), message))
        if not silent:
            client.listeners[header["msg_id"]] = one.listener
    client._io_loop.add_callback(client.send_cells, cells)
    return [request for _, request, _ in cells]


def cell_reply(content: CellReply) -> Reply:
    """Convert the content of a reply; an unreadable one becomes an error, so that its request ends."""
    try:
        match content["status"]:
            case "ok":
                return Reply(report=content.get("report"), payload=content.get("payload") or [])
            case "aborted":
                raised = RemoteException(KeyboardInterrupt.__name__, "before the cell began", at=time.time())
                return Reply(raised=raised, report={"released": False, "state": "none"})
        raised = RemoteException(content["ename"], content["evalue"], "\n".join(content["traceback"]))
        return Reply(raised=raised, report=content.get("report"))
    except Exception as error:
        return Reply(
            raised=RemoteException(type(error).__name__, f"its answer cannot be read: {error}", at=time.time())
        )


def call_on_engine(
    client: Client, engine: int, function: Callable[..., Any], args: Sequence[Any], doing: str
) -> MessageFuture:
    """Call ``function(*args)`` on the main thread of `engine`, and return ipyparallel's future.

    `doing` describes the call in status displays. If the engine has ended, the future has a RemoteError as its result.
    ``View.apply_async`` would create an ``AsyncResult``, whose reference cycle keeps the result alive.
    """
    try:
        identity = _engine_identity(client, engine)
    except KeyError:
        return _ended_future()
    metadata = {"doing": doing}
    future = client.send_apply_request(client._mux_stream, function, list(args), ident=identity, metadata=metadata)
    future.add_done_callback(_end_output)
    return future


def _end_output(future: MessageFuture) -> None:
    """Mark the output of a finished call as ended, because ddip's kernel sends no such message."""
    if not future.output.done():
        future.output.set_result(None)


def send_comm(client: RankClient, engine: int, message: Message, on_message: Listener) -> str:
    """Send a widget's message to `engine`, and return the ID of the message without waiting.

    `on_message` receives the output of the widget's callbacks. Raises KeyError for an engine that has ended.
    """
    header = client.session.msg_header(message["header"]["msg_type"])
    client.listeners[header["msg_id"]] = on_message
    client._send(
        client._mux_stream,
        header["msg_type"],
        content=message["content"],
        buffers=message.get("buffers") or [],
        metadata=message.get("metadata") or {},
        ident=_engine_identity(client, engine),
        header=header,
    )
    return str(header["msg_id"])


def send_control_request(client: Client, engine: int, msg_type: str, content: dict[str, Any]) -> Future[dict[str, Any]]:
    """Send a request of type `msg_type` on the control channel of `engine`, without waiting.

    The future has the content of the reply. ipyparallel's own methods send only its own types. Raises KeyError for an
    engine that has ended.
    """
    answer: Future[dict[str, Any]] = Future()
    future = client._send(client._control_stream, msg_type, content=content, ident=_engine_identity(client, engine))
    future.add_done_callback(lambda done: answer.set_result(_answer_content(done.result())))
    return answer


def _answer_content(message: Message) -> dict[str, Any]:
    """Return the content of a message, with the message's binary buffers put in."""
    content: dict[str, Any] = with_bytes(message["content"], message.get("buffers") or [])
    return content


def refresh_engines(client: Client, timeout: float) -> None:
    """Request the list of engines from the Hub, and update the client's list shortly afterwards.

    The client misses registrations that the Hub has published before the client subscribed to them. Raises TimeoutError
    if the Hub does not reply within `timeout` seconds.
    """
    reply = client._send(client._query_stream, "connection_request").result(timeout)
    client._io_loop.add_callback(client._update_engines, reply["content"]["engines"])  # its own thread changes them too


def unregister_engine(client: Client, engine: int) -> None:
    """Report to the Hub that `engine` has ended, so that its running requests fail at once; do not wait.

    Usually, ipyparallel's nanny process does this.
    """
    client._send(client._query_stream, "unregistration_request", content={"id": engine})


class LinkClient(Client):  # type: ignore[misc]
    """A client of an attached cluster that also receives unrequested messages on the control channel.

    It calls `heard` with each message that is not a reply, on the client's own thread. ipyparallel itself ignores these
    messages.
    """

    def __init__(self, file: str, heard: Callable[[dict[str, Any]], None], seconds: float) -> None:
        self._heard = heard
        self._guard = Guard("a message of an engine could not be used")
        super().__init__(file, timeout=seconds)

    @_of_message
    def _dispatch_single_reply(self, msg: dict[str, Any]) -> None:
        future = self._futures.get(msg["parent_header"].get("msg_id"))
        if future is None:
            with self._guard:
                self._heard(msg)
        elif not future.done():
            future.set_result(msg)


def send_on_control_channel(client: Client, kind: str, content: dict[str, Any], data: bytes) -> None:
    """Send a message without a reply to the peer named `kind`, even if it has ended."""
    buffers = [data] if data else None
    client._io_loop.add_callback(
        lambda: client.session.send(client._control_stream, kind, content, ident=kind.encode(), buffers=buffers)
    )


def request_connection(client: Client) -> Future[Any]:
    """Ask the Hub for a connection, and return a future that is done when it replies."""
    answer: Future[Any] = client._send(client._query_stream, "connection_request")
    return answer
