"""Every private name of ipyparallel that ddip uses, and why no public one does.

``tests/unit/test_private_names.py`` fails when a release changes one of them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from ipyparallel import Client
from ipyparallel.client.client import unpack_message
from ipyparallel.client.futures import MessageFuture
from ipyparallel.error import EngineError, RemoteError
from ipyparallel.serialize import can
from IPython.core.getipython import get_ipython

from ddip.cluster import folder
from ddip.cluster.seam import Listener, Message
from ddip.protocol.reports import CellReport

log = logging.getLogger("ddip")


def import_numpy() -> None:
    """What ipyparallel imports with the first request, which takes a tenth of a second; for a better moment."""
    with folder.left_out():
        can(None)


class RankClient(Client):  # type: ignore[misc]
    """An ``ipyparallel.Client`` that gives away what a cell shows, early or late, and keeps none of it.

    ipyparallel adds up all output of a request in a time that grows with its length, drops updates of displays, and
    relays widgets past what was shown before them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.listeners: dict[str, Listener] = {}
        """By the id of the request; called on the client's own thread."""
        super().__init__(*args, **kwargs)

    def create_message_futures(self, *args: Any, **kwargs: Any) -> list[MessageFuture]:
        """Called for each request; ipyparallel keeps the ids of all there ever were."""
        self.history.clear()
        return super().create_message_futures(*args, **kwargs)  # type: ignore[no-any-return]

    def close(self, linger: int | None = None) -> None:
        """Be done; with `linger`, what has not been sent is kept for so many ms.

        ipyparallel's own thread closes the sockets, and does not tell them: what a controller that has ended has not
        taken would be kept for ever, and a descriptor with it.
        """
        sockets = [getattr(self, name) for name in self.trait_names() if name.endswith("_socket")]

        def tell() -> None:
            for socket in sockets:
                if socket is not None and not socket.closed:
                    socket.linger = linger

        if linger is not None and self._io_loop is not None and not self._closed:
            self._io_loop.add_callback(tell)
        super().close(linger)

    @unpack_message  # type: ignore[untyped-decorator]
    def _dispatch_iopub(self, message: Message) -> None:
        parent = message["parent_header"]
        kind = message["header"]["msg_type"]
        number = parent.get("msg_id")
        if parent.get("session") != self.session.session:
            return
        try:
            if number in self.listeners and kind != "status":
                self.listeners[number](message)
            elif kind.startswith("comm_") and getattr(get_ipython(), "kernel", None) is None:
                pass  # a widget that a request has begun or ended; ipyparallel takes any shell for that of a kernel
            elif number in self._futures or number in self._output_futures:
                Client._dispatch_iopub.__wrapped__(self, message)
        except Exception as error:  # the notebook may be shutting down; the next message must not be lost
            log.warning("a message of a rank could not be shown: %s: %s", type(error).__name__, error)


def _identity(client: Client, engine: int) -> bytes:
    """Raises KeyError for an engine that has ended."""
    return str(client._engines[engine]).encode()


def _ended() -> MessageFuture:
    """The future of a request to an engine that has ended."""
    future = MessageFuture("")
    future.output = Future()
    future.output.set_result(None)
    future.set_result(RemoteError(EngineError.__name__, "", "", {}))
    return future


def execute(
    client: RankClient,
    engine: int,
    code: str,
    on_message: Listener,
    asked: dict[str, Any] | None = None,
    silent: bool = False,
    history: bool = True,
) -> MessageFuture:
    """Run `code` as a cell of `engine`; the ``output`` of the future is done when the last message has arrived.

    `asked` is what ddip's kernel is told of the cell. ``client.listeners`` keeps `on_message` for what comes later;
    a silent cell has no output, and is in no history; `history` says so for others.

    ``Client.send_execute_request`` cannot say ``stop_on_error=False`` (an engine would then abort what we send it right
    after a failed cell), and lets messages arrive before anybody listens.
    """
    content = {
        "code": code,
        "silent": silent,
        "store_history": history and not silent,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
        "ddip": asked or {},
    }

    def listen(future: MessageFuture) -> None:
        if not silent:
            client.listeners[future.msg_id] = on_message
        future.add_done_callback(lambda done: _end_output(done, _was_silent(done.result())))

    try:
        identity = _identity(client, engine)
    except KeyError:
        return _ended()
    return client._send(
        client._mux_stream,
        "execute_request",
        content=content,
        ident=identity,
        metadata={},
        track_outstanding=True,
        message_future_hook=listen,
    )


def apply(client: Client, engine: int, function: Callable[..., Any], args: Sequence[Any], doing: str) -> MessageFuture:
    """Call `function` on the main thread of `engine`; ddip's kernel is told what it is `doing` then, for people.

    ``View.apply_async`` makes an ``AsyncResult`` of the same, which is a cycle of objects around what comes back.
    """
    try:
        identity = _identity(client, engine)
    except KeyError:
        return _ended()
    metadata = {"doing": doing}
    future = client.send_apply_request(client._mux_stream, function, list(args), ident=identity, metadata=metadata)
    future.add_done_callback(lambda done: _end_output(done, True))
    return future


def _was_silent(reply: Any) -> bool:
    """Does no message follow that says so? Where the rank could not even report, none may, and nobody waits for it."""
    told = report(reply)
    return bool(_engine_info(reply)) if told is None else told.get("silent", False)


def _end_output(future: MessageFuture, ended: bool) -> None:
    """Of a request that is done; if its output has `ended`, ddip's kernel sends no message that says so."""
    if ended and not future.output.done():
        future.output.set_result(None)


def payload(reply: Any) -> list[dict[str, Any]]:
    """What a good cell has for the page of the notebook's help, and the like."""
    return list(getattr(reply, "_content", {}).get("payload") or [])


def send_comm(client: RankClient, engine: int, message: Message, on_message: Listener) -> str:
    """Send a widget's message to `engine`, and what its callbacks show to `on_message`; returns the message's id."""
    header = client.session.msg_header(message["header"]["msg_type"])
    client.listeners[header["msg_id"]] = on_message
    client._send(
        client._mux_stream,
        header["msg_type"],
        content=message["content"],
        buffers=message.get("buffers") or [],
        metadata=message.get("metadata") or {},
        ident=_identity(client, engine),
        header=header,
    )
    return str(header["msg_id"])


def report(reply: Any) -> CellReport | None:
    """What `RankKernel` adds to the reply of a cell; None for a reply that the rank has not made itself.

    Of a failed request ipyparallel passes on the ``engine_info`` only; of a good one, what it keeps to itself.
    """
    return _engine_info(reply).get("ddip")  # type: ignore[no-any-return]


def _engine_info(reply: Any) -> dict[str, Any]:
    """Who has made it; empty if no engine has."""
    info = reply.engine_info if isinstance(reply, RemoteError) else getattr(reply, "_content", {}).get("engine_info")
    return info or {}


def control(client: Client, engine: int, msg_type: str, content: dict[str, Any]) -> Future[dict[str, Any]]:
    """Send a request of any type on the control channel of `engine`; returns the content of its answer.

    ipyparallel knows only its own types. Raises KeyError for an engine that has ended.
    """
    answer: Future[dict[str, Any]] = Future()
    future = client._send(client._control_stream, msg_type, content=content, ident=_identity(client, engine))
    future.add_done_callback(lambda done: answer.set_result(done.result()["content"]))
    return answer


def refresh(client: Client, timeout: float) -> None:
    """Ask the Hub which engines there are.

    A registration that the Hub published before the client had subscribed is never published again.
    """
    reply = client._send(client._query_stream, "connection_request").result(timeout)
    client._io_loop.add_callback(client._update_engines, reply["content"]["engines"])  # its own thread changes them too


def unregister(client: Client, engine: int) -> None:
    """Tell the Hub that `engine` ended, as ipyparallel's nanny would; its running requests then fail at once."""
    client._send(client._query_stream, "unregistration_request", content={"id": engine})


class LinkClient(Client):  # type: ignore[misc]
    """A client of somebody else's cluster that gives away what engines send on the control channel without being asked.

    `heard` is called on the client's own thread. ipyparallel passes over what answers none of its requests.
    """

    def __init__(self, file: str, heard: Callable[[dict[str, Any]], None], seconds: float) -> None:
        self._heard = heard
        super().__init__(file, timeout=seconds)

    @unpack_message  # type: ignore[untyped-decorator]
    def _dispatch_single_reply(self, msg: dict[str, Any]) -> None:
        future = self._futures.get(msg["parent_header"].get("msg_id"))
        if future is None:
            self._heard(msg)
        elif not future.done():
            future.set_result(msg)


def send_on_control_channel(client: Client, kind: str, content: dict[str, Any], data: bytes) -> None:
    """Send what nobody answers to the one who is called `kind` at the scheduler, also when it has ended; ipyparallel
    would keep a future for it."""
    buffers = [data] if data else None
    client._io_loop.add_callback(
        lambda: client.session.send(client._control_stream, kind, content, ident=kind.encode(), buffers=buffers)
    )


def asked_again(client: Client) -> Future[Any]:
    """A future that is done when the Hub answers."""
    answer: Future[Any] = client._send(client._query_stream, "connection_request")
    return answer
