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
import socket
import threading
from collections.abc import Callable
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
        self, token: str, start_thread: Callable[..., object], connect: Callable[[socket.socket], object]
    ) -> None:
        """Prepare the gate for clients that know `token`.

        `start_thread` calls a function with arguments in a thread that the debugger does not stop; `connect` makes the
        debugger use one end of a socket pair.
        """
        self.on_stopped: Callable[[bool], object] = lambda is_stopped: None
        """Called with True when the debugger has stopped the rank, and with False when the rank continues."""
        self._token, self._start_thread, self._connect = token, start_thread, connect
        self._listener = socket.create_server((LOOPBACK, 0))
        self._is_taken = threading.Lock()
        """Held while a client is attached."""
        self._sockets: set[socket.socket] = set()
        """The open connections to clients."""
        start_thread(self._accept_clients)

    @property
    def port(self) -> int:
        """The port on the loopback interface to which an IDE connects."""
        return int(self._listener.getsockname()[1])

    @property
    def is_attached(self) -> bool:
        """True while an IDE is attached."""
        return self._is_taken.locked()

    def close(self) -> None:
        """Close the port and all connections; a rank that has stopped continues."""
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # ends the calls in other threads that wait for it
            each.close()

    def _accept_clients(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            self._start_thread(self._serve_client, client)

    def _serve_client(self, client: socket.socket) -> None:
        self._sockets.add(client)
        try:
            with (
                contextlib.suppress(OSError, EOFError, ValueError),
                client,
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
        finally:
            self._sockets.discard(client)

    def _find_problem(self, greeting: Message, attach: Message) -> str:
        """Return why the client cannot attach; otherwise reserve the gate for it, and return an empty text."""
        if greeting.get("command") != "initialize" or attach.get("command") != "attach":
            return 'ddip: the launch configuration needs "request": "attach"'
        if not hmac.compare_digest(str(attach.get("arguments", {}).get(TOKEN, "")).encode(), self._token.encode()):
            return f'ddip: "{TOKEN}" is not that of this group; copy the configuration that %dipdebug --dap prints'
        if not self._is_taken.acquire(blocking=False):
            return "ddip: another IDE is attached to this rank"
        return ""

    def _attach(self, client: socket.socket, stream: BinaryIO, greeting: Message, attach: Message) -> None:
        """Connect the client to the debugger, and pass messages on until one side closes."""
        ours, debuggers = socket.socketpair()
        with ours:
            self._connect(debuggers)
            send_message(ours, greeting)
            send_message(ours, attach)
            self._start_thread(self._pass_to_client, ours, client)
            try:
                while True:
                    request = read_message(stream)
                    arguments = request.get("arguments") or {}
                    if request.get("command") == "disconnect":
                        request["arguments"] = {**arguments, "terminateDebuggee": False}
                    if request.get("command") != "terminate":
                        send_message(ours, request)
            finally:  # also if the IDE has vanished: the rank must continue
                send_message(ours, {"type": "request", "seq": 1_000_000, "command": "disconnect", "arguments": {}})
                ours.shutdown(socket.SHUT_WR)
                self.on_stopped(False)

    def _pass_to_client(self, debugger: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError, EOFError, ValueError), debugger.makefile("rb") as stream:
            while True:
                message = read_message(stream)
                if message.get("event") in ("stopped", "continued"):
                    self.on_stopped(message["event"] == "stopped")
                if message.get("command") != "initialize":  # which the gate has answered
                    send_message(client, message)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)


def _reply_to(request: Message) -> Message:
    return {
        "type": "response",
        "seq": 0,
        "request_seq": request.get("seq"),
        "command": request.get("command"),
        "success": True,
    }


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
