"""The far end of a link: threads in an engine of an existing cluster that start the agent on the engine's host.

    near end  --control scheduler of that cluster-->  far end, in threads of an engine  --pipes-->  agent
    (near_end.py)  <------------------------------------------------------------------------------

The near end sends this file's source to the engine, whose Python may have no ddip: it may only use the standard library
and the engine's packages. The far end opens a separate socket to the scheduler, and uses only the engine's connection
and key, so it works while the engine computes. Unsent messages are dropped with that socket; ipyparallel's nanny, the
process that relays an engine's control messages, would wait for them indefinitely.
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
"""Largest data of a message in bytes."""
PIPE = 1 << 20
"""Capacity of a pipe in bytes, on Linux: the default of 64 KiB would mean many small messages."""
WINDOW = 32
"""Largest number of unacknowledged messages with data: ZeroMQ drops messages above its limit."""
TAKEN = 8
"""Number of messages that one acknowledgement covers."""
BEAT_SECONDS = 1.0
LOST_BEATS = 10
"""Number of beats without a message after which the other end is lost."""
END_SECONDS = 5.0
"""Time that the agent may take to end its ranks."""
LINGER_MILLISECONDS = 1000
"""Time that the last messages may take to be sent after the end."""
KIND = "ddip_link_"
"""Prefix of a far end's unique name, which is also the type of its messages."""
ADDRESS = "DDIP_ADDRESS"
"""Variable with the address from which this host reaches the controller of that cluster, for the agent."""
NOT_FOR_THE_AGENT = ("IPP_", "SSH_", "OMPI_", "PMI_", "PMIX_", "JPY_")
"""Prefixes of variables that describe the engine, and that the agent must not inherit."""


class Link:
    """One end of a link that carries streams of bytes both ways, in order and with flow control.

    `send` sends a message with data, and may be called by any thread; `sinks` are the descriptors to write to, by the
    name of the stream.
    """

    def __init__(self, send: Callable[[dict[str, Any], bytes], None], sinks: Mapping[str, int]) -> None:
        self._send = send
        self._sinks = dict(sinks)
        self._lock = threading.Lock()
        self._sent = self._received = 0
        self._room = threading.Semaphore(WINDOW)
        self._unwritten: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._written = threading.Event()
        self._beats = 0
        self.fault = ""
        """Reason why the link is unusable; empty while it works."""
        threading.Thread(target=self._write, name="ddip-link", daemon=True).start()

    def tell(self, what: str, value: Any = None, data: bytes = b"") -> None:
        """Send a numbered message of the kind `what`, with `value` and `data`; may be called by any thread."""
        with self._lock:
            self._sent += 1
            self._send({"number": self._sent, "what": what, "value": value}, data)

    def read(self, stream: str, source: int) -> None:
        """Send the data read from the descriptor `source` as `stream`, and return after its end.

        Waits while the other end has WINDOW pieces to write, so it needs a thread of its own.
        """
        with contextlib.suppress(OSError, AttributeError):  # not a pipe, or not Linux
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
        """Handle a message from the other end; return True if it is about the streams, or a beat.

        Call it for each message, in order of arrival. If one was lost, it sets `fault` and raises nothing.
        """
        self._beats = 0
        self._received += 1
        if content["number"] != self._received:
            self.fault = self.fault or "a message was lost on its way"
        if content["what"] == "bytes":
            self._unwritten.put((content["value"], data))
        elif content["what"] == "taken":
            self._room.release(TAKEN)
        return content["what"] in ("bytes", "taken", "beat")

    def beat(self) -> int:
        """Send a beat, and return the number of beats since the other end's last message.

        Beats are counted, not seconds: a process whose threads were all stopped could not receive anything.
        """
        self.tell("beat")
        self._beats += 1
        return self._beats

    def close(self, stream: str) -> None:
        """Close the sink of `stream` after the data received so far."""
        self._unwritten.put((stream, b""))

    def end(self) -> None:
        """Close all sinks after the data received so far."""
        self._unwritten.put(None)

    def drain(self, seconds: float) -> bool:
        """Wait up to `seconds` until all sinks have been written and closed; return False if they are not."""
        return self._written.wait(seconds)

    def _write(self) -> None:
        for count in itertools.count(1):
            entry = self._unwritten.get()
            if entry is None:
                break
            stream, data = entry
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
            except OSError:  # the reader has closed the pipe
                self._sinks.pop(stream, None)
            if count % TAKEN == 0:
                self.tell("taken")
            if not self._sinks:
                self._written.set()
        for sink in self._sinks.values():
            os.close(sink)


class FarEnd:
    """The far end of one link, in an ipyparallel `engine`; `kind` is its name at the scheduler."""

    def __init__(self, engine: Any, kind: str) -> None:
        self._engine, self._kind = engine, kind
        self._session = engine.session.clone()
        self._session.copy_threshold = 2 * AT_ONCE  # sending without a copy would start a zmq thread that stays
        self._near: list[bytes] = []
        """Identities of the near end, by which the scheduler routes messages to it."""
        self._link: Link | None = None
        self._agent: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._silent_beats = 0
        self._unsent: queue.SimpleQueue[tuple[dict[str, Any], bytes]] = queue.SimpleQueue()
        self._woken, self._waker = socket.socketpair()
        for end in (self._woken, self._waker):
            end.setblocking(False)
        for task in (self._serve, self._watch):
            threading.Thread(target=task, name="ddip-far-end", daemon=True).start()

    def _serve(self) -> None:
        """Send and receive messages until this end is over and every message is sent."""
        import zmq

        with self._woken, self._waker, zmq.Context() as context, context.socket(zmq.DEALER) as scheduler:
            scheduler.identity, scheduler.linger = self._kind.encode(), LINGER_MILLISECONDS
            connect, _ = self._engine.init_connector()
            info = self._engine.connection_info
            connect(scheduler, f"{info['interface']}:{info['control']}")
            self._relay(scheduler)

    def _relay(self, scheduler: Any) -> None:
        import zmq

        poller = zmq.Poller()
        for source in (scheduler, self._woken):
            poller.register(source, zmq.POLLIN)
        while not (self._ended.is_set() and self._unsent.empty()):
            if scheduler in dict(poller.poll()):
                idents, message = self._session.recv(scheduler)
                self._handle_message(idents, message["content"], b"".join(bytes(part) for part in message["buffers"]))
            with contextlib.suppress(BlockingIOError):
                self._woken.recv(4096)
            while not self._unsent.empty():
                content, data = self._unsent.get()
                buffers = [data] if data else None
                self._session.send(scheduler, self._kind, content, ident=self._near, buffers=buffers)

    def _queue_message(self, content: dict[str, Any], data: bytes = b"") -> None:
        """Queue a message, and wake the sending thread; may be called by any thread."""
        self._unsent.put((content, data))
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the thread has been woken already, or has ended
            self._waker.send(b"x")

    def _handle_message(self, near: list[bytes], content: Mapping[str, Any], data: bytes) -> None:
        if content["what"] == "hello":
            self._near = near
            self._queue_message({"what": "here"})
            return
        if content["what"] == "begin" and self._link is None:
            self._start_agent(content["value"])
        if self._link is not None:
            self._link.heard(content, data)

    def _start_agent(self, command: Sequence[str]) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(NOT_FOR_THE_AGENT)}
        agent = self._agent = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**kept, ADDRESS: _controller_side_address()},
            start_new_session=True,
        )
        assert agent.stdin is not None and agent.stdout is not None and agent.stderr is not None
        self._link = Link(self._queue_message, {"in": os.dup(agent.stdin.fileno())})
        agent.stdin.close()
        threading.Thread(
            target=self._wait_for_agent, args=(self._link, agent), name="ddip-far-end", daemon=True
        ).start()

    def _wait_for_agent(self, link: Link, agent: subprocess.Popen[bytes]) -> None:
        def read_stream(name: str, source: Any) -> None:
            with source:
                link.read(name, source.fileno())

        pipes = {"out": agent.stdout, "err": agent.stderr}
        readers = [
            threading.Thread(target=read_stream, args=pipe, name="ddip-far-end", daemon=True) for pipe in pipes.items()
        ]
        for reader in readers:
            reader.start()
        code = agent.wait()
        for reader in readers:
            reader.join(1)
        link.tell("exit", code)
        self._end()

    def _watch(self) -> None:
        """Send beats, and end the agent if the near end is silent for LOST_BEATS or the link fails."""
        while not self._ended.wait(BEAT_SECONDS):
            self._silent_beats += 1
            silent = self._silent_beats if self._link is None else self._link.beat()
            if silent > LOST_BEATS or (self._link is not None and self._link.fault):
                self._end_agent()
                return

    def _end_agent(self) -> None:
        if self._link is not None and self._agent is not None:
            self._link.close("in")
            if not self._ended.wait(END_SECONDS):
                os.killpg(self._agent.pid, signal.SIGKILL)
        self._end()

    def _end(self) -> None:
        """End the threads of this end, so that the engine is as before."""
        if self._link is not None:
            self._link.end()
        self._ended.set()
        self._wake()


def _controller_side_address() -> str:
    """Return the local address of this engine's connection to its controller.

    Empty if the controller is on the same host, or if the address is unknown.
    """
    try:
        import psutil  # a requirement of ipyparallel

        process = psutil.Process()
        has_new_name = hasattr(process, "net_connections")  # from psutil 6.0 on
        connections = (process.net_connections if has_new_name else process.connections)("tcp4")
    except Exception:
        return ""
    ends = [(c.laddr.ip, c.raddr.ip) for c in connections if c.raddr]
    return next((ours for ours, theirs in ends if ours != theirs and not ours.startswith("127.")), "")


def begin(engine: Any, kind: str) -> None:
    """Start the far end `kind` in `engine`, and return at once; the near end has the engine call this."""
    FarEnd(engine, kind)
