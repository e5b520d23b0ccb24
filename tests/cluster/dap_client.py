"""A client of the Debug Adapter Protocol, as an IDE is one."""

from __future__ import annotations

import json
import socket
from typing import Any

Message = dict[str, Any]


class DapClient:
    """One connection to the port of a rank."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._stream = self.socket.makefile("rb")
        self._sent = 0
        self._events: list[Message] = []

    def request(self, command: str, **arguments: Any) -> Message:
        """Send a request, and return the response."""
        self._sent += 1
        body = {"seq": self._sent, "type": "request", "command": command, "arguments": arguments}
        text = json.dumps(body).encode()
        self.socket.sendall(b"Content-Length: %d\r\n\r\n%b" % (len(text), text))
        while True:
            message = self._read()
            if message["type"] == "response" and message["request_seq"] == self._sent:
                return message
            self._events.append(message)

    def event(self, name: str) -> Message:
        """Wait for an event of this name, and return its body; earlier events are dropped."""
        while True:
            message = self._events.pop(0) if self._events else self._read()
            if message.get("event") == name:
                return dict(message.get("body") or {})

    def greet(self, **launch: Any) -> Message:
        """Send what an IDE sends first for this launch configuration; return the response to ``attach``."""
        assert self.request("initialize", adapterID="debugpy", pathFormat="path")["success"]
        return self.request("attach", **launch)

    def attach(self, launch: Message, *breakpoints: tuple[str, int]) -> None:
        """Attach to the rank, and set breakpoints: pairs of a file and a line."""
        response = self.greet(**launch)
        assert response["success"], response
        self.event("initialized")  # before which IDEs set no breakpoints
        for path, line in breakpoints:
            self.set_breakpoint(path, line)
        self.request("configurationDone")

    def set_breakpoint(self, path: str, line: int) -> None:
        """Set the only breakpoint of a file."""
        answer = self.request("setBreakpoints", source={"path": path}, breakpoints=[{"line": line}])
        assert answer["body"]["breakpoints"][0]["verified"], answer

    def wait_for_stop(self) -> tuple[int, Message]:
        """Wait until the rank stops; return the thread, and the innermost frame."""
        thread = int(self.event("stopped")["threadId"])
        return thread, self.request("stackTrace", threadId=thread)["body"]["stackFrames"][0]

    def evaluate(self, expression: str, frame: Message) -> str:
        """Return the value of `expression` in `frame`, as text."""
        return str(self.request("evaluate", expression=expression, frameId=frame["id"])["body"]["result"])

    def is_closed(self) -> bool:
        """Wait until the other side closes the connection; False if it does not within the timeout."""
        try:
            while True:
                self._read()
        except (EOFError, ConnectionError):
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        """Close the connection without a word, as an IDE that has crashed."""
        self._stream.close()
        self.socket.close()

    def _read(self) -> Message:
        length = 0
        while line := self._stream.readline().strip():
            length = int(line.removeprefix(b"Content-Length:"))
        body = self._stream.read(length)
        if not body:
            raise EOFError
        return dict(json.loads(body))
