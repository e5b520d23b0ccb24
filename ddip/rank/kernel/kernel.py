"""The IPython kernel of a rank: ipyparallel's, with ddip's requests on the control channel and hooks around a cell.

The control channel is served by a thread of its own, so its answers come while a cell runs.

`SilentKernel` sends little. ipykernel sends everybody that a request has begun, its code, and that it has ended: three
messages of five. That a cell has begun nobody asks; that nothing more follows is in the answer of a cell that has shown
nothing. Of one that has, the last message says so, since answer and output travel by different sockets.

`CellKernel` takes cells by ddip's message. ipykernel transforms a cell twice, looks at the signatures of IPython's
methods, and cleans the answer for JSON. That is for cells that await, and for kernels and clients of any kind; it takes
as long as all that IPython does.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from types import FrameType
from typing import Any, TypeAlias, cast

import zmq
from ipykernel.jsonutil import json_clean
from ipyparallel.engine.kernel import IPythonParallelKernel
from IPython.core.error import StdinNotImplementedError
from traitlets import Type

from ddip.protocol import cell_messages, compat_ipython
from ddip.protocol.cell_messages import Asked, CellReply, CellRequest
from ddip.protocol.text import packing
from ddip.rank.inspection.state_history import history, paused
from ddip.rank.kernel import answers, app_hooks, refusals
from ddip.rank.kernel.cell_report import begin_cell, of_the_cell
from ddip.rank.kernel.shell import RankShell
from ddip.rank.objects import live_objects
from ddip.rank.process_group import membership
from ddip.rank.profiling import profiling
from ddip.rank.runtime import libraries, tracebacks
from ddip.rank.runtime.aside import Aside
from ddip.rank.runtime.gpu import gpu
from ddip.rank.runtime.housekeeping import cells
from ddip.rank.runtime.stacks import is_users, never_interrupted
from ddip.rank.streams import cell_log
from ddip.rank.streams.mending import mend
from ddip.rank.streams.streams import RankStream, threads_belong_to_their_cells


class SilentKernel(IPythonParallelKernel):  # type: ignore[misc]
    """For requests of ddip's; whatever else ipyparallel's clients send is handled as ever."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sent = self._sent_before = 0
        """Messages that went to everybody, now and before the cell."""
        self._silent = ""
        """Id of the last cell that has shown nothing."""
        thread = self.iopub_socket
        self._send_to_all, thread.send_multipart = thread.send_multipart, self._count

    def _count(self, *args: Any, **kwargs: Any) -> None:
        self._sent += 1
        if RankStream.flushing and threading.current_thread() is self.iopub_socket.thread:
            self.iopub_socket.socket.send_multipart(*args, **kwargs)  # ipykernel would have it wait for the next turn
        else:
            self._send_to_all(*args, **kwargs)

    def listen(self) -> None:
        """A cell begins."""
        self._sent_before = self._sent

    def speak(self) -> None:
        """The answer will not say that nothing was shown: the last message must."""
        self._silent = ""

    def was_silent(self, msg_id: str) -> bool:
        """Has the cell with this id, which ends now, shown nothing?"""
        silent = self._sent == self._sent_before and RankStream.is_quiet()
        self._silent = msg_id if silent else ""
        return silent

    def _publish_status(self, status: str, channel: str, parent: dict[str, Any] | None = None) -> None:
        request = parent or self.get_parent(channel)
        unasked = _is_cell(request) and (status == "busy" or request["header"]["msg_id"] == self._silent)
        if not unasked and not _is_call(request):
            super()._publish_status(status, channel, parent)


def _kind(request: dict[str, Any]) -> str:
    return str(request.get("header", {}).get("msg_type", ""))


def _is_cell(request: dict[str, Any]) -> bool:
    return _kind(request) == cell_messages.REQUEST


def _is_call(request: dict[str, Any]) -> bool:
    """Only its answer is of use."""
    return "doing" in request.get("metadata", {}) or _kind(request) in ("ddip_request", "ddip_interrupt")


class _NoShellThread:
    """Stands where ipykernel 7 keeps its shell thread, which an ipyparallel engine has none of.

    ipykernel asks it for its parent when a cell awaits, even so: with None there, such a cell never ends
    (ipykernel 7.4, ipyparallel 9.2).
    """

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


class CellKernel(SilentKernel):
    """Takes such a cell; what runs it is the subclass's."""

    msg_types = [*SilentKernel.msg_types, cell_messages.REQUEST]

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if getattr(self, "shell_channel_thread", None) is None:
            self.shell_channel_thread = _NoShellThread()
        self._transformers = self._transformers_now()

    def _transformers_now(self) -> list[Any]:
        """What may make anything of the text of a cell."""
        return [*self.shell.input_transformers_cleanup, *self.shell.input_transformers_post]

    async def ddip_cell_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run the cell, and answer."""
        reply = await self.run_cell(parent["content"])
        message = self.session.msg(cell_messages.REPLY, reply, parent)
        stream.socket.send_multipart(self.session.serialize(message, ident))  # a ROUTER's does not block
        stream.flush(zmq.POLLIN)

    async def run_cell(self, request: CellRequest) -> CellReply:
        """Run the cell; never fails."""
        raise NotImplementedError

    async def have_run(self, code: str, silent: bool, history: bool) -> dict[str, Any]:
        """Have IPython run it: without an event loop, if it cannot await; returns the beginning of a `CellReply`."""
        is_slow = not compat_ipython.RANK_KERNEL.is_on(compat_ipython.QUICK)
        if is_slow or "await" in code or "async" in code or self._transformers != self._transformers_now():
            reply: dict[str, Any] = await super().do_execute(code, silent, history, {}, False)
            return reply
        self._forward_input()
        try:
            result = self.shell.run_cell(code, store_history=history, silent=silent)
        finally:
            self._restore_input()
        payload = self.shell.payload_manager.read_payload()
        self.shell.payload_manager.clear_payload()
        if result.success and not getattr(self.shell, "_last_traceback_during_displayhook", False):
            return {"status": "ok", "payload": json_clean(payload)}
        error = result.error_in_exec if result.error_before_exec is None else result.error_before_exec
        traceback = getattr(self.shell, "_last_traceback", None) or []
        return {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": traceback}


Run: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]
NOBODY_TYPES = (
    "stdin is not available on ranks; ask with input() in the notebook, %%dip local or a plain cell, and %dipush the "
    "answer"
)


tracebacks.HIDDEN.add(__name__)


class RankKernel(CellKernel):
    """Serves the requests of the notebook to one rank."""

    control_msg_types = [*CellKernel.control_msg_types, "ddip_request", "ddip_interrupt", "signal_request"]
    _supports_kernel_subshells = False
    shell_class = Type(RankShell)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.session.pack = packing(self.session.pack)
        self._aside: Aside | None = None
        threads_belong_to_their_cells()
        self._cell: str | None = None
        self._aimed_at: str | None = None
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._interrupt_again
        live_objects.freeze()  # what was imported until here is never garbage

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
        self._patience = libraries.Patience()
        self._aimed_at = None  # the last cell may have ignored the signal that came with it
        self.saved_sigint_handler = signal.signal(signal.SIGINT, self._interrupt)

    def post_handler_hook(self) -> None:
        """After it; what comes next flushes the streams."""
        super().post_handler_hook()
        self.mend_streams()

    def _is_too_late(self) -> bool:
        """Was the signal that has come meant for a cell that has ended meanwhile?"""
        aimed_at, self._aimed_at = self._aimed_at, None
        return aimed_at not in (None, self._cell)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_too_late():
            return
        if not self._interruptible:
            self._interrupted = True  # one that comes too soon waits for the cell; one that comes too late is void
        elif self._cell is None:
            raise KeyboardInterrupt
        elif not is_users(frame):  # it would be swallowed, or do harm
            self._aim_again()
        else:
            self._raise_or_wait(frame)

    def _raise_or_wait(self, frame: FrameType | None) -> None:
        """Interrupt the cell's own code at `frame`; a moment later, if that would leave something half done."""
        wait = self._patience.wait(frame)
        if wait is None:
            raise libraries.interrupt(frame)
        self._aim_again(wait)

    def _aim_again(self, seconds: float = libraries.AGAIN_SECONDS) -> None:
        """Interrupt the cell once more, a moment later."""
        control = self.control_thread.io_loop
        control.add_callback(control.call_later, seconds, self._aim, self._cell)

    @never_interrupted
    def _interrupt_again(self, unraisable: Any) -> None:
        """Python's hook for what no code can catch: a callback of ``os.fork`` has swallowed an interrupt."""
        if unraisable.exc_type is KeyboardInterrupt and self._cell is not None:
            self._aim_again()
        elif unraisable.exc_type is not KeyboardInterrupt or cells.tidying_since is None:
            self._unraisable(unraisable)

    @contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """In a cell that awaits: ipykernel's cancels it, which only works while it waits and not while it computes."""
        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)

            def interrupt(number: int, frame: FrameType | None) -> None:
                if self._is_too_late():
                    return
                if not is_users(frame):
                    cancel(number, frame)
                else:
                    self._raise_or_wait(frame)

            signal.signal(signal.SIGINT, interrupt)
            yield

    def _aim(self, cell: str | None) -> None:
        """Send an interrupt to `cell`, if it still runs."""
        if cell is not None and self._cell == cell:
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
        """Run a cell of another client than ddip's; never fails."""
        reply = await self._answer(silent, {}, partial(super().do_execute, code, silent, *args, **kwargs))
        return dict(reply)

    async def run_cell(self, request: CellRequest) -> CellReply:
        """Run a cell; never fails. The reply says what became of the group, and what was raised, as text."""
        run = partial(self.have_run, request["code"], request["silent"], request["history"])
        return await self._answer(request["silent"], request["asked"], run)

    async def _answer(self, silent: bool, asked: Asked, run: Run) -> CellReply:
        try:
            header = None if silent else self._begin_output(asked)
            self.shell.begin_cell()
            self._aside = self._aside or Aside(self.parent.end, self._say)
            try:
                reply = await self._run(silent, run)
            except GeneratorExit:  # the loop is no more
                raise
            except BaseException as error:  # the cell's, and its answer
                raised = self.shell.raised
                reply = self._error_reply("execute", error if raised is None else raised)
            return cast(CellReply, reply) if header is None else self._with_report(reply, header)
        except Exception as error:  # ddip's own steps: memory or descriptors may have run out; an answer must leave
            if cells.busy:
                cells.end(error)
            reply = self._error_reply("execute", error)
            return cast(CellReply, {**reply, "silent": True})  # nobody waits for more

    def _begin_output(self, asked: Asked) -> dict[str, Any]:
        """What is written and begun from here on is the cell's that has come; returns the header of its request."""
        header: dict[str, Any] = self.get_parent("shell")["header"]
        self.listen()
        self._number_cell(asked.get("number"))
        if "log" in asked:
            cell_log.begin(header["msg_id"], asked["log"], membership.standing["rank"])
        for stream in self._streams:
            stream.begin_cell(header, asked.get("limit", sys.maxsize))
        is_shared = len(asked.get("ranks", ())) == membership.standing.get("world_size")
        history.begin_cell(asked.get("name", ""), is_shared)
        cells.begin()
        profiling.ask(asked.get("profile", ""))
        begin_cell(asked)
        return header

    async def _run(self, silent: bool, run: Run) -> dict[str, Any]:
        """Run the code, and only that, where an interrupt may come; its alarms and handlers live as long."""
        assert self._aside is not None
        self._cell = self._message()
        try:
            self._aside.give_back()
            self._begin()
            if app_hooks.before is not None and not silent:
                app_hooks.call_hook(app_hooks.before)
            profiling.begin()
            reply = await run()
            if app_hooks.after is not None and not silent:
                app_hooks.call_hook(app_hooks.after, self.shell.raised)
            if reply["status"] == "ok":
                self._finish_on_gpu()
            if reply["status"] == "error" and self.shell.raised is None:  # what the cell ends with cannot be shown
                told = self.shell.told_of(None)
                reply.update({} if told is None else {"ename": told.name, "evalue": told.message})
            return reply
        finally:
            self._interruptible = False
            signal.signal(signal.SIGINT, self._interrupt)  # the cell may have set its own
            profiling.end()
            self._aside.put()
            self.aborted.discard(self._cell)
            self._cell = None
            self._patience.forget()

    def _finish_on_gpu(self) -> None:
        """The code of the cell has ended; the cell ends when the GPU has done its work, and can fail until then."""
        try:
            gpu.finish()
        except BaseException as error:
            self.shell.raised, self.shell.raised_at = error, time.time()
            raise

    def _with_report(self, reply: dict[str, Any], header: dict[str, Any]) -> CellReply:
        """The cell of `header` has ended: `reply`, and in it what has become of this rank and its group."""
        self.mend_streams()
        report, raised = of_the_cell(self.shell), self.shell.raised
        if cell_log.has(header["msg_id"]):
            for stream in self._streams:
                stream.flush_all()
            told = None if raised is None else self.shell.told_of(raised)
            self._streams[1].write(cell_log.end(header["msg_id"], [] if told is None else told.traceback))
        cells.end(raised)
        history.end_cell(raised is None and self.shell.caught is None)
        if raised is None:
            self.shell.begin_cell()
        del raised
        report["seconds"] = cells.seconds or 0.0
        if not RankStream.is_quiet() or any(stream.has_rest(header) for stream in self._streams):
            for stream in self._streams:
                stream.end_cell(header)
            for stream in self._streams:
                stream.flush_all()  # what is kept back where nobody looks is silence, too
        return cast(CellReply, {**reply, "report": report, "silent": self.was_silent(header["msg_id"])})

    def _say(self, text: str) -> None:
        """Tell the user, as output of the cell that ended last; may be called by a handler of a signal."""
        self.io_loop.add_callback_from_signal(lambda: self._streams[1].write(f"ddip: {text}\n"))

    def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """The controller ends this engine."""
        self.parent.is_over = True
        return super().do_shutdown(restart)  # type: ignore[no-any-return]

    def _number_cell(self, number: int | None) -> None:
        """Count cells as the notebook does: tracebacks and results then name the cell that the user sees."""
        if number is not None:
            self.shell.execution_count = number
            typed = self.shell.user_ns.get("In")
            if isinstance(typed, list):
                typed.extend([""] * (number - len(typed)))

    def _error_reply(self, method: str, error: BaseException) -> dict[str, Any]:
        """For an `error` that IPython has not made a reply of."""
        self.speak()
        told = self.shell.told_of(error) or tracebacks.tell(error, None)
        return {
            "status": "error",
            "ename": told.name,
            "evalue": told.message,
            "traceback": told.traceback,
            "execution_count": self.execution_count,
            "engine_info": self.get_engine_info(method=method),
        }

    def mend_streams(self) -> None:
        """Put back a stream that a cell has broken: ipykernel flushes it before it sends the reply, and after that."""
        mend(*self._streams)

    def raw_input(self, prompt: str = "") -> str:
        """Refuse ``input()``, and what asks through it."""
        __tracebackhide__ = True  # IPython leaves out this frame
        raise StdinNotImplementedError(refusals.NO_DEBUGGER if refusals.is_debugger(prompt) else NOBODY_TYPES)

    def getpass(self, prompt: str = "", *args: Any, **kwargs: Any) -> str:
        """Refuse a password, too."""
        __tracebackhide__ = True
        raise StdinNotImplementedError(NOBODY_TYPES)

    def do_apply(self, content: Any, bufs: Any, msg_id: Any, reply_metadata: Any) -> tuple[dict[str, Any], list[Any]]:
        """Call a function; never fails. What ddip has sent is interrupted as a cell is, in what it calls only."""
        doing = self.get_parent("shell")["metadata"].get("doing")
        if doing is not None:
            self._cell = self._message()
            cells.begin_request(doing)
        try:
            try:
                self._begin()
                with paused():
                    return super().do_apply(content, bufs, msg_id, reply_metadata)  # type: ignore[no-any-return]
            finally:
                self._interruptible = False
                self.aborted.discard(msg_id)
                self._cell = None
                self._patience.forget()
                cells.end_request()
        except BaseException as error:  # the request's, and its answer
            return self._error_reply("apply", error), []

    def ddip_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Answer a ``call`` (``protocol/remote.py``) beside the cell."""
        send = partial(self.session.send, stream, "ddip_reply", parent=parent, ident=ident)
        answers.answer(parent["content"], self.control_thread.io_loop, send)

    def ddip_interrupt(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Interrupt one cell or call, by the id of its request, also when it is still on its way; and no other.

        None: the one that runs, if one does.
        """
        cell = parent["content"]["cell"]
        if cell is None:
            cell = self._cell  # before the answer: whoever waits for that may send a cell then
        else:
            self.aborted.add(cell)
        if cell != self._cell:
            cells.interrupt_tidying()
        self.session.send(stream, "ddip_reply", {"status": "ok"}, parent, ident=ident)
        self._aim(cell)

    def interrupt_what_runs(self) -> None:
        """Interrupt the cell that runs, if one does. Call this first, and then end what the main thread waits for: it
        takes the signal before anything else, and Python looks for signals when a call returns."""
        self._aim(self._cell)

    def signal_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Do what ipyparallel's nanny would do for ``Client.send_signal``."""
        number = parent["content"]["sig"]
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent, ident=ident)
        self._signal(getattr(signal, number) if isinstance(number, str) else number)

    def _signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        self.io_loop.add_callback(lambda: None)  # wakes a cell that awaits: ipykernel's handler alone does not
