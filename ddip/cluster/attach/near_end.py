"""The near end of a link: a local process that stands for the agent on the host of an existing cluster's engine.

Run as ``python -P -m ddip.cluster.attach.near_end FILE ENGINES PYTHON SETUP``: the cluster's connection file for
clients, its engines on that host, of which one is used, and the arguments of ``ssh.agent_line``. Its stdin, stdout and
stderr are the agent's: the cluster's control scheduler relays the data between this process and ``far_end.py``.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

from ddip.cluster import ipp_private, ssh
from ddip.cluster.attach.attached import ANSWER_SECONDS, ask_engines, connect_client
from ddip.cluster.attach.far_end import BEAT_SECONDS, KIND, LOST_BEATS, Link
from ddip.errors import GroupError

BUSY_BEATS = 30
"""Number of beats for which a registered engine may be silent, since its code may let no other thread run."""
HELLO_SECONDS = 0.05
START = (
    "(lambda space: (__import__('builtins').exec({text!r}, space), space['begin']("
    "__import__('IPython').get_ipython().kernel.parent, {kind!r})))({{'__name__': 'ddip_far_end'}}) and None"
)


class NearEnd:
    """The near end of a link to the first of `engines` that answers; the constructor waits for that.

    `file`: connection file of their cluster; `line`: shell line that starts the agent. Raises GroupError if none
    answers.
    """

    def __init__(self, file: str, engines: Sequence[int], line: str) -> None:
        self._kind = f"{KIND}{uuid.uuid4().hex}"
        self._client = connect_client(file, self._handle_message)
        self._connected, self._ended = threading.Event(), threading.Event()
        self._engine = self._reach(engines)
        self._link = Link(self._send, {"out": 1, "err": 2})
        self._exit_code: int | None = None
        self._link.tell("begin", ["sh", "-c", line])

    def _reach(self, engines: Sequence[int]) -> int:
        text = far_end_text()
        registered = [engine for engine in engines if engine in self._client.ids]
        if not registered:
            raise GroupError(
                f"engine {', '.join(map(str, engines))} of that cluster has ended, and with it the connection to "
                "its host"
            )
        fault = GroupError("")
        for engine in registered:
            try:
                ask_engines(self._client, [engine], START.format(text=text, kind=self._kind))
                self._wait_for_far_end(engine)
            except GroupError as error:
                fault = error
            else:
                return engine
        raise fault

    def _wait_for_far_end(self, engine: int) -> None:
        """Wait until the far end in `engine` answers a hello; raise GroupError after ANSWER_SECONDS.

        Hellos are repeated, since the scheduler drops messages to an end that is not yet connected.
        """
        deadline = time.monotonic() + ANSWER_SECONDS
        while not self._connected.is_set():
            if time.monotonic() > deadline:
                raise GroupError(f"engine {engine} of that cluster cannot connect to its controller again")
            self._send({"what": "hello"}, b"")
            self._connected.wait(HELLO_SECONDS)

    def _send(self, content: dict[str, Any], data: bytes) -> None:
        ipp_private.send_on_control_channel(self._client, self._kind, content, data)

    def _handle_message(self, message: dict[str, Any]) -> None:
        """Handle a message of the far end, on the client's thread."""
        if message["header"]["msg_type"] != self._kind:
            return
        content = message["content"]
        if content["what"] == "here":
            self._connected.set()
            return
        self._link.heard(content, b"".join(bytes(part) for part in message["buffers"]))
        if content["what"] == "exit":
            self._exit_code = content["value"]
            self._link.close("out")  # closes after the data received before
            self._link.close("err")
            self._ended.set()

    def serve(self) -> int:
        """Relay until the agent ends, at the latest after stdin, and return its exit code.

        Raises GroupError if the link fails, or if the engine or the controller ends or does not answer.
        """
        threading.Thread(target=self._link.read, args=("in", 0), daemon=True).start()
        controller_answer: Any = None
        while not self._ended.wait(BEAT_SECONDS):
            silent = self._link.beat()
            if self._link.fault:
                raise GroupError(self._link.fault)
            if self._engine not in self._client.ids:
                raise GroupError(
                    f"engine {self._engine} of that cluster has ended, and with it the connection to its host"
                )
            if silent == 1:
                controller_answer = None
            if silent > LOST_BEATS // 2 and controller_answer is None:
                controller_answer = ipp_private.request_connection(self._client)
            if silent > LOST_BEATS and controller_answer is not None and not controller_answer.done():
                raise GroupError("the controller of that cluster has stopped answering")
            if silent > BUSY_BEATS:
                raise GroupError(f"engine {self._engine} of that cluster has not answered for {BUSY_BEATS} s")
        self._link.drain(ANSWER_SECONDS)
        return self._exit_code or 0


def far_end_text() -> str:
    """Return the source of ``far_end.py``."""
    import inspect

    from ddip.cluster.attach import far_end

    return inspect.getsource(far_end)


def main() -> NoReturn:
    """Relay until the agent ends, and exit with its code; exit with 1 if the link fails.

    The error goes to stderr. A death by signal N exits with 128 + N.
    """
    file, engines, python, setup = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        code = NearEnd(file, json.loads(engines), ssh.agent_line(python, setup)).serve()
    except GroupError as error:
        os.write(2, f"{error}\n".encode())
        code = 1
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
