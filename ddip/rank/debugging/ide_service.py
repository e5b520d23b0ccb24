"""Let an IDE debug this rank: debugpy's debugger in this process, behind a port with a token.

Debugging slows Python code down, so it is on only between `serve_ide` and `end_ide`. The debugger stops all threads of
a process but those marked for it. The rank's own threads are marked, so that the notebook can talk to a rank that has
stopped. Before Python 3.12, tracing is on only in cells; in ddip's own code, the debugger stops in no version.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from ddip.protocol.compat_debugpy import NAMES
from ddip.rank.debugging.dap_gate import DapGate
from ddip.rank.runtime import stacks

UNTRACED = ("ddip", "debugpy", "IPython", "ipykernel", "traitlets", "tornado", "zmq")
"""Packages in which the IDE does not stop, even with ``justMyCode: false``."""
NOT_INSTALLED = "debugpy is not installed where the ranks run; type %pip install debugpy"


class _NoClient:
    """Drops what the debugger sends before the first client attaches."""

    def add_command(self, command: object) -> None:
        """Drop `command`."""

    def do_kill_pydev_thread(self) -> None:
        """Do nothing: this is no thread, as the debugger's own writer is."""

    def empty(self) -> bool:
        """Return True: nothing waits to be sent."""
        return True


class IdeService:
    """The debugger of this process and the gate to it."""

    _breakpoints_changed = 0
    """Number of changes of breakpoints in this process so far.

    The debugger remembers for which number a function has no breakpoints, so the next one must not begin at 0.
    """

    def __init__(self, pydevd: Any, token: str, shell: Any) -> None:
        """Start the debugger and open the port; runs on the main thread.

        The kernel of `shell` tells the notebook whether the rank has stopped.
        """
        self._pydevd, self._api = pydevd, pydevd.PyDevdAPI()
        for thread in threading.enumerate():
            if thread is not threading.main_thread() and not getattr(thread, "ddip_cell", None):
                _hide_thread(thread)
        pydevd.SetupHolder.setup = {"client": "", "server": False, "port": 0, "multiprocess": False, "ppid": 0}
        settrace = sys.settrace
        self._debugger = pydevd.PyDB()
        self._debugger.writer = _NoClient()
        sys.settrace = settrace  # pydevd's own prints a warning for each call
        self._debugger.mtime = IdeService._breakpoints_changed + 1
        folders = [os.path.dirname(sys.modules[name].__file__ or "") for name in UNTRACED if name in sys.modules]
        self._api.set_dont_trace_start_end_patterns(self._debugger, tuple(folders), ())
        self._wait_suspended = self._debugger.do_wait_suspend
        self._debugger.do_wait_suspend = self._wait_in_ide
        self._debugger.ready_to_run = True
        self._debugger.start_auxiliary_daemon_threads()
        self._stopped: set[threading.Thread] = set()
        """Threads that wait for the IDE."""
        self._is_interrupted = False
        """True if the main thread has been interrupted while it waited for the IDE."""
        self._lock = threading.Lock()
        """Held while `_stopped` changes and the notebook is notified."""
        self._shell, self._send_pause = shell, shell.kernel.send_pause
        self._cells = shell.kernel.parent.run_folder / "ipykernel_cells"
        """Folder with a file for each cell: an IDE sets breakpoints only in files. All ranks of a host share it."""
        self._name_code = shell.compile.get_code_name
        shell.compile.get_code_name = self._write_cell
        self.gate = DapGate(token, _start_thread, self._connect)

    def _connect(self, end: socket.socket) -> None:
        self._debugger.initialize_network(end, terminate_on_socket_close=False)

    def _write_cell(self, source: str, *args: Any) -> str:
        """Write the `source` of a cell to a file, and return its path, with which the cell is compiled."""
        file = self._cells / Path(self._name_code(source, *args)).name
        with contextlib.suppress(OSError):  # a full disk: breakpoints can still be set in other files
            self._cells.mkdir(mode=0o700, exist_ok=True)
            if not file.exists():
                file.write_text(source, encoding="utf-8", errors="replace")
        return str(file)

    def trace(self) -> None:
        """Trace the main thread and threads that it starts, for the cell that begins.

        A step that went on at the end of the last cell does not stop in this one.
        """
        self._continue(threading.main_thread())
        self._pydevd.settrace(suspend=False, patch_multiprocessing=False)

    @stacks.never_interrupted
    def _wait_in_ide(self, thread: threading.Thread, frame: FrameType, *args: Any, **kwargs: Any) -> None:
        """Wait until the IDE continues `thread`, which has stopped at `frame`.

        An interrupt would leave the debugger's wait with the thread marked as stopped, so it is raised after the wait.
        Without an IDE, and in threads of ddip, which the debugger stops together with all others, it continues.
        """
        is_main, is_ours = thread is threading.main_thread(), thread.name.startswith("ddip-")
        if self.gate.is_attached and not is_ours:
            self._is_interrupted &= not is_main
            self._note_stopped(thread, True)
            try:
                self._wait_suspended(thread, frame, *args, **kwargs)
            finally:
                self._note_stopped(thread, False)
        if is_ours or not self.gate.is_attached:
            self._continue(thread)
        if self._is_interrupted and is_main:
            self._is_interrupted = False
            handler = signal.getsignal(signal.SIGINT)
            if callable(handler):
                handler(signal.SIGINT, frame)

    def _continue(self, thread: threading.Thread) -> None:
        """Let `thread` neither wait nor stop at the end of a step."""
        self._api.request_resume_thread(self._pydevd.get_current_thread_id(thread))

    def _note_stopped(self, thread: threading.Thread, is_stopped: bool) -> None:
        with self._lock:
            before = bool(self._stopped)
            (self._stopped.add if is_stopped else self._stopped.discard)(thread)
            if before != bool(self._stopped):
                stacks.at_prompt += 1 if is_stopped else -1
                self._send_pause(is_stopped)

    def resume_for_interrupt(self) -> None:
        """Continue the threads that have stopped, and interrupt the main thread if it has; runs on any thread."""
        if self._stopped:
            self._is_interrupted = threading.main_thread() in self._stopped
            self._api.request_resume_thread("*")

    def stop_at(self, frame: FrameType) -> None:
        """Stop at the next line of `frame`."""
        self._pydevd.settrace(
            suspend=True, trace_only_current_thread=True, patch_multiprocessing=False, stop_at_frame=frame
        )

    def close(self) -> None:
        """End the debugger and close the port; takes 0.5 s."""
        del self._shell.compile.get_code_name
        shutil.rmtree(self._cells, ignore_errors=True)
        self.gate.close()
        self._api.request_resume_thread("*")  # else threads would stop or step again under the next debugger
        self._pydevd.stoptrace()
        IdeService._breakpoints_changed = self._debugger.mtime

    def leave_fork(self) -> None:
        """Forget the debugger in a process that was forked from the rank, where its threads do not run."""
        self.gate.close_in_fork()
        self._pydevd.settrace_forked(setup_tracing=False)
        threading.settrace(None)  # type: ignore[arg-type]
        if sys.version_info >= (3, 12):
            self._pydevd.pydevd_sys_monitoring.stop_monitoring(all_threads=True)


_service: IdeService | None = None
"""The service of this rank, while it is on."""
_is_stale = False
"""True if the service has ended, but the main thread may still have its trace functions."""


def serve_ide(token: str) -> int | str:
    """Open a port for an IDE that knows `token`, and return it, or the text of an error.

    Runs on the main thread. Returns the same port if the service runs already, and the text if debugpy cannot be used.
    """
    global _service
    if _service is not None:
        return _service.gate.port
    if not NAMES.is_installed:
        return NOT_INSTALLED
    pydevd = _import_pydevd()
    if refusal := NAMES.find_refusal():
        return refusal
    from IPython.core.getipython import get_ipython

    _service = IdeService(pydevd, token, get_ipython())
    return _service.gate.port


def end_ide() -> None:
    """End the service, if there is one: a rank that has stopped continues, and the port is closed."""
    global _service, _is_stale
    service, _service = _service, None
    if service is not None:
        _is_stale = True
        service.close()


def trace_cell() -> None:
    """Trace the cell that begins, if an IDE is served; remove what the service has left if it has ended."""
    global _is_stale
    if _service is not None:
        _service.trace()
    elif _is_stale:
        _is_stale = False
        _stop_tracing()


def _stop_tracing() -> None:
    """Remove trace functions from this thread and its frames."""
    sys.settrace(None)
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        frame.f_trace = None
        frame = frame.f_back


def resume_for_interrupt() -> None:
    """Continue a rank that has stopped in an IDE, as an interrupt waits for the debugger."""
    if _service is not None:
        _service.resume_for_interrupt()


def stop_in_ide(frame: FrameType | None) -> bool:
    """Stop at `frame` in the IDE that is attached; return False if there is none."""
    if _service is None or frame is None or not _service.gate.is_attached:
        return False
    _service.stop_at(frame)
    return True


def _end_in_fork() -> None:
    """End the service in a process that a cell has forked: nothing there is traced or stops."""
    global _service
    service, _service = _service, None
    if service is not None:
        _stop_tracing()
        service.leave_fork()


os.register_at_fork(after_in_child=_end_in_fork)


def _import_pydevd() -> Any:
    """Import debugpy's debugger, silently and without its replacement for ``breakpoint()``."""
    hook, switch = sys.breakpointhook, "PYDEVD_DISABLE_FILE_VALIDATION"
    former = os.environ.get(switch)
    os.environ[switch] = "1"  # else it prints that modules of Python are frozen
    try:
        from debugpy.server import api
    finally:
        sys.breakpointhook = hook
        if former is None:
            del os.environ[switch]
        else:
            os.environ[switch] = former
    return api.pydevd  # type: ignore[attr-defined]


def _hide_thread(thread: threading.Thread) -> None:
    """Make the debugger neither stop nor show `thread`."""
    thread.is_pydev_daemon_thread = thread.pydev_do_not_trace = True  # type: ignore[attr-defined]


def _start_thread(function: Callable[..., object], *args: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=args, name="ddip-ide", daemon=True)
    _hide_thread(thread)
    thread.start()
    return thread
