"""Run the cells and requests of a rank, and interrupt their code when the user presses stop.

This is how an interrupt gets from the stop button to the code of a cell on one rank, and back to the notebook:

    notebook's kernel                                      rank, one process
    ---------------------------------------------------    ------------------------------------------------------------
    SIGINT -> StopPressed, into the cell's queue           control thread                main thread
                  |                                          |                             | runs the cell
    RunningCell.follow -> CellState.step                     |                             |
        INTERRUPT  ---- "ddip_interrupt", request id ----> ddip_interrupt                  |
                  |                                          +---- os.kill(SIGINT) ------> _interrupt
                  |                                          |                             | KeyboardInterrupt,
                  | after 0.5 s, or a second press           |                             | now or at a later try
        ABORT  -------- "ddip_request", release ---------> membership.release_group        |
                                                             +-- cuts sockets, or          |
                                                             |   aborts nccl ------------> | a collective ends
                                                             +-- thread ddip-release ----> | a lost wait ends
                                                                                           |
    RankReplied -> CellInterrupted <--- reply with error and report, shell channel ------- _end_cell

1. The press. During a foreground cell, SIGINT only puts an event into the cell's queue (``stopping.call_on_press``, set
   by ``Cells.admit``): a KeyboardInterrupt could be raised between any two instructions of ddip, which would then lose
   the cell. The thread that follows the cell takes the event; ``CellState.step`` decides, and ``RunningCell`` acts. A
   background cell has its own thread, and ``%dipstop`` puts the same event into its queue. ``--timeout`` has the same
   effect, and ``Ranks.ask_each`` interrupts ddip's own requests, such as a push, in the same way.

2. The message. The main thread serves the shell channel and is busy with the cell, so the interrupt uses the control
   channel, which has its own thread. `ddip_interrupt` adds the request id to `aborted`, which stops a cell that has
   not begun: ipyparallel refuses a request that arrives later, and `_allow_interrupts` one that is being prepared. If
   the cell runs, it sends SIGINT to its own process. A cell may end at the same moment, so `_interrupt_target` stores
   the cell that the signal is for, and `_missed_its_cell` drops a signal whose cell has ended.

3. The signal. Python handles it on the main thread, between two instructions, and a system call such as a sleep ends
   early. A call that begins just as the signal arrives does not: Python has looked for signals before, and the call
   has not begun. Therefore `_resend_interrupt` sends the signal again until Python has handled it. An asynchronous
   exception (``thread_exceptions.py``) does not end system calls; it is used only for helper threads, in which Python
   handles no signals. The effect of the signal depends on the state of the main thread:

       no request             ipyparallel's handler ignores it
       a cleanup that hangs   it ends the finalizer, sent when a cell that waits for it is stopped (``Cells.tidy``)
       around a cell's code   `_interrupt` keeps it until the code begins, or drops it if the code has ended
       a cell's code          `_interrupt` raises KeyboardInterrupt, except in code to which it would do damage:
                                  a finalizer or a hook of IPython would swallow it    ``stacks.may_interrupt``
                                  half an import leaves a broken library behind        ``libraries.InterruptDelay``
                                  ``with`` would leave a lock or a setting behind      ``libraries.InterruptDelay``
                              There, `_retry_interrupt` tries again; the last two delay it for a limited time. It also
                              tries again when a callback of ``os.fork`` has swallowed it.
       a cell that awaits     `_cancel_on_sigint` cancels it while it waits, and raises while it computes

4. The collectives. A main thread that waits in gloo is in C++, where no handler can run. For ABORT,
   ``ProcessGroupManager.release`` makes a file store unreadable and calls ``membership.release_group`` on the control
   thread of each rank. On the CPU, that shuts down the connections between the ranks, and gloo raises. On a GPU, it
   aborts nccl, after which nothing raises; so if work is under way, it interrupts the cell first. Two kinds of waits
   remain, and the thread ``ddip-release`` ends them (``membership.py``). One is gloo's wait for the rest of a
   message. It ends as if the rest had arrived, so the cell is interrupted before. When the wait has ended, Python
   handles the signal of step 3. If another rank has failed and no one has pressed stop, ABORT comes alone: gloo's error
   ends the cell, and the report says where the rank had waited (``membership.waited_in``).

5. The way back. The exception ends the cell's code, and ``RankShell.showtraceback`` formats it. `_run_interruptibly`
   turns interrupts off, and `_end_cell` returns the reply with a report (``cell_report.py``). The cell is over once
   all ranks have replied and their output has ended. A rank that has not replied 2.2 s after the interrupt, and makes
   no progress towards its end (``members/watch.py``), is abandoned: the cell ends without it.

Invariants:

- Each request gets a reply, as long as the process lives: no interrupt ends code of ipykernel or ddip around a cell.
- An interrupt ends the cell that it was sent for, and no other.
- The control thread waits neither for the main thread nor for other ranks. Steps that may take long have threads:
  ``ddip-release``, which runs under a `Guard` that reports its exceptions, ``ddip-abort``, and
  ``ddip-beside``.
- After a release, the process group is rebuilt before the next cell begins (``ddip/group/repair.py``).

``DDIP_NATIVE=0`` turns off the mechanisms of ``rank/native``; steps 1 to 3 and the abort of nccl do not need them.
Without ``DDIP_NATIVE_SOCKETS``, a rank that waits in gloo is abandoned, and ``%makedip --repair`` replaces it. Without
``DDIP_NATIVE_GLOO_WAITS``, this happens only to a rank that waits for the rest of a message.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeAlias, cast

import zmq
from ipykernel.jsonutil import json_clean
from ipyparallel.engine.kernel import IPythonParallelKernel
from traitlets import Type

from ddip.protocol import cell_messages, compat_ipython
from ddip.protocol.cell_messages import AskedQuestion, CellOptions, CellReply, CellRequest
from ddip.protocol.remote import call_target, without_bytes
from ddip.protocol.text import accept_surrogates
from ddip.rank.debugging import ide_service, rank_debugger
from ddip.rank.debugging.questions import asker
from ddip.rank.inspection.state_history import history, pause_recording
from ddip.rank.kernel import app_hooks
from ddip.rank.kernel.cell_report import begin_cell, build_report
from ddip.rank.kernel.shell import RankShell
from ddip.rank.objects import live_objects
from ddip.rank.process_group import membership
from ddip.rank.profiling import profiling
from ddip.rank.runtime import libraries, tracebacks
from ddip.rank.runtime.aside import InterpreterSettings
from ddip.rank.runtime.gpu import gpu
from ddip.rank.runtime.housekeeping import cells
from ddip.rank.runtime.stacks import may_interrupt, never_interrupted, runs_around_cells
from ddip.rank.streams import cell_log
from ddip.rank.streams.mending import restore_streams
from ddip.rank.streams.streams import RankStream, tag_threads_with_cells

RESEND_SECONDS = (0.05, 0.2, 0.8)
"""Pauses before SIGINT is sent again to a main thread that has not handled it."""


END_QUESTIONS_SECONDS = 0.1
"""Time from an interrupt until questions that are still open are answered with EOFError."""


def _is_own_handler() -> bool:
    """Return whether a handler of this module handles SIGINT, and not one of the cell's own."""
    return getattr(signal.getsignal(signal.SIGINT), "__module__", "") == __name__


class _NoShellThread:
    """A stand-in for the shell thread of ipykernel 7, which an ipyparallel engine does not have.

    ipykernel reads its parent thread when a cell awaits. If the attribute were None, such a cell would never end
    (ipykernel 7.4, ipyparallel 9.2).
    """

    parent_thread = threading.main_thread()

    def __bool__(self) -> bool:
        return False


Run: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]


tracebacks.HIDDEN.add(__name__)


class RankKernel(IPythonParallelKernel):  # type: ignore[misc]
    """The kernel that serves the notebook's requests to one rank.

    The module's docstring describes its interrupts. Two features make its cells faster:

    - It has ddip's own message for cells. For an ``execute_request``, ipykernel transforms the cell twice, inspects the
      signatures of IPython's methods and cleans the reply for JSON, to support cells that await and kernels and clients
      of any kind. That takes as long as all of IPython's work on the cell.
    - It publishes fewer status messages. ipykernel publishes for each request that it is busy, the code, and that it is
      idle. ddip does not need the first two. The idle message is needed only after a cell that produced output, since
      reply and output travel on different sockets; the reply of any other cell says that it was silent.
    """

    msg_types = [*IPythonParallelKernel.msg_types, cell_messages.REQUEST]
    control_msg_types = [*IPythonParallelKernel.control_msg_types, "ddip_request", "ddip_interrupt", "signal_request"]
    _supports_kernel_subshells = False
    shell_class = Type(RankShell)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._sent = self._sent_before_cell = 0
        """Numbers of messages published on IOPub: in all, and before the cell began."""
        self._silent_cell = ""
        """Request id of the last cell if it produced no output; otherwise empty."""
        self._send_to_clients, self.iopub_socket.send_multipart = self.iopub_socket.send_multipart, self._send_counted
        if getattr(self, "shell_channel_thread", None) is None:
            self.shell_channel_thread = _NoShellThread()
        self._initial_transformers = self._current_transformers()
        self.session.pack = accept_surrogates(self.session.pack)
        self._aside: InterpreterSettings | None = None
        tag_threads_with_cells()
        self._cell: str | None = None
        self._interrupt_target: str | None = None
        self._interruptible = self._interrupted = False
        self._patience = libraries.InterruptDelay()
        self._streams: tuple[RankStream, ...] = ()
        """stdout and stderr before any cell could replace them; empty while startup files run."""
        self._unraisable, sys.unraisablehook = sys.unraisablehook, self._retry_swallowed_interrupt
        live_objects.freeze_existing()  # objects of the imports so far are never garbage

    # -- messages

    def _send_counted(self, *args: Any, **kwargs: Any) -> None:
        self._sent += 1
        if RankStream.flushing and threading.current_thread() is self.iopub_socket.thread:
            self.iopub_socket.socket.send_multipart(*args, **kwargs)  # ipykernel would delay it to the next loop turn
        else:
            self._send_to_clients(*args, **kwargs)

    def was_silent(self, msg_id: str) -> bool:
        """Return whether the cell that ends now, whose request id is `msg_id`, produced no output.

        If so, its idle message is not published.
        """
        silent = self._sent == self._sent_before_cell and RankStream.is_quiet()
        self._silent_cell = msg_id if silent else ""
        return silent

    def _publish_status(self, status: str, channel: str, parent: dict[str, Any] | None = None) -> None:
        request = parent or self.get_parent(channel)
        kind = str(request.get("header", {}).get("msg_type", ""))
        is_silent = kind == cell_messages.REQUEST and (
            status == "busy" or request["header"]["msg_id"] == self._silent_cell
        )
        needs_reply_only = "doing" in request.get("metadata", {}) or kind in ("ddip_request", "ddip_interrupt")
        if not is_silent and not needs_reply_only:
            super()._publish_status(status, channel, parent)

    def _current_transformers(self) -> list[Any]:
        """Return the input transformers, which may turn the text of a cell into any code."""
        return [*self.shell.input_transformers_cleanup, *self.shell.input_transformers_post]

    async def ddip_cell_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run the requested cell and send its reply."""
        reply = await self.run_cell(parent["content"])
        message = self.session.msg(cell_messages.REPLY, reply, parent)
        stream.socket.send_multipart(self.session.serialize(message, ident))  # never blocks on a ROUTER socket
        stream.flush(zmq.POLLIN)

    async def run_in_shell(self, code: str, silent: bool, history: bool) -> dict[str, Any]:
        """Run `code` in IPython, without the event loop if possible, and return the start of a `CellReply`.

        Code that contains "await" or "async" or meets a new input transformer goes through ipykernel.
        """
        is_slow = not compat_ipython.RANK_KERNEL.is_on(compat_ipython.QUICK)
        if is_slow or "await" in code or "async" in code or self._initial_transformers != self._current_transformers():
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

    # -- interrupts

    # One must end only the code of a cell. In ipykernel's own code, before or after the cell, it would lose the reply,
    # and the notebook would wait indefinitely.

    def keep_streams(self, stdout: RankStream, stderr: RankStream) -> None:
        """Use these streams of ``sys.stdout`` and ``sys.stderr`` for the output of cells from now on."""
        self._streams = stdout, stderr

    def pre_handler_hook(self) -> None:
        """Hold back interrupts while a request is being prepared."""
        self._interruptible = False
        self._interrupted = False
        self._patience = libraries.InterruptDelay()
        self._interrupt_target = None  # the last cell may have ignored the signal that was sent for it
        self.saved_sigint_handler = signal.signal(signal.SIGINT, self._interrupt)

    def post_handler_hook(self) -> None:
        """Restore broken streams after a request, since ipykernel flushes them next."""
        super().post_handler_hook()
        self.restore_streams()

    def _missed_its_cell(self) -> bool:
        """Return whether the SIGINT being handled was meant for a cell that has ended in the meantime."""
        target, self._interrupt_target = self._interrupt_target, None
        return target not in (None, self._cell)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._missed_its_cell():
            return
        if not self._interruptible:
            self._interrupted = True  # applied when the cell begins; dropped if the cell has already ended
        elif self._cell is None:
            raise KeyboardInterrupt
        elif not may_interrupt(frame):  # it would be swallowed, or cut off a step that must be complete
            self._retry_interrupt()
        else:
            self._raise_or_wait(frame)

    def _raise_or_wait(self, frame: FrameType | None) -> None:
        """Raise an interrupt at `frame`, or schedule another try if that could corrupt state now; does not wait."""
        wait = self._patience.delay_at(frame)
        if wait is None:
            raise libraries.make_interrupt(frame)
        self._retry_interrupt(wait)

    def _retry_interrupt(self, seconds: float = libraries.AGAIN_SECONDS) -> None:
        """Interrupt the running cell again after `seconds`."""
        self._call_on_control_thread(seconds, self._interrupt_cell, self._cell)

    def _call_on_control_thread(self, seconds: float, function: Callable[..., None], *args: Any) -> None:
        """Call `function` on the control thread after `seconds`; safe on any thread and in a signal handler."""
        control = self.control_thread.io_loop
        control.add_callback(control.call_later, seconds, function, *args)

    @never_interrupted
    def _retry_swallowed_interrupt(self, unraisable: Any) -> None:
        """Retry an interrupt that an ``os.fork`` callback or the like swallowed (``sys.unraisablehook``)."""
        if unraisable.exc_type is KeyboardInterrupt and self._cell is not None:
            self._retry_interrupt()
        elif unraisable.exc_type is not KeyboardInterrupt or cells.tidying_since is None:
            self._unraisable(unraisable)

    @contextmanager
    def _cancel_on_sigint(self, future: Any) -> Iterator[None]:
        """Handle SIGINT in a cell that awaits: cancel it while it waits, raise in its code while it computes.

        The method of ipykernel only cancels, which has no effect while the cell computes.
        """
        with super()._cancel_on_sigint(future):
            cancel: Any = signal.getsignal(signal.SIGINT)

            def handle_sigint(number: int, frame: FrameType | None) -> None:
                if self._missed_its_cell():
                    return
                if not may_interrupt(frame):
                    cancel(number, frame)
                else:
                    self._raise_or_wait(frame)

            signal.signal(signal.SIGINT, handle_sigint)
            yield

    def _interrupt_cell(self, cell: str | None, pauses: Sequence[float] = RESEND_SECONDS) -> None:
        """Send SIGINT for the cell whose request id is `cell`, if it still runs.

        Send it again after `pauses`, in seconds, as long as Python has not handled it: a system call that began just
        as the signal arrived has not been interrupted by it.
        """
        if cell is not None and self._cell == cell:
            self._interrupt_target = cell
            ide_service.resume_for_interrupt()
            will_tell = _is_own_handler()  # a handler of the cell's own takes the signal without a trace
            self._signal(signal.SIGINT)
            if pauses and will_tell:
                self._call_on_control_thread(pauses[0], self._resend_interrupt, cell, pauses[1:])

    def _resend_interrupt(self, cell: str, pauses: Sequence[float]) -> None:
        """Send SIGINT again if ddip's handler has not handled the last one."""
        if self._interrupt_target == cell and _is_own_handler():
            self._interrupt_cell(cell, pauses)

    def _allow_interrupts(self) -> None:
        """Make interrupts raise from now on. Raises KeyboardInterrupt if this request was already stopped."""
        self._interruptible = True
        if self._interrupted or self._request_id() in self.aborted:
            raise KeyboardInterrupt

    def _request_id(self) -> str:
        """Return the id of the request that is being handled."""
        return str(self.get_parent("shell")["header"]["msg_id"])

    async def do_execute(self, code: str, silent: bool, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a cell sent by a client other than ddip and return its reply; never raises."""
        reply = await self._run_and_report(silent, {}, partial(super().do_execute, code, silent, *args, **kwargs))
        return dict(reply)

    async def run_cell(self, request: CellRequest) -> CellReply:
        """Run a cell and return its reply, with a report on the group and any error as text; never raises."""
        run = partial(self.run_in_shell, request["code"], request["silent"], request["history"])
        return await self._run_and_report(request["silent"], request["asked"], run)

    async def _run_and_report(self, silent: bool, asked: CellOptions, run: Run) -> CellReply:
        try:
            header = None if silent else self._begin_output(asked)
            self.shell.begin_cell()
            self._aside = self._aside or InterpreterSettings(self.parent.end_process, self._print_message)
            try:
                reply = await self._run_interruptibly(silent, run)
            except GeneratorExit:  # the event loop has been closed
                raise
            except BaseException as error:  # raised by the cell, or while its reply was built
                raised = self.shell.raised
                reply = self._error_reply("execute", error if raised is None else raised)
            return cast(CellReply, reply) if header is None else self._end_cell(reply, header)
        except Exception as error:  # in ddip's own steps, if memory or descriptors run out; a reply must still be sent
            if cells.busy:
                cells.end(error)
            reply = self._error_reply("execute", error)
            return cast(CellReply, {**reply, "silent": True})  # the notebook waits for no more messages

    @runs_around_cells
    def _begin_output(self, asked: CellOptions) -> dict[str, Any]:
        """Attribute output and state changes from now on to the new cell; return the header of its request.

        `asked`: the cell's options. It also opens the cell's log, and ends or drops a pending cleanup.
        """
        header: dict[str, Any] = self.get_parent("shell")["header"]
        self._sent_before_cell = self._sent
        self._number_cell(asked.get("number"))
        if "log" in asked:
            cell_log.open_log(header["msg_id"], asked["log"], membership.standing["rank"])
        for stream in self._streams:
            stream.begin_cell(header, asked.get("limit", sys.maxsize))
        is_shared = len(asked.get("ranks", ())) == membership.standing.get("world_size")
        history.begin_cell(asked.get("name", ""), is_shared)
        cells.begin(asked.get("debugs", False))
        cells.keep_frames = asked.get("keep_frames", False)
        profiling.request_recording(asked.get("profile", ""))
        begin_cell(asked)
        asker.begin_cell(asked.get("stdin", False), asked.get("break_on"))
        return header

    async def _run_interruptibly(self, silent: bool, run: Run) -> dict[str, Any]:
        """Call `run`, the cell's code, with the handlers of earlier cells, and return its reply.

        Signal handlers and trace functions are set again for it. Interrupts may end it. The app's hooks run around it,
        unless the cell is `silent`.
        """
        assert self._aside is not None
        self._cell = self._request_id()
        try:
            self._aside.give_back()
            ide_service.trace_cell()
            self._allow_interrupts()
            if app_hooks.before is not None and not silent:
                app_hooks.call_hook(app_hooks.before)
            profiling.begin_recording()
            reply = await run()
            if app_hooks.after is not None and not silent:
                app_hooks.call_hook(app_hooks.after, self.shell.raised)
            if reply["status"] == "ok":
                self._finish_on_gpu()
            if reply["status"] == "error" and self.shell.raised is None:  # the cell's result could not be displayed
                text = self.shell.find_formatted(None)
                reply.update({} if text is None else {"ename": text.name, "evalue": text.message})
            return reply
        finally:
            self._interruptible = False
            signal.signal(signal.SIGINT, self._interrupt)  # the cell may have set another handler
            profiling.end_recording()
            asker.end_cell()
            rank_debugger.forget_debuggers()
            self._aside.put()
            self.aborted.discard(self._cell)
            self._cell = None
            self._patience.forget()

    def _finish_on_gpu(self) -> None:
        """Wait for the GPU work of the cell after its code; a GPU error becomes the cell's error."""
        try:
            gpu.finish()
            membership.ensure_not_cut_off()
        except BaseException as error:
            self.shell.raised, self.shell.raised_at = error, time.time()
            raise

    def _end_cell(self, reply: dict[str, Any], header: dict[str, Any]) -> CellReply:
        """End the cell of the request `header`, and return `reply` with a report on this rank and its group."""
        self.restore_streams()
        report, raised = build_report(self.shell), self.shell.raised
        if cell_log.has_log(header["msg_id"]):
            for stream in self._streams:
                stream.flush_all()
            text = None if raised is None else self.shell.find_formatted(raised)
            self._streams[1].write(cell_log.finish_log(header["msg_id"], [] if text is None else text.traceback))
        cells.end(raised)
        succeeded = raised is None and self.shell.caught is None
        history.end_cell(succeeded)
        if raised is None:
            self.shell.begin_cell()
        del raised
        report["seconds"] = cells.seconds or 0.0
        if not RankStream.is_quiet() or any(stream.has_rest(header) for stream in self._streams):
            for stream in self._streams:
                stream.end_cell(header)
            for stream in self._streams:
                stream.flush_all()  # output of a cell without a viewer is discarded, and the cell counts as silent
        if not succeeded and RankStream.hidden_text:
            report["hidden"] = RankStream.hidden_text
        return cast(CellReply, {**reply, "report": report, "silent": self.was_silent(header["msg_id"])})

    def _print_message(self, text: str) -> None:
        """Print `text` to stderr as output of the last cell; safe to call from a signal handler."""
        self.io_loop.add_callback_from_signal(lambda: self._streams[1].write(f"ddip: {text}\n"))

    def do_shutdown(self, restart: bool) -> dict[str, Any]:
        """End this engine on request of the controller."""
        self.parent.is_over = True
        return super().do_shutdown(restart)  # type: ignore[no-any-return]

    def _number_cell(self, number: int | None) -> None:
        """Use the notebook's cell `number`, so that tracebacks and results show the one that the user sees."""
        if number is not None:
            self.shell.execution_count = number
            inputs = self.shell.user_ns.get("In")
            if isinstance(inputs, list):
                inputs.extend([""] * (number - len(inputs)))

    def _error_reply(self, method: str, error: BaseException) -> dict[str, Any]:
        """Return the reply for an `error` that IPython did not handle."""
        self._silent_cell = ""  # the reply will not say that the cell was silent
        text = self.shell.find_formatted(error) or tracebacks.format_error(error, None)
        return {
            "status": "error",
            "ename": text.name,
            "evalue": text.message,
            "traceback": text.traceback,
            "execution_count": self.execution_count,
            "engine_info": self.get_engine_info(method=method),
        }

    def restore_streams(self) -> None:
        """Put back stdout and stderr if a cell has broken them, since ipykernel flushes them for the reply."""
        if self._streams:
            restore_streams(*self._streams)

    def raw_input(self, prompt: str = "") -> str:
        """Ask the user in the notebook, for ``input()`` and for debuggers; see `Asker.ask_user` for the errors."""
        __tracebackhide__ = True  # IPython omits this frame
        return asker.ask_user(self._send_question, str(prompt), is_password=False)

    def getpass(self, prompt: str = "", *args: Any, **kwargs: Any) -> str:
        """Ask the user for a password in the notebook; see `Asker.ask_user` for the errors."""
        __tracebackhide__ = True
        return asker.ask_user(self._send_question, str(prompt) or "Password: ", is_password=True)

    def _send_question(self, question: AskedQuestion) -> None:
        """Send a question of the running cell to the notebook, after the cell's output so far."""
        for stream in self._streams:
            stream.flush_all()
        self.session.send(self.iopub_socket, cell_messages.QUESTION, question, parent=self.get_parent("shell"))

    def send_pause(self, is_paused: bool) -> None:
        """Tell the notebook that the rank has stopped in an IDE, or that it continues; runs on any thread."""
        self.session.send(self.iopub_socket, cell_messages.PAUSE, {"is_paused": is_paused}, self.get_parent("shell"))

    def do_apply(self, content: Any, bufs: Any, msg_id: Any, reply_metadata: Any) -> tuple[dict[str, Any], list[Any]]:
        """Call the function that a client has sent, and return the content and buffers of the reply.

        Raises nothing: an error becomes an error reply. A call sent by ddip has ``doing`` in its metadata;
        `ddip_interrupt` ends it as it ends a cell, but only in the called function. Only a SIGINT to this process ends
        a running call of another client, and at any point.
        """
        doing = self.get_parent("shell")["metadata"].get("doing")
        if doing is not None:
            self._cell = self._request_id()
            cells.begin_request(doing)
        try:
            try:
                self._allow_interrupts()
                with pause_recording(doing):
                    return super().do_apply(content, bufs, msg_id, reply_metadata)  # type: ignore[no-any-return]
            finally:
                self._interruptible = False
                self.aborted.discard(msg_id)
                self._cell = None
                self._patience.forget()
                cells.end_request()
        except BaseException as error:  # raised by the function, or while its reply was built
            return self._error_reply("apply", error), []

    def ddip_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Run a ``call`` (``protocol/remote.py``) while a cell may run, and send its reply.

        It runs on the control thread, or in a new thread if it may take long, so that no interrupt waits behind it.
        """
        request, send_on_control_thread = parent["content"], self.control_thread.io_loop.add_callback

        def send_reply(reply: dict[str, Any]) -> None:
            buffers: list[Any] = []
            content = {"status": "ok", **without_bytes(reply, buffers)}
            self.session.send(stream, "ddip_reply", content, parent, ident=ident, buffers=buffers)

        def run_request() -> None:
            threading.current_thread().ddip_cell = None  # type: ignore[attr-defined]  # not started by a cell
            send_on_control_thread(send_reply, call_target(request["target"], *request["args"]))

        if request.get("own_thread"):
            threading.Thread(target=run_request, name="ddip-beside", daemon=True).start()
        else:
            send_reply(call_target(request["target"], *request["args"]))

    def ddip_interrupt(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Interrupt the cell or call with the given request id, even if the request has not arrived yet.

        If the id is None, interrupt the running cell, if any.
        """
        cell = parent["content"]["cell"]
        if cell is None:
            cell = self._cell  # read before replying: a client may send the next cell once it has the reply
        else:
            self.aborted.add(cell)
        if cell != self._cell:
            cells.interrupt_tidying()
        self.session.send(stream, "ddip_reply", {"status": "ok"}, parent, ident=ident)
        self._interrupt_cell(cell)
        if cell is not None and cell == self._cell:  # the signal does not end the questions of other threads
            self._call_on_control_thread(END_QUESTIONS_SECONDS, self._end_questions, cell)

    def _end_questions(self, cell: str) -> None:
        if cell == self._cell:
            asker.end_questions()

    def interrupt_running_cell(self) -> None:
        """Interrupt the running cell, if any, from the control thread.

        Call this before ending a wait of the main thread: Python checks for signals as soon as the wait returns.
        """
        self._interrupt_cell(self._cell)

    def signal_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Send this process the signal of ``Client.send_signal``, in place of an ipyparallel nanny process."""
        number = parent["content"]["sig"]
        self.session.send(stream, "signal_reply", {"status": "ok"}, parent, ident=ident)
        self._signal(getattr(signal, number) if isinstance(number, str) else number)

    def _signal(self, number: int) -> None:
        os.kill(os.getpid(), number)
        self.io_loop.add_callback(lambda: None)  # wakes up a cell that awaits, which ipykernel's handler does not
