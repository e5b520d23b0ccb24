"""Every private name of ipyparallel that ddip uses, and why no public one does.

``tests/unit/test_private_names.py`` fails when a release changes one of them.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from ipyparallel import Client
from ipyparallel.client.client import Metadata
from ipyparallel.client.futures import MessageFuture
from ipyparallel.error import EngineError, RemoteError

Message = dict[str, Any]
MANY = 10_000
"""Requests after which the first is forgotten."""


class _Kept(collections.defaultdict):  # type: ignore[type-arg]
    """What the client keeps of each request; of one that has been answered it keeps nothing.

    ipyparallel adds up the output that comes later, from a thread of the cell, in a time that grows with its length: a
    thread that goes on printing would soon take all of the client's time.
    """

    def __init__(self) -> None:
        super().__init__(Metadata)
        self._answered: dict[str, None] = {}

    def pop(self, key: str, *default: Any) -> Any:
        self._answered[key] = None
        if len(self._answered) > MANY:
            del self._answered[next(iter(self._answered))]
        return super().pop(key, *default)

    def __missing__(self, key: str) -> Any:
        return Metadata() if key in self._answered else super().__missing__(key)


def forget_late_output(client: Client) -> None:
    """Have `client` forget what cells print after they have ended."""
    kept = _Kept()
    kept.update(client.metadata)
    client.metadata = kept


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
    client: Client,
    engine: int,
    code: str,
    silent: bool,
    on_message: Callable[[Message], None],
    number: int | None = None,
) -> MessageFuture:
    """Run `code` as a cell of `engine`; the ``output`` of the future is done when the last message has arrived.

    With `number` the engine counts it as cell `number`.

    ``Client.send_execute_request`` cannot say ``stop_on_error=False`` (an engine would then abort what we send it right
    after a failed cell), and lets messages arrive before anybody listens.
    """
    content = {
        "code": code,
        "silent": silent,
        "store_history": not silent,
        "user_expressions": {},
        "allow_stdin": False,
        "stop_on_error": False,
        "ddip_number": number,
    }

    def pass_on(message: Message) -> None:
        # the client would add each text to all before it, in a time that grows with their length
        client.metadata[message["parent_header"]["msg_id"]].update(stdout="", stderr="", outputs=[])
        on_message(message)

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
        message_future_hook=lambda future: future.iopub_callbacks.append(pass_on),
    )


def report(reply: Any) -> dict[str, Any] | None:
    """What `RankKernel` adds to the reply of a cell; None for a reply that the rank has not made itself.

    Of a failed request ipyparallel passes on the ``engine_info`` only; of a good one, what it keeps to itself.
    """
    info = reply.engine_info if isinstance(reply, RemoteError) else getattr(reply, "_content", {}).get("engine_info")
    return (info or {}).get("ddip")


def control(client: Client, engine: int, msg_type: str, content: dict[str, Any]) -> Future[Message]:
    """Send a request of any type on the control channel of `engine`; ipyparallel knows only its own types."""
    return client._send(client._control_stream, msg_type, content=content, ident=_identity(client, engine))  # type: ignore[no-any-return]


def refresh(client: Client, timeout: float) -> None:
    """Ask the Hub which engines there are.

    A registration that the Hub published before the client had subscribed is never published again.
    """
    reply = client._send(client._query_stream, "connection_request").result(timeout)
    client._io_loop.add_callback(client._update_engines, reply["content"]["engines"])  # its own thread changes them too


def unregister(client: Client, engine: int) -> None:
    """Tell the Hub that `engine` ended, as ipyparallel's nanny would; its running requests then fail at once."""
    client._send(client._query_stream, "unregistration_request", content={"id": engine})
