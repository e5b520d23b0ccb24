"""A real notebook kernel, driven over its protocol as JupyterLab does."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
from jupyter_client.manager import KernelManager
from jupyter_client.session import new_id

Messages = list[tuple[str, dict[str, Any]]]
"""Type and content of each message."""
KERNEL_STARTS = 3
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """The output of one cell, and its error."""

    stdout: str = ""
    stderr: str = ""
    data: list[dict[str, Any]] = field(default_factory=list)
    """MIME bundles in order: displays, updates, and the result."""
    messages: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Type and content of all messages but states. Consecutive texts of a stream are joined."""
    number: int = 0
    """Execution count of the cell."""
    pages: list[dict[str, Any]] = field(default_factory=list)
    """Payloads for the pager, such as help."""
    status: str = ""
    error: str = ""
    """Class name of the exception."""
    message: str = ""
    traceback: str = ""

    def add(self, kind: str, content: dict[str, Any]) -> None:
        """Add one message."""
        before = self.messages[-1] if self.messages else ("", {})
        if kind == before[0] == "stream" and content["name"] == before[1]["name"]:
            content = {**content, "text": before[1]["text"] + content["text"]}
            self.messages.pop()
        self.messages.append((kind, content))

    @property
    def outputs(self) -> list[dict[str, Any]]:
        """Return the final content of each output other than a stream, in page order."""
        outputs: dict[object, dict[str, Any]] = {}
        for number, (kind, content) in enumerate(self.messages):
            if kind in ("display_data", "update_display_data"):
                name = content["transient"].get("display_id", number)
                assert (kind == "update_display_data") == (name in outputs), f"{kind} of {name}"
                outputs[name] = content["data"]
        return list(outputs.values())

    @property
    def text(self) -> str:
        """Return all text."""
        return self.stdout + self.stderr + "\n".join(bundle.get("text/plain", "") for bundle in self.data)


@dataclass
class Dialogue:
    """A cell that has asked the user."""

    shown: Shown
    prompts: list[str]
    """The prompts in order."""

    @property
    def text(self) -> str:
        """Return all text that was printed, without colours."""
        return ANSI.sub("", self.shown.stdout)


class Notebook:
    """Runs cells in a kernel and returns their output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # ipykernel does not capture the output of C code if this variable says that pytest runs
        environment = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._late_messages: list[Any] = []
        """Messages of cells that had already ended."""
        self._prompts: list[str] = []
        self._answers: list[str | None | Callable[[], object]] | None = None
        """Answers to the next prompts of the running cell; None: it has no stdin."""
        for attempt in range(KERNEL_STARTS):
            self.manager = KernelManager(kernel_name="python3")
            self.manager.start_kernel(cwd=str(folder), env=environment)
            try:
                self._connect()
                break
            except RuntimeError:  # another process has taken one of the ports that Jupyter had chosen
                if self.manager.is_alive() or attempt == KERNEL_STARTS - 1:
                    raise
                self.client.stop_channels()
                self.manager.cleanup_resources()

    def _connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)
        self.pid = int(self.run("import os; print(os.getpid())").stdout)

    def run(self, code: str, timeout: float = 240) -> Shown:
        """Run a cell to its end; again if the kernel has dropped it, as it may do just after an error."""
        while (shown := self.finish(self.begin(code), timeout)).status == "aborted":
            time.sleep(0.01)
        return shown

    def ok(self, code: str, timeout: float = 240) -> Shown:
        """Run a cell that must not fail."""
        shown = self.run(code, timeout)
        assert shown.status == "ok", f"{code}\n{shown.message}\n{shown.traceback}\n{shown.stderr}"
        return shown

    def fails(self, code: str, timeout: float = 240) -> Shown:
        """Run a cell that must fail, so that "Run All" would stop there."""
        shown = self.run(code, timeout)
        assert shown.status == "error", f"did not fail: {code}\n{shown}"
        return shown

    def converse(self, code: str, *answers: str | None | Callable[[], object], timeout: float = 120) -> Dialogue:
        """Run a cell that asks the user; give each prompt the next of `answers`.

        None ends the input, and a function is called instead of an answer. Prompts without an answer end the input.
        """
        self._prompts, self._answers = [], list(answers)
        message_id = self.begin(code, allow_stdin=True)
        try:
            return Dialogue(self.finish(message_id, timeout), self._prompts)
        except AssertionError as error:
            raise AssertionError(f"{error}; prompts: {self._prompts}") from None
        finally:
            self._answers = None

    def _answer_prompt(self, answers: list[str | None | Callable[[], object]]) -> None:
        """Answer a prompt with the first of `answers`, if the kernel asks."""
        try:
            request = self.client.get_stdin_msg(timeout=0.01)
        except Empty:
            return
        self._prompts.append(request["content"]["prompt"])
        answer = answers.pop(0) if answers else None
        if callable(answer):
            answer()
        else:
            self.client.input("\x04" if answer is None else answer)

    def begin(self, code: str, allow_stdin: bool = False, **options: Any) -> str:
        """Send a cell; return the ID to finish it with."""
        return str(self.client.execute(code, allow_stdin=allow_stdin, **options))

    def finish(self, message_id: str, timeout: float = 240, until: str | None = None) -> Shown:
        """Collect the output of a cell until it ends, or until it contains `until`."""
        shown = Shown()
        end = time.monotonic() + timeout
        while True:
            message = self._next(end, shown)
            if message["parent_header"].get("msg_id") != message_id:
                self._late_messages.append(message)
                continue
            content = message["content"]
            if message["msg_type"] not in ("status", "execute_input"):
                shown.add(message["msg_type"], content)
            match message["msg_type"]:
                case "stream":
                    setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
                case "display_data" | "update_display_data" | "execute_result":
                    shown.data.append(content["data"])
                case "error":
                    shown.error, shown.message = content["ename"], content["evalue"]
                    shown.traceback = ANSI.sub("", "\n".join(content["traceback"]))
                case "status" if content["execution_state"] == "idle":
                    break
            if until is not None and until in shown.text:
                return shown
        while True:
            reply = self.client.get_shell_msg(timeout=max(1, end - time.monotonic()))
            if reply["parent_header"].get("msg_id") == message_id:
                shown.status = reply["content"]["status"]
                shown.number = reply["content"].get("execution_count")  # ipykernel 6.17 gives an aborted cell none
                shown.pages = reply["content"].get("payload", [])
                return shown

    def late(self, message_id: str, until: str, timeout: float = 120) -> str:
        """Wait until a cell that has ended shows `until`; return the text that it has shown after its end."""
        return _text(self.late_messages(message_id, lambda messages: until in _text(messages), timeout))

    def late_messages(self, message_id: str, until: Callable[[Messages], bool], timeout: float = 120) -> Messages:
        """Wait until the messages of a cell that has ended satisfy `until`; return them."""
        messages: Messages = []
        end = time.monotonic() + timeout
        while not until(messages):
            message = self._late_messages.pop(0) if self._late_messages else self._next(end, Shown())
            if message["parent_header"].get("msg_id") == message_id:
                messages.append((message["msg_type"], message["content"]))
        return messages

    def ask(self, kind: str, code: str, cursor: int | None = None, **options: Any) -> dict[str, Any]:
        """Send a completion (`complete`) or help (`inspect`) request at the end of `code`."""
        request = getattr(self.client, kind)(code, len(code) if cursor is None else cursor, **options)
        while True:
            reply = self.client.get_shell_msg(timeout=120)
            if reply["parent_header"].get("msg_id") == request:
                return dict(reply["content"])

    def send_comm(self, name: str, data: dict[str, Any]) -> str:
        """Send a widget message as the page would; return its ID."""
        message = self.client.session.msg("comm_msg", {"comm_id": name, "data": data})
        self.client.shell_channel.send(message)
        return str(message["header"]["msg_id"])

    def request_states(self) -> str:
        """Request the states of all widgets, as a page with ipywidgets 8 does when it is opened; return the ID."""
        session, name = self.client.session, new_id()
        content = {"comm_id": name, "target_name": "jupyter.widget.control", "data": {}}
        self.client.shell_channel.send(session.msg("comm_open", content, metadata={"version": "1.0.0"}))
        return self.send_comm(name, {"method": "request_states"})

    def _next(self, end: float, shown: Shown) -> Any:
        while True:
            rest = max(0.1, end - time.monotonic())
            try:
                return self.client.get_iopub_msg(timeout=rest if self._answers is None else 0.05)
            except Empty:
                if self._answers is None or time.monotonic() > end:
                    raise AssertionError(f"the cell did not end in time; it showed {shown}") from None
            self._answer_prompt(self._answers)

    def interrupt(self) -> None:
        """Press the stop button."""
        self.manager.interrupt_kernel()

    def restart(self, now: bool = False) -> None:
        """Press the restart button."""
        self.client.stop_channels()
        self.manager.restart_kernel(now=now, newports=True)  # another process may have taken a former port
        self._connect()

    def kill(self) -> None:
        """Kill the kernel with SIGKILL."""
        self.manager.provisioner.process.kill()
        self.manager.provisioner.process.wait()

    def shut_down(self) -> None:
        """Close the notebook."""
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel()
        else:
            self.manager.cleanup_resources()

    def descriptors(self) -> int:
        """Return how many file descriptors the kernel has open."""
        return len(os.listdir(f"/proc/{self.pid}/fd"))

    def threads(self) -> int:
        """Return how many threads the kernel has."""
        return psutil.Process(self.pid).num_threads()


def _text(messages: Messages) -> str:
    return "".join(c.get("text") or c.get("data", {}).get("text/plain", "") for _, c in messages)
