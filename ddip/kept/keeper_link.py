"""The connection of a notebook's kernel to a keeper: run code there, show its output here, and pass on what users do.

Two threads use it. The notebook's main thread sends code and waits for the reply; meanwhile it passes on the stop
button and the questions of the keeper (``input()``, the debugger of a rank). The thread ``ddip-kept`` receives the
output, also that of cells that have ended, and sends it to the page as output of the cell that it belongs to.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import json
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
from IPython.core.getipython import get_ipython
from jupyter_client.session import Session

from ddip import errors
from ddip.cluster.processes import ownership
from ddip.errors import DdipError, GroupError, RequestInterrupted
from ddip.guard import Guard
from ddip.kept import cell_records, kept_folder
from ddip.kept.kept_folder import CONNECTION, KeptGroup
from ddip.output import area
from ddip.protocol.on_rank import RemoteCall

POLL_MILLISECONDS = 100
REPLY_SECONDS = 20
"""Time that a keeper may take to answer while it runs a cell."""
PAGES = 500
"""Number of cells whose late output is shown below them; that of older ones is shown below the first cell."""
NO_REPLY_SECONDS = 0.5
"""Time for the reply of a request that a stop may have ended before it began."""
OUTPUT_SECONDS = 5.0
"""Time to wait for the last output of a request after its reply."""


class KeeperEnded(GroupError):
    """The keeper has ended, and its group with it."""


class KeeperLink:
    """A connection to the keeper `kept`, which this process has claimed as `holder`; raises GroupError.

    Output that belongs to no cell of this notebook is shown below the cell that creates this.
    """

    def __init__(self, kept: KeptGroup, holder: str) -> None:
        self.kept = kept
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._pages: dict[str, _Page] = {}
        """Where the output of each request is shown."""
        self._default = _Page()
        self._held: list[dict[str, Any]] | None = []
        """Output that has arrived before `show_records`; None from then on."""
        self._lock = threading.Lock()
        """Held while output is shown or held."""
        self._idle: dict[str, threading.Event] = {}
        self._closed = threading.Event()
        self._guard = Guard("output of the kept group could not be shown")
        self._thread = threading.Thread(target=self._receive_output, name="ddip-kept", daemon=True)
        self._claim = kept_folder.claim_keeper(kept, holder)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _open(self) -> None:
        try:
            info = json.loads(ownership.read_file(Path(self.kept.folder), CONNECTION))
        except (OSError, ValueError) as error:
            raise GroupError(f"--attach: the keeper of {self.kept.name} has ended ({error})") from None
        self.session, self._output_session = (
            Session(key=info["key"].encode(), signature_scheme=info["signature_scheme"]) for _ in range(2)
        )
        identity = self.session.bsession
        ports = {name: info[f"{name}_port"] for name in ("shell", "stdin", "control", "iopub")}
        self._shell, self._stdin, self._control = (
            self._connect(zmq.DEALER, info["ip"], ports[name], identity) for name in ("shell", "stdin", "control")
        )
        self._output = self._connect(zmq.SUB, info["ip"], ports["iopub"])
        self._thread.start()
        self._wait_for_output()

    def _wait_for_output(self) -> None:
        """Wait until output arrives: a subscription takes effect some time after the call."""
        heard, until = threading.Event(), time.monotonic() + REPLY_SECONDS
        while not heard.is_set():
            message = self.session.msg("kernel_info_request", {})
            self._idle[message["header"]["msg_id"]] = heard
            self.session.send(self._control, message)
            self._ensure_alive()
            if not heard.wait(0.1) and time.monotonic() > until:
                raise GroupError(f"the keeper of {self.kept.name} has not answered for {REPLY_SECONDS} s")
        self._idle.clear()

    def _connect(self, kind: int, ip: str, port: int, identity: bytes | None = None) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)
        socket.linger = 0
        if identity is None:
            socket.subscribe(b"")
            socket.rcvhwm = 0  # no message is dropped while this process is busy
        else:
            socket.identity = identity
        socket.connect(f"ipc://{ip}-{port}")
        return socket

    def close(self) -> None:
        """Disconnect, so that another kernel can attach."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()
        for socket in self._sockets:
            socket.close()
        self._context.term()
        kept_folder.release_keeper(self.kept, self._claim)

    def _receive(self, socket: zmq.Socket[bytes]) -> dict[str, Any]:
        _, message = self.session.recv(socket, mode=0)
        assert message is not None
        return message  # type: ignore[no-any-return]

    # -- requests

    def try_call(self, call: RemoteCall[dict[str, Any]], seconds: float) -> dict[str, Any] | None:
        """Call ``Group.try_call`` in the keeper, which does so even while it runs a cell."""
        encoded = str(base64.b64encode(pickle.dumps(call)), "ascii")
        return self.ask_keeper("try_call", encoded, seconds)  # type: ignore[no-any-return]

    def ask_keeper(self, method: str, *arguments: Any) -> Any:
        """Call a method of `keeper.Keeper`, even while the keeper runs a cell, and return its value."""
        request = self.session.msg("ddip_control_request", {"method": method, "arguments": arguments})
        self.session.send(self._control, request)
        until = time.monotonic() + REPLY_SECONDS
        while time.monotonic() < until:
            if not self._control.poll(POLL_MILLISECONDS):
                self._ensure_alive()
                continue
            reply = self._receive(self._control)
            if reply["parent_header"]["msg_id"] == request["header"]["msg_id"]:  # else an earlier one, too late
                return reply["content"]["value"]
        raise GroupError(f"the keeper of {self.kept.name} has not answered for {REPLY_SECONDS} s")

    def _ensure_alive(self) -> None:
        if not self.kept.is_alive:
            raise KeeperEnded(f"the keeper of {self.kept.name} has ended, and its group with it; %makedip starts one")

    def end_keeper(self) -> None:
        """End the keeper and its group; call `close` afterwards."""
        self.session.send(self._control, "ddip_control_request", {"method": "begin_end", "arguments": []})
        self.kept.wait_for_end(REPLY_SECONDS)

    def run_code(self, code: str, allow_stdin: bool, may_end_well: bool = False) -> dict[str, Any]:
        """Run `code` in the keeper as a cell until it ends, and return the content of the reply.

        The output appears below the running cell; an error is only in the reply. The stop button interrupts the keeper,
        and `code` raises an error then unless it `may_end_well`. Raises KeeperEnded and RequestInterrupted.
        """
        content = {
            "code": code,
            "silent": False,
            "store_history": True,
            "user_expressions": {},
            "allow_stdin": allow_stdin,
            "stop_on_error": False,
        }
        return self._request("execute_request", content, True, may_end_well)

    def call(self, function: str, *arguments: Any, is_interruptible: bool = False) -> Any:
        """Call a function of ``keeper.TASKS`` on the keeper's main thread, and return its value.

        Raises its error. The stop button interrupts it if it `is_interruptible`; else RequestInterrupted is raised when
        it has ended.
        """
        reply = self._request("ddip_task_request", _task_content(function, arguments), is_interruptible)
        if reply["status"] != "ok":
            raise error_of(reply)
        return json.loads(reply["value"])

    def post(self, function: str, *arguments: Any) -> None:
        """Send a call of a function of ``keeper.TASKS``, which runs before later requests; wait for nothing."""
        self._ensure_alive()
        self.session.send(self._shell, "ddip_task_request", _task_content(function, arguments))

    def _request(
        self, kind: str, content: dict[str, Any], is_interruptible: bool, may_end_well: bool = False
    ) -> dict[str, Any]:
        self._ensure_alive()
        message = self.session.msg(kind, content)
        request = message["header"]["msg_id"]
        self._idle[request] = threading.Event()
        self._pages[request] = _Page()
        for former in list(self._pages)[:-PAGES]:
            del self._pages[former]
        interrupts = _Interrupts(self.kept.pid if is_interruptible else None)
        try:
            with interrupts:
                self.session.send(self._shell, message)
                reply = self._wait_for_reply(request, interrupts)
                self._idle[request].wait(OUTPUT_SECONDS)
        finally:
            del self._idle[request]
            if kind != "execute_request":  # only cells have late output
                del self._pages[request]
        # the keeper ignores SIGINT between two requests
        if interrupts.is_pressed and reply["status"] == "ok" and not may_end_well:
            raise RequestInterrupted("stop was pressed; what was asked of the kept group had been done by then")
        return reply

    def announce_prompt(self) -> None:
        """Let the keeper know that this notebook is a terminal, whose output cannot be changed."""
        self.session.send(self._shell, "is_complete_request", {"code": ""})

    def _wait_for_reply(self, request: str, interrupts: _Interrupts) -> dict[str, Any]:
        poller = zmq.Poller()
        poller.register(self._shell, zmq.POLLIN)
        poller.register(self._stdin, zmq.POLLIN)
        ended = 0.0
        while True:
            ready = dict(poller.poll(POLL_MILLISECONDS))
            if self._stdin in ready:
                self._answer_question()
            if self._shell in ready:
                reply = self._receive(self._shell)
                if reply["parent_header"].get("msg_id") == request:
                    return dict(reply["content"])
            if ready:
                continue
            self._ensure_alive()
            if interrupts.is_pressed and self._idle[request].is_set():  # a stop outside of the cell, so no reply comes
                ended = ended or time.monotonic()
                if time.monotonic() - ended > NO_REPLY_SECONDS:
                    raise RequestInterrupted("the request to the kept group was stopped before it began")

    def _answer_question(self) -> None:
        """Ask the user what the keeper asks, and send the answer; none if the user presses stop."""
        message = self._receive(self._stdin)
        content = message["content"]
        area.flush_streams()
        try:
            with _Interrupts(self.kept.pid, is_raising=True):
                answer = (getpass.getpass if content.get("password") else input)(content["prompt"])
        except KeyboardInterrupt:
            return
        except EOFError:
            answer = "\x04"
        self.session.send(self._stdin, "input_reply", {"value": answer}, parent=message)

    # -- output

    def show_records(self, records: dict[str, dict[str, Any]]) -> None:
        """Show below the running cell what earlier cells have shown, and from now on what they show."""
        for record in records.values():
            if record["outputs"]:
                dropped = "; the beginning of its text was dropped" if record["is_dropped"] else ""
                self._default.show("stream", {"name": "stdout", "text": f"-- cell [{record['number']}]{dropped} --\n"})
            for output in record["outputs"]:
                self._default.show(output["kind"], output["content"])
        with self._lock:
            held, self._held = self._held or [], None
            for message in held:
                recorded = records.get(message["parent_header"].get("msg_id", ""))
                if recorded is None or cell_records.order_of(message) > recorded["last"]:  # else it was shown above
                    self._handle_output(message)

    def _receive_output(self) -> None:
        poller = zmq.Poller()
        poller.register(self._output, zmq.POLLIN)
        while not self._closed.is_set():
            if poller.poll(POLL_MILLISECONDS):
                with self._guard:
                    _, message = self._output_session.recv(self._output, mode=0)
                    assert message is not None
                    with self._lock:
                        if self._held is not None and message["header"]["msg_type"] != "status":
                            self._held.append(message)
                        else:
                            self._handle_output(message)

    def _handle_output(self, message: dict[str, Any]) -> None:
        kind, content = message["header"]["msg_type"], message["content"]
        request = message["parent_header"].get("msg_id", "")
        if kind == "status":
            if content["execution_state"] == "idle" and request in self._idle:
                self._idle[request].set()
        elif kind == "error" and request in self._idle:
            pass  # in the reply, too
        elif kind not in ("execute_input", "iopub_welcome"):
            self._pages.get(request, self._default).show(kind, content, message.get("buffers"), message["metadata"])


def _task_content(function: str, arguments: Sequence[Any]) -> dict[str, Any]:
    """Return the content of a task request; JSON within it may have infinite numbers."""
    return {"function": function, "arguments": json.dumps(arguments)}


class _Page:
    """The output area of the cell that is running when this is created, for messages of the keeper."""

    def __init__(self) -> None:
        self._shell = get_ipython()
        self._kernel = getattr(self._shell, "kernel", None)
        self._parent = area.current_request()

    def show(self, kind: str, content: dict[str, Any], buffers: Any = None, metadata: Any = None) -> None:
        """Send a message of the keeper to the page; a terminal prints its text."""
        if self._kernel is not None:
            self._kernel.session.send(
                self._kernel.iopub_socket, kind, content, parent=self._parent, buffers=buffers, metadata=metadata
            )
            return
        text = content.get("text") or content.get("data", {}).get("text/plain", "")
        if text and kind != "update_display_data":
            file = sys.stderr if content.get("name") == "stderr" else sys.stdout
            file.write(text if kind == "stream" else f"{text}\n")
            file.flush()


class _Interrupts:
    """Context in which SIGINT is passed on to the process `pid`, or only noted for None.

    With `is_raising`, it also raises KeyboardInterrupt.
    """

    def __init__(self, pid: int | None, is_raising: bool = False) -> None:
        self._pid, self._is_raising = pid, is_raising
        self._former: Any = None
        self.is_pressed = False
        """True once SIGINT has come."""

    def __enter__(self) -> None:
        if threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGINT, self._handle)

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._former)

    def _handle(self, number: int, frame: object) -> None:
        self.is_pressed = True
        if self._pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGINT)
        if self._is_raising:
            raise KeyboardInterrupt


def error_of(reply: dict[str, Any]) -> BaseException:
    """Return the error of a failed request as an exception with the same name, text and traceback."""
    name, text, lines = reply.get("ename", "Error"), reply.get("evalue", ""), list(reply.get("traceback", ()))
    known = errors.RequestInterrupted if name == "KeyboardInterrupt" else getattr(errors, name, None)
    base: type[BaseException] = known if isinstance(known, type) and issubclass(known, DdipError) else GroupError
    render: Callable[[object], list[str]] = lambda self: lines  # noqa: E731
    shown = {"__init__": lambda self, text: BaseException.__init__(self, text), "_render_traceback_": render}
    kind = type(name, (base,), {**shown, "__str__": lambda self: text, "__module__": base.__module__})
    return kind(text)  # type: ignore[no-any-return]
