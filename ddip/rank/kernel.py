"""The IPython kernel of a rank: ipyparallel's, with ddip's requests on the control channel and hooks around a cell.

The control channel is served by a thread of its own, so its answers come while a cell runs.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from ipykernel.zmqshell import ZMQInteractiveShell
from ipyparallel.engine import app
from ipyparallel.engine.kernel import IPythonParallelKernel
from IPython.core.error import StdinNotImplementedError
from traitlets import Type

from ddip.rank import call
from ddip.rank.housekeeping import cells
from ddip.rank.streams import RankDisplay, RankStream, threads_belong_to_their_cells

POLL_SECONDS = 0.005
AGAIN_SECONDS = 0.02
"""After which an interrupt is tried again that came where it would have been lost."""
NOBODY_TYPES = (
    "nobody can type into a rank; ask with input() in the notebook, %%dip local or a plain cell, and %dipush the answer"
)


class _NoShellThread:
    """Stands where ipykernel 7 keeps its shell thread, which an ipyparallel engine has none of.

    ipykernel asks it for its parent when a cell awaits, even so: with None there, such a cell never ends
    (ipykernel 7.4, ipyparallel 9.2).
    """

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


def _end_cell() -> NoReturn:
    """What ``exit`` and ``quit`` call: they end the cell, as ``sys.exit()`` does, and not the rank."""
    raise SystemExit


def _is_users(frame: FrameType | None) -> bool:
    """Does a cell's own code run in `frame`? IPython's hooks and Python's finalizers let no exception through."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return False
        if frame.f_code.co_name == "run_code":
            return True
        frame = frame.f_back
    return False


class _OfACell:
    """A stream that a cell has put in place of stdout or stderr, and which may fail at any time: its disk may be full.

    ipykernel flushes it after each request, and if that raised, the answer would be lost.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except Exception:
            if _is_users(sys._getframe()):
                raise


class RankShell(ZMQInteractiveShell):  # type: ignore[misc]
    """Knows when a cell raised: to tell it, with its frames, takes longer on one rank than on another."""

    display_pub_class = Type(RankDisplay)
    raised_at = 0.0
    """On ``time.time``."""

    def showtraceback(self, *args: Any, **kwargs: Any) -> None:
        self.raised_at = self.raised_at or time.time()
        super().showtraceback(*args, **kwargs)


RankShell.__name__ = ZMQInteractiveShell.__name__  # by which rich, fastprogress and others tell that this is a notebook


class RankKernel(IPythonParallelKernel):  # type: ignore[misc]
    """One per engine."""

    control_msg_types = [*IPythonParallelKernel.control_msg_types, "ddip_request", "ddip_interrupt", "signal_request"]
    _supports_kernel_subshells = False
    shell_class = Type(RankShell)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if getattr(self, "shell_channel_thread", None) is None:
            self.shell_channel_thread = _NoShellThread()
        self.shell.ask_exit = _end_cell
        threads_belong_to_their_cells()
        self._cell: str | None = None
        self._aimed_at: str | None = None
        gc.freeze()  # what was imported until here is never garbage: collections after cells skip it

    # An interrupt ends what a cell does, and only that: in ipykernel's own code, before the cell or after it, it would
    # tear away the answer, and the notebook would wait for ever.

    @cached_property
    def _streams(self) -> tuple[Any, Any]:
        """stdout and stderr before any cell could replace them: looked at when the first request comes."""
        return sys.stdout, sys.stderr

    def pre_handler_hook(self) -> None:
        """Before a request is handled."""
        assert isinstance(self._streams[0], RankStream)
        self._interruptible = False
        self._interrupted = False
        self._aimed_at = None  # the last cell may have ignored the signal that came with it
        self.saved_sigint_handler = signal.signal(signal.SIGINT, self._interrupt)

    def post_handler_hook(self) -> None:
        """After it; what comes next flushes the streams."""
        super().post_handler_hook()
        self._mend_streams()

    def _is_too_late(self) -> bool:
        """Was the signal that has come meant for a cell that has ended meanwhile?"""
        aimed_at, self._aimed_at = self._aimed_at, None
        return aimed_at not in (None, self._cell)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_too_late():
            return
        if not self._interruptible:
            self._interrupted = True  # one that comes too soon waits for the cell; one that comes too late is void
        elif self._cell is None or _is_users(frame):
            raise KeyboardInterrupt
        else:  # here it would be swallowed, and the cell go on
            control = self.control_thread.io_loop
            control.add_callback(control.call_later, AGAIN_SECONDS, self._aim, self._cell)

    @contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """In a cell that awaits: ipykernel's cancels it, which only works while it waits and not while it computes."""
        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)

            def interrupt(number: int, frame: FrameType | None) -> None:
                if self._is_too_late():
                    return
                if _is_users(frame):
                    raise KeyboardInterrupt
                cancel(number, frame)

            signal.signal(signal.SIGINT, interrupt)
            yield

    def _aim(self, cell: str) -> None:
        """Send an interrupt to `cell`, if it still runs."""
        if self._cell == cell:
            self._aimed_at = cell
            self._signal(signal.SIGINT)

    def _begin(self) -> None:
        """From here on an interrupt may come; raises KeyboardInterrupt if it has come, or has aborted this message."""
        self._interruptible = True
        if self._interrupted or self._message() in self.aborted:
            raise KeyboardInterrupt

    def _message(self) -> str:
        """Id of the request that is handled."""
        return str(self.get_parent("shell")["header"]["msg_id"])

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a cell; never fails. The reply says what became of the group, and what was raised, as text."""
        if not silent:
            asked = self.get_parent("shell")["content"].get("ddip", {})
            self._number_cell(asked.get("number"))
            header = self.get_parent("shell")["header"]
            for stream in self._streams:
                stream.begin_cell(header, asked.get("limit", sys.maxsize))
            cells.begin()
            call("current.begin", asked.get("name", ""), asked.get("ranks", []), asked.get("rich", True))
            call("process_group.begin_cell")
        self.shell.last_execution_result = None
        self.shell.raised_at = 0.0
        self._cell = self._message()
        try:
            try:
                self._begin()
                reply = await super().do_execute(code, silent, *args, **kwargs)
            finally:
                self._interruptible = False
                self.aborted.discard(self._cell)
                self._cell = None
        except (Exception, KeyboardInterrupt) as error:
            raised = self._raised()
            reply = self._error_reply("execute", error if raised is None else raised)
        if silent:
            return reply  # type: ignore[no-any-return]
        self._mend_streams()
        report = call("process_group.report").get("ok") or {"released": False, "state": "none"}
        report["at"] = self.shell.raised_at or time.time()
        raised = self._raised()
        if raised is not None:
            report["waited"] = call("process_group.waited_in", raised).get("ok", "")
        cells.end(raised)
        del raised
        report["seconds"] = cells.seconds
        for stream in self._streams:
            stream.end_cell(header)
        info = reply.get("engine_info") or self.get_engine_info(method="execute")
        return {**reply, "engine_info": {**info, "ddip": report}}

    def _number_cell(self, number: int | None) -> None:
        """Count cells as the notebook does: tracebacks and results then name the cell that the user sees."""
        if number is not None:
            self.shell.execution_count = number
            typed = self.shell.user_ns.get("In")
            if isinstance(typed, list):
                typed.extend([""] * (number - len(typed)))

    def _raised(self) -> BaseException | None:
        """What the cell raised."""
        result = self.shell.last_execution_result
        if result is None:
            return None
        before: BaseException | None = result.error_before_exec
        return before if before is not None else result.error_in_exec

    def _error_reply(self, method: str, error: BaseException) -> dict[str, Any]:
        """For an `error` that IPython has not made a reply of."""
        try:
            text = str(error)
        except Exception as why:
            text = f"(it has no text: its __str__ raised {type(why).__name__})"
        return {
            "status": "error",
            "ename": type(error).__name__,
            "evalue": text,
            "traceback": [],
            "execution_count": self.execution_count,
            "engine_info": self.get_engine_info(method=method),
        }

    def _mend_streams(self) -> None:
        """Put back a stream that a cell has broken: ipykernel flushes it before it sends the reply, and after that."""
        for name, ours in zip(("stdout", "stderr"), self._streams, strict=True):
            left = getattr(sys, name)
            if isinstance(left, _OfACell) or (left is ours and not vars(ours).keys() & {"write", "flush"}):
                continue  # as it was; to try it would cost a turn of the output thread
            try:
                left.write("")
                left.flush()
                if left is not ours:
                    setattr(sys, name, _OfACell(left))
            except Exception as error:
                for replaced in ("write", "flush"):
                    vars(ours).pop(replaced, None)
                setattr(sys, name, ours)
                what = f"the cell left a sys.{name} that cannot be written to ({type(error).__name__})"
                self._streams[1].write(f"ddip: {what}; the former one is back\n")

    def raw_input(self, prompt: str = "") -> str:
        """Refuse ``input()``, and what asks through it."""
        __tracebackhide__ = True  # IPython leaves out this frame
        raise StdinNotImplementedError(NOBODY_TYPES)

    def getpass(self, prompt: str = "", *args: Any, **kwargs: Any) -> str:
        """Refuse a password, too."""
        __tracebackhide__ = True
        raise StdinNotImplementedError(NOBODY_TYPES)

    def do_apply(self, content: Any, bufs: Any, msg_id: Any, reply_metadata: Any) -> tuple[dict[str, Any], list[Any]]:
        """Call a function; never fails."""
        try:
            try:
                self._begin()
                return super().do_apply(content, bufs, msg_id, reply_metadata)  # type: ignore[no-any-return]
            finally:
                self._interruptible = False
        except (Exception, KeyboardInterrupt) as error:
            return self._error_reply("apply", error), []

    def ddip_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Answer a ``ddip.rank.call`` from the control thread."""
        content = parent["content"]
        reply = {"status": "ok", **call(content["target"], *content["args"])}
        self.session.send(stream, "ddip_reply", reply, parent, ident=ident)

    def ddip_interrupt(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Interrupt one cell, by the id of its request, whether it runs or is still on its way; and no other."""
        self.session.send(stream, "ddip_reply", {"status": "ok"}, parent, ident=ident)
        cell = parent["content"]["cell"]
        self.aborted.add(cell)
        self._aim(cell)

    def signal_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Do what ipyparallel's nanny would do for ``Client.send_signal``."""
        number = parent["content"]["sig"]
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent, ident=ident)
        self._signal(getattr(signal, number) if isinstance(number, str) else number)

    def _signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        self.io_loop.add_callback(lambda: None)  # wakes a cell that awaits: ipykernel's handler alone does not


class RankEngine(app.IPEngine):  # type: ignore[misc]
    """ipyparallel's engine with a `RankKernel`."""

    out_stream_factory = Type(RankStream)

    def initialize(self, argv: list[str] | None = None) -> None:
        app.Kernel = RankKernel  # a private name: ipyparallel has no setting for the kernel's class
        super().initialize(argv)

    def find_connection_file(self) -> None:
        """Wait for the controller's file, and look more often than ipyparallel does."""
        super().find_connection_file()
        deadline = time.monotonic() + self.wait_for_url_file
        while not Path(self.url_file).exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def init_signal(self) -> None:
        """Let SIGTERM end what a cell forks, as it ends any process: ipyparallel's handler would only wake it up."""
        super().init_signal()
        masks: list[set[signal.Signals]] = []  # one for each fork under way

        def before() -> None:  # a SIGTERM for the child shall wait until it has no handler
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))  # type: ignore[arg-type]

        def in_parent() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

        def in_child() -> None:
            if signal.getsignal(signal.SIGTERM) == self._signal_stop:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            in_parent()

        os.register_at_fork(before=before, after_in_parent=in_parent, after_in_child=in_child)

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        """Tell the Hub when every socket is connected; ipyparallel's waits for a heartbeat."""
        await super().complete_registration(msg, connect, maybe_tunnel)
        self.session.send(self.registrar, "ready_request", content={"uuid": self.ident})
