"""What runs in an engine of somebody else's cluster, so that this host can be reached: it starts the agent beside it.

    near end  --control channel of that cluster-->  far end, in threads of an engine  --pipes-->  agent
    (near_end.py)  <---------------------------------------------------------------------------

Its text is sent to that engine, whose Python may have no ddip: it needs the standard library alone. Of the engine it
takes a name among the handlers of its control channel, which goes with the agent. That channel has a thread of its own,
so it does not matter what the engine computes.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import queue
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

AT_ONCE = 1 << 18
"""Bytes in a message at most."""
PIPE = 1 << 20
"""Bytes that a pipe may hold, on Linux: 64 KiB would make for many small messages."""
WINDOW = 32
"""Messages with bytes on their way at most: ZeroMQ drops what is too much for it."""
TAKEN = 8
"""So many of them are acknowledged at once."""
BEAT_SECONDS = 1.0
LOST_BEATS = 10
"""Of the other end: without so many of them it is gone."""
END_SECONDS = 5.0
"""How long the agent may take to end its ranks."""
KIND = "ddip_link_"
"""How the types of messages begin; each link has its own."""
SHORT = "ddip_short_way"
ADDRESS = "DDIP_ADDRESS"
"""Variable that tells the agent by which address this host reaches the controller of that cluster."""
NOT_FOR_THE_AGENT = ("IPP_", "SSH_", "OMPI_", "PMI_", "PMIX_", "JPY_")
"""How variables of an engine begin that are about the engine."""


class Link:
    """One end: bytes go both ways, in order, as far as the other end takes them.

    `send` sends a message with bytes, and may be called by any thread; `sinks` are descriptors by the name of a stream.
    """

    def __init__(self, send: Callable[[dict[str, Any], bytes], None], sinks: Mapping[str, int]) -> None:
        self._send = send
        self._sinks = dict(sinks)
        self._lock = threading.Lock()
        self._sent = self._come = 0
        self._room = threading.Semaphore(WINDOW)
        self._unwritten: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._written = threading.Event()
        self._beats = 0
        self.fault = ""
        """Why it is of no use any more."""
        threading.Thread(target=self._write, name="ddip-link", daemon=True).start()

    def tell(self, what: str, value: Any = None, data: bytes = b"") -> None:
        """Send a message."""
        with self._lock:
            self._sent += 1
            self._send({"number": self._sent, "what": what, "value": value}, data)

    def read(self, stream: str, source: int) -> None:
        """Send what can be read, until it ends."""
        with contextlib.suppress(OSError, AttributeError):  # it is no pipe, or this is no Linux
            fcntl.fcntl(source, fcntl.F_SETPIPE_SZ, PIPE)
        data = b"x"
        while data:
            try:
                data = os.read(source, AT_ONCE)
            except OSError:
                data = b""
            self._room.acquire()
            self.tell("bytes", stream, data)

    def heard(self, content: Mapping[str, Any], data: bytes) -> bool:
        """A message has come; returns False for what is not about the streams."""
        self._beats = 0
        self._come += 1
        if content["number"] != self._come:
            self.fault = self.fault or "a message was lost on its way"
        if content["what"] == "bytes":
            self._unwritten.put((content["value"], data))
        elif content["what"] == "taken":
            self._room.release(TAKEN)
        return content["what"] in ("bytes", "taken", "beat")

    def beat(self) -> int:
        """Tell the other end of this one; returns for how many beats it has said nothing. Beats are counted, not
        seconds: a process whose threads all stood still has not listened."""
        self.tell("beat")
        self._beats += 1
        return self._beats

    def close(self, stream: str) -> None:
        """Have done with a sink."""
        self._unwritten.put((stream, b""))

    def drain(self, seconds: float) -> bool:
        """Wait until all sinks have had everything, and are closed."""
        return self._written.wait(seconds)

    def _write(self) -> None:
        for count in itertools.count(1):
            stream, data = self._unwritten.get()
            sink = self._sinks.get(stream)
            try:
                if sink is None:
                    pass
                elif data:
                    rest = memoryview(data)
                    while rest:
                        rest = rest[os.write(sink, rest) :]
                else:
                    del self._sinks[stream]
                    os.close(sink)
            except OSError:  # nobody reads it
                self._sinks.pop(stream, None)
            if count % TAKEN == 0:
                self.tell("taken")
            if not self._sinks:
                self._written.set()


class FarEnd:
    """One link, in `kernel`; its messages are of the type `kind`."""

    def __init__(self, kernel: Any, kind: str) -> None:
        self._kernel, self._kind = kernel, kind
        self._link: Link | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._waited = 0
        kernel.control_handlers[kind] = self.heard
        _shorten(kernel)
        threading.Thread(target=self._watch, name="ddip-far-end", daemon=True).start()

    def heard(self, stream: Any, idents: Any, message: Mapping[str, Any]) -> None:
        """A message has come, on the thread of the control channel."""
        content, data = message["content"], b"".join(bytes(part) for part in message["buffers"])
        if content["what"] == "begin" and self._link is None:
            self._begin(stream, idents, content["value"])
        if self._link is not None:
            self._link.heard(content, data)

    def _begin(self, stream: Any, idents: Any, command: Sequence[str]) -> None:
        session, loop = self._kernel.session, stream.io_loop

        def send(content: dict[str, Any], data: bytes) -> None:
            buffers = [data] if data else None
            loop.add_callback(lambda: session.send(stream, self._kind, content, ident=idents, buffers=buffers))

        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_THE_AGENT)}
        agent = self._agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**kept, ADDRESS: _address()},
            start_new_session=True,
        )
        assert agent.stdin is not None and agent.stdout is not None and agent.stderr is not None
        self._link = Link(send, {"in": os.dup(agent.stdin.fileno())})
        agent.stdin.close()
        readers = []
        for name, source in (("out", agent.stdout), ("err", agent.stderr)):
            reader = threading.Thread(target=self._link.read, args=(name, source.fileno()), daemon=True)
            reader.start()
            readers.append(reader)
        threading.Thread(target=self._wait, args=(self._link, agent, readers), daemon=True).start()

    def _wait(self, link: Link, agent: subprocess.Popen[bytes], readers: Sequence[threading.Thread]) -> None:
        code = agent.wait()
        for reader in readers:
            reader.join(1)
        link.tell("exit", code)
        self._end()

    def _watch(self) -> None:
        """End the agent when the near end is gone."""
        while not self._over.wait(BEAT_SECONDS):
            self._waited += 1
            silent = self._waited if self._link is None else self._link.beat()
            if silent > LOST_BEATS or (self._link is not None and self._link.fault):
                self._leave()
                return

    def _leave(self) -> None:
        if self._link is not None and self._agent is not None:
            self._link.close("in")
            if not self._over.wait(END_SECONDS):
                os.killpg(self._agent.pid, signal.SIGKILL)
        self._end()

    def _end(self) -> None:
        """Leave the engine as it was."""
        self._kernel.control_handlers.pop(self._kind, None)
        self._kernel.control_stream.io_loop.add_callback(_lengthen, self._kernel)
        self._over.set()


def _address() -> str:
    """The address from which this engine is connected with its controller; empty: that is on the same host."""
    try:
        import psutil  # ipyparallel needs it, too

        connections = psutil.Process().net_connections("tcp4")
    except Exception:  # an older psutil, or none
        return ""
    ends = [(c.laddr.ip, c.raddr.ip) for c in connections if c.raddr]
    return next((ours for ours, theirs in ends if ours != theirs and not ours.startswith("127.")), "")


def _shorten(kernel: Any) -> None:
    """Have messages of links pass by what a kernel does before and after each request: it would take 5 ms."""
    handlers, session = kernel.control_handlers, kernel.session
    if SHORT in handlers:
        return

    def dispatch(frames: Any) -> Any:
        idents, rest = session.feed_identities(frames, copy=False)
        if KIND.encode() not in rest[1].bytes:
            return kernel.dispatch_control(frames)
        message = session.deserialize(rest, content=True, copy=False)
        handler = handlers.get(message["header"]["msg_type"])
        return handler and handler(kernel.control_stream, idents, message)

    handlers[SHORT] = dispatch
    kernel.control_stream.on_recv(dispatch, copy=False)


def _lengthen(kernel: Any) -> None:
    """Have them no more, when there are no links."""
    handlers = kernel.control_handlers
    if SHORT in handlers and not any(name.startswith(KIND) for name in handlers):
        del handlers[SHORT]
        kernel.control_stream.on_recv(kernel.dispatch_control, copy=False)


def begin(kernel: Any, kind: str) -> None:
    """Called in the engine, with its kernel."""
    FarEnd(kernel, kind)
