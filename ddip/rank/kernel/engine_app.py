"""An ipyparallel engine that survives cells that stop its event loop, and whose forked children SIGTERM can end."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, TextIO
from unittest import mock

from ipykernel import ipkernel
from ipyparallel.engine import app
from IPython.core import shellapp
from traitlets import Type, default
from traitlets.config import Config
from traitlets.config.loader import DeferredConfigString

from ddip.protocol import warning_errors
from ddip.rank.kernel.kernel import RankKernel
from ddip.rank.streams.streams import RankStream

POLL_SECONDS = 0.005


class _NoModules:
    """A stand-in for ``sys`` that lists no modules, for code that would look at all of them.

    There are thousands, and to look at a module copies the page that a forked rank shares with the preload process.
    """

    modules: dict[str, ModuleType] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(sys, name, value)


@contextlib.contextmanager
def _hiding_modules() -> Iterator[None]:
    """Hide all modules from ipykernel and IPython, if they look at them as they do in the tested versions."""
    with contextlib.ExitStack() as until_started:
        for module in (ipkernel, shellapp):
            if hasattr(module, "sys"):
                until_started.enter_context(mock.patch.object(module, "sys", _NoModules()))
        yield


class RankEngine(app.IPEngine):  # type: ignore[misc]
    """An ipyparallel engine that runs a `RankKernel`."""

    out_stream_factory = Type(RankStream)
    start_log: TextIO = sys.stderr
    """Stream for errors during startup: once the engine has captured its own stderr, no one reads that."""
    run_folder = Path()
    """The cluster's private folder on this host."""
    connection_info = ""
    """Controller connection details for an engine on another host; secret, so never written to a file."""
    is_over = False
    """Becomes True when this engine is asked to end."""
    ended_by = 0
    """Number of the signal that asked it to end."""

    def start(self) -> None:
        """Run the event loop until this engine is asked to end; restart it if a cell or a callback stops it.

        Raises RuntimeError if a cell or a library has closed the loop.
        """
        run = super().start
        while True:
            try:
                run()
            except BaseException:
                if self.kernel is None:  # the engine could not register
                    raise
                if not self.is_over:
                    traceback.print_exc()  # shown with the output of the last cell
            if self.is_over or self.kernel is None:
                return
            if self.loop.asyncio_loop.is_closed():
                raise RuntimeError("a cell, or a library, has closed the event loop of this rank")
            run = self.loop.start

    def end_process(self) -> None:
        """End this process as SIGTERM does; safe to call from a signal handler."""
        self._signal_stop(signal.SIGTERM, None)

    def _signal_stop(self, sig: int, frame: FrameType | None) -> None:
        self.is_over, RankEngine.ended_by = True, sig
        super()._signal_stop(sig, frame)

    def initialize(self, argv: list[str] | None = None) -> None:
        app.Kernel = RankKernel  # a private name: ipyparallel has no setting for the kernel's class
        self.connection_info_env = self.connection_info
        super().initialize(argv)

    def parse_command_line(self, argv: Sequence[str] | None = None) -> None:
        """Parse ``--Class.trait=value``, the only form that ``cluster/ipyparallel/launchers.py`` uses.

        The traitlets method builds a parser for every trait of every class: a tenth of a rank's startup time.
        """
        config = Config()
        for argument in sys.argv[1:] if argv is None else argv:
            name, _, value = argument.removeprefix("--").partition("=")
            owner, trait = name.split(".")
            config[owner][trait] = DeferredConfigString(value)
        self.cli_config = deepcopy(config)
        self.update_config(config)

    @default("log")
    def _log_default(self) -> logging.Logger:
        """Return a logger that writes to stderr, and that no other code finds by its name.

        traitlets would configure logging nine times, and each time visit the loggers of all libraries.
        """
        log = logging.Logger(type(self).__name__, self.log_level)
        log.addHandler(logging.StreamHandler())
        return log

    def _configure_logging(self) -> None:
        """Do nothing; `_log_default` does."""

    def find_connection_file(self) -> None:
        """Wait for the controller's connection file, polling it more often than ipyparallel does."""
        while "" in sys.path:  # added by ipyparallel; `membership.join_group` sets the path of the notebook later
            sys.path.remove("")
        super().find_connection_file()
        if self.connection_info:
            return
        deadline = time.monotonic() + self.wait_for_url_file
        while not Path(self.url_file).exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def init_signal(self) -> None:
        """Install the signal handlers, and reset SIGTERM in forked processes so that it ends them.

        The inherited handler of ipyparallel would only wake up the child's copy of the event loop.
        """
        super().init_signal()
        blocked_here = [signal.SIGTERM]
        unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, blocked_here)  # C code: cannot be interrupted

        def block_sigterm() -> None:  # block SIGTERM until the child has reset its handler
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            blocked_here[:] = [] if signal.SIGTERM in mask else [signal.SIGTERM]  # a cell may have blocked it already

        def in_child() -> None:
            if signal.getsignal(signal.SIGTERM) == self._signal_stop:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        os.register_at_fork(before=block_sigterm, after_in_parent=unblock, after_in_child=in_child)
        os.register_at_fork(after_in_child=unblock)

    def redirect_output(self, iopub_socket: Any) -> None:
        """Send stdout and stderr to the notebook, and apply the user's filters of warnings.

        ipyparallel calls this after the startup files.
        """
        super().redirect_output(iopub_socket)
        warning_errors.give_back()
        self.kernel.keep_streams(sys.stdout, sys.stderr)

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        """Register, then notify the Hub as soon as every socket is connected, without waiting for a heartbeat.

        Writes an error to `start_log` before raising it.
        """
        try:
            with _hiding_modules():
                await super().complete_registration(msg, connect, maybe_tunnel)
        except Exception:
            traceback.print_exc(file=self.start_log)
            self.start_log.flush()
            raise
        self.session.send(self.registrar, "ready_request", content={"uuid": self.ident})
