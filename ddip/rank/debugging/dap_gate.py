"""Accept an IDE that knows the token, and pass its messages on to this rank's debugger.

    IDE ---- TCP, loopback interface ----> DapGate ---- socket pair ----> pydevd, debugpy's part in this process

Any user of the machine can connect to a port, and a debugger runs whatever its client sends. So the debugger has no
port. The gate answers ``initialize`` itself, and connects a client to the debugger after an ``attach`` request that
contains the token: an IDE sends all entries of its launch configuration with it. One client at a time can attach.

The messages are those of the Debug Adapter Protocol (DAP): a header with the length, then JSON.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, TypeAlias

TOKEN = "ddipToken"
"""Entry of the launch configuration that contains the token."""
LOOPBACK = "127.0.0.1"
GREETING_SECONDS = 10.0
"""Time that a client has to send its token."""
LONGEST_GREETING = 100_000
"""Maximum length of a message of a client without the token, in bytes."""
Message: TypeAlias = dict[str, Any]


def read_message(stream: BinaryIO, longest: int | None = None) -> Message:
    """Read the next message from `stream`.

    Raises EOFError at its end, and ValueError for a message that is invalid or has more than `longest` bytes.
    """
    length = -1
    while line := stream.readline(1000).strip():
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            length = int(value)
    if length < 0:
        raise EOFError
    if longest is not None and length > longest:
        raise ValueError(f"a message of {length} bytes")
    body = stream.read(length)
    if len(body) < length:
        raise EOFError
    message = json.loads(body)
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    return message


def send_message(to: socket.socket, message: Message) -> None:
    """Send `message`; raises OSError if the connection is closed."""
    body = json.dumps(message).encode()
    to.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(body), body))


class DapGate:
    """The port of one rank to which an IDE connects."""

    def __init__(
        self, token: str, start_thread: Callable[..., threading.Thread], connect: Callable[[socket.socket], object]
    ) -> None:
        """Open the port to clients that know `token`.

        `start_thread` calls a function with arguments in a thread that the debugger does not stop; `connect` makes the
        debugger use one end of a socket pair.
        """
        self.is_attached = False
        """True while an IDE is attached that can continue a stopped rank."""
        self._token, self._start_thread, self._connect = token, start_thread, connect
        self._listener = socket.create_server((LOOPBACK, 0))
        self._is_taken = threading.Lock()
        """Held from the token of a client until the debugger has detached from it."""
        self._sockets = {self._listener}
        """All open sockets."""
        self._is_closed = False
        start_thread(self._accept_clients)

    @property
    def port(self) -> int:
        """The port on the loopback interface to which an IDE connects."""
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        """Close the port and all connections."""
        self._is_closed = True
        self.is_attached = False
        for each in [*self._sockets]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # ends the calls in other threads that wait for it
        self._listener.close()

    def close_in_fork(self) -> None:
        """Close this process's copies of the sockets, which stay open in the process that it was forked from."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                os.close(each.detach())  # close() would wait for the stream that reads from it

    def _accept_clients(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._start_thread(self._serve_client, client)

    @contextlib.contextmanager
    def _keep_open(self, *sockets: socket.socket) -> Iterator[None]:
        """Close `sockets` at the end of the block, or earlier if the gate is closed."""
        self._sockets.update(sockets)
        try:
            if self._is_closed:
                raise OSError("the port has been closed")
            yield
        finally:
            self._sockets.difference_update(sockets)
            for each in sockets:
                each.close()

    def _serve_client(self, client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError, EOFError, ValueError, RecursionError),
            self._keep_open(client),
            client.makefile("rb") as stream,
        ):
            client.settimeout(GREETING_SECONDS)
            greeting = read_message(stream, LONGEST_GREETING)
            send_message(client, {**_reply_to(greeting), "body": _CAPABILITIES})
            attach = read_message(stream, LONGEST_GREETING)
            if problem := self._find_problem(greeting, attach):
                error = {"error": {"id": 1, "format": problem, "showUser": True}}
                send_message(client, {**_reply_to(attach), "success": False, "message": problem, "body": error})
                return
            client.settimeout(None)
            try:
                self._attach(client, stream, greeting, attach)
            finally:
                self._is_taken.release()

    def _find_problem(self, greeting: Message, attach: Message) -> str:
        """Return why the client cannot attach; otherwise reserve the gate for it, and return an empty text."""
        if greeting.get("command") != "initialize" or attach.get("command") != "attach":
            return 'ddip: the launch configuration needs "request": "attach"'
        launch = attach.get("arguments")
        token = launch.get(TOKEN) if isinstance(launch, dict) else None
        if not hmac.compare_digest(str(token).encode(), self._token.encode()):
            return f'ddip: "{TOKEN}" is not that of this group; copy the configuration that %dipdebug --dap prints'
        if not self._is_taken.acquire(blocking=False):
            return "ddip: another IDE is attached to this rank"
        return ""

    def _attach(self, client: socket.socket, stream: BinaryIO, greeting: Message, attach: Message) -> None:
        """Connect the client to the debugger, and pass messages on until the client leaves."""
        ours, debuggers = socket.socketpair()
        with self._keep_open(ours, debuggers):
            self._connect(debuggers)
            send_message(ours, greeting)
            send_message(ours, attach)
            answers = self._start_thread(self._pass_to_client, ours, client)
            self.is_attached = True
            try:
                while True:
                    request = read_message(stream)
                    arguments = request.get("arguments") or {}
                    if request.get("command") == "disconnect":
                        request["arguments"] = {**arguments, "terminateDebuggee": False}
                    if request.get("command") != "terminate":
                        send_message(ours, request)
            finally:  # also if the IDE has vanished: the rank must continue
                self.is_attached = False
                send_message(ours, _DISCONNECT)
                answers.join(GREETING_SECONDS)

    def _pass_to_client(self, debugger: socket.socket, client: socket.socket) -> None:
        """Pass messages on until the debugger has answered `_DISCONNECT`; a client that has left gets none."""
        with contextlib.suppress(OSError, EOFError, ValueError), debugger.makefile("rb") as stream:
            while (message := read_message(stream)).get("request_seq") != _DISCONNECT["seq"]:
                if message.get("command") != "initialize":  # which the gate has answered
                    with contextlib.suppress(OSError):
                        send_message(client, message)


def _reply_to(request: Message) -> Message:
    return {
        "type": "response",
        "seq": 0,
        "request_seq": request.get("seq"),
        "command": request.get("command"),
        "success": True,
    }


_DISCONNECT: Message = {"type": "request", "seq": 0, "command": "disconnect", "arguments": {}}
"""The gate's own request; clients begin with 1."""
_CAPABILITIES = {
    "supportsConfigurationDoneRequest": True,
    "supportsFunctionBreakpoints": True,
    "supportsConditionalBreakpoints": True,
    "supportsHitConditionalBreakpoints": True,
    "supportsEvaluateForHovers": True,
    "supportsSetVariable": True,
    "supportsSetExpression": True,
    "supportsGotoTargetsRequest": True,
    "supportsCompletionsRequest": True,
    "supportsModulesRequest": True,
    "supportsExceptionOptions": True,
    "supportsExceptionInfoRequest": True,
    "supportsValueFormattingOptions": True,
    "supportsDelayedStackTraceLoading": True,
    "supportsLogPoints": True,
    "supportsClipboardContext": True,
    "supportsStepInTargetsRequest": True,
    "exceptionBreakpointFilters": [
        {"filter": "raised", "label": "Raised Exceptions", "default": False},
        {"filter": "uncaught", "label": "Uncaught Exceptions", "default": False},
        {"filter": "userUnhandled", "label": "User Uncaught Exceptions", "default": True},
    ],
}
"""What debugpy's debugger can do, except to end the process."""
