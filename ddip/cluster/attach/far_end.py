"""What runs in an engine of somebody else's cluster, so that this host can be reached: it starts the agent beside it.

    near end  --control scheduler of that cluster-->  far end, in threads of an engine  --pipes-->  agent
    (near_end.py)  <------------------------------------------------------------------------------

Its text is sent to that engine, whose Python may have no ddip: it needs the standard library, and what the engine has.
It has a socket of its own to that scheduler, beside the engine's, and takes nothing of the engine but connection and
key. So it does not matter what the engine computes; and what cannot be sent any more ends with the socket, while the
process through which an engine's own control messages go, ipyparallel's nanny, would wait for that for ever.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import queue
import signal
import socket
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
LINGER_MILLISECONDS = 1000
"""How long the last messages of an end may take to leave."""
KIND = "ddip_link_"
"""How the name of a far end begins: each has its own, which is the type of its messages, too."""
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
        self._unwritten: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
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

    def end(self) -> None:
        """Write what has come, and have done with all sinks."""
        self._unwritten.put(None)

    def drain(self, seconds: float) -> bool:
        """Wait until all sinks have had everything, and are closed."""
        return self._written.wait(seconds)

    def _write(self) -> None:
        for count in itertools.count(1):
            one = self._unwritten.get()
            if one is None:
                break
            stream, data = one
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
        for sink in self._sinks.values():
            os.close(sink)


class FarEnd:
    """One link, in an `engine` of ipyparallel; `kind` is its name at the scheduler."""

    def __init__(self, engine: Any, kind: str) -> None:
        self._engine, self._kind = engine, kind
        self._session = engine.session.clone()
        self._session.copy_threshold = 2 * AT_ONCE  # what zmq sends without a copy takes a thread, which would stay
        self._near: list[bytes] = []
        """Where the near end is, for the scheduler."""
        self._link: Link | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._over = threading.Event()
        self._waited = 0
        self._unsent: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        for task in (self._serve, self._watch):
            threading.Thread(target=task, name="ddip-far-end", daemon=True).start()

    def _serve(self) -> None:
        """Send and receive, until this end is over and all has been sent."""
        import zmq

        with self._woken, self._waker, zmq.Context() as context, context.socket(zmq.DEALER) as scheduler:
            scheduler.identity, scheduler.linger = self._kind.encode(), LINGER_MILLISECONDS
            connect, _ = self._engine.init_connector()
            told = self._engine.connection_info
            connect(scheduler, f"{told['interface']}:{told['control']}")
            self._relay(scheduler)

    def _relay(self, scheduler: Any) -> None:
        import zmq

        poller = zmq.Poller()
        for source in (scheduler, self._woken):
            poller.register(source, zmq.POLLIN)
        while not (self._over.is_set() and self._unsent.empty()):
            if scheduler in dict(poller.poll()):
                idents, message = self._session.recv(scheduler)
                self._heard(idents, message["content"], b"".join(bytes(part) for part in message["buffers"]))
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            while not self._unsent.empty():
                content, data = self._unsent.get()
                buffers = [data] if data else None
                self._session.send(scheduler, self._kind, content, ident=self._near, buffers=buffers)

    def _say(self, content: dict[str, Any], data: bytes = b"") -> None:
        """Have a message sent; may be called by any thread."""
        self._unsent.put((content, data))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # it has been woken already, or is over
            self._waker.send(b"x")

    def _heard(self, near: list[bytes], content: Mapping[str, Any], data: bytes) -> None:
        if content["what"] == "hello":
            self._near = near
            self._say({"what": "here"})
            return
        if content["what"] == "begin" and self._link is None:
            self._begin(content["value"])
        if self._link is not None:
            self._link.heard(content, data)

    def _begin(self, command: Sequence[str]) -> None:
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
        self._link = Link(self._say, {"in": os.dup(agent.stdin.fileno())})
        agent.stdin.close()
        threading.Thread(target=self._wait, args=(self._link, agent), name="ddip-far-end", daemon=True).start()

    def _wait(self, link: Link, agent: subprocess.Popen[bytes]) -> None:
        def read(name: str, source: Any) -> None:
            with source:
                link.read(name, source.fileno())

        pipes = {"out": agent.stdout, "err": agent.stderr}
        readers = [threading.Thread(target=read, args=pipe, name="ddip-far-end", daemon=True) for pipe in pipes.items()]
        for reader in readers:
            reader.start()
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
        if self._link is not None:
            self._link.end()
        self._over.set()
        self._wake()


def _address() -> str:
    """The address from which this engine is connected with its controller; empty: that is on the same host."""
    try:
        import psutil  # ipyparallel needs it, too

        connections = psutil.Process().net_connections("tcp4")
    except Exception:  # an older psutil, or none
        return ""
    ends = [(c.laddr.ip, c.raddr.ip) for c in connections if c.raddr]
    return next((ours for ours, theirs in ends if ours != theirs and not ours.startswith("127.")), "")


def begin(engine: Any, kind: str) -> None:
    """Called in the engine."""
    FarEnd(engine, kind)
