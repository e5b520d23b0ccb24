"""ipyparallel's engine, as a rank needs it: it outlives what cells do to its loop, and lets what they fork be ended."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from ipyparallel.engine import app
from traitlets import Type
from traitlets.config import Config
from traitlets.config.loader import DeferredConfigString

from ddip.rank.kernel.kernel import RankKernel
from ddip.rank.streams.streams import RankStream

POLL_SECONDS = 0.005


class RankEngine(app.IPEngine):  # type: ignore[misc]
    """ipyparallel's engine with a `RankKernel`."""

    out_stream_factory = Type(RankStream)
    start_log: TextIO = sys.stderr
    """Where a start that fails says why: once it has streams of its own, nobody sees what it writes there."""
    connection_info = ""
    """How to reach the controller, on another host than its; a secret, and in no file."""
    is_over = False
    """Has it been told to end?"""

    def start(self) -> None:
        """Serve until it is told to end: a cell may stop the loop, and what it leaves there may raise, or exit."""
        run = super().start
        while True:
            try:
                run()
            except BaseException:
                if self.kernel is None:  # it could not register
                    raise
                if not self.is_over:
                    traceback.print_exc()  # for whoever looks at the last cell
            if self.is_over or self.kernel is None:
                return
            if self.loop.asyncio_loop.is_closed():
                raise RuntimeError("a cell, or a library, has closed the event loop of this rank")
            run = self.loop.start

    def end(self) -> None:
        """End this process as SIGTERM does; may be called by a handler of a signal."""
        self._signal_stop(signal.SIGTERM, None)

    def _signal_stop(self, sig: int, frame: FrameType | None) -> None:
        self.is_over = True
        super()._signal_stop(sig, frame)

    def initialize(self, argv: list[str] | None = None) -> None:
        app.Kernel = RankKernel  # a private name: ipyparallel has no setting for the kernel's class
        self.connection_info_env = self.connection_info
        super().initialize(argv)
        self.log.setLevel(self.log_level)  # traitlets makes a record of each message, and then has no handler take it

    def parse_command_line(self, argv: Sequence[str] | None = None) -> None:
        """Take ``--Class.trait=value``, which is all that the notebook sends (``cluster/ipyparallel/launchers.py``).

        traitlets' own makes a parser of every trait of every class, a tenth of what a rank costs until it is there.
        """
        config = Config()
        for argument in sys.argv[1:] if argv is None else argv:
            name, _, value = argument.removeprefix("--").partition("=")
            owner, trait = name.split(".")
            config[owner][trait] = DeferredConfigString(value)
        self.cli_config = deepcopy(config)
        self.update_config(config)

    def find_connection_file(self) -> None:
        """Wait for the controller's file, and look more often than ipyparallel does."""
        while "" in sys.path:  # ipyparallel has put it there: not before the rank has its place in the group
            sys.path.remove("")
        super().find_connection_file()
        if self.connection_info:
            return
        deadline = time.monotonic() + self.wait_for_url_file
        while not Path(self.url_file).exists() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def init_signal(self) -> None:
        """Let SIGTERM end what a cell forks, as it ends any process: ipyparallel's handler would only wake it up."""
        super().init_signal()
        held_back = [signal.SIGTERM]
        release = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, held_back)  # in C, which nothing interrupts

        def before() -> None:  # a SIGTERM for the child waits until it has no handler
            mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
            held_back[:] = [] if signal.SIGTERM in mask else [signal.SIGTERM]  # a cell may have blocked it

        def in_child() -> None:
            if signal.getsignal(signal.SIGTERM) == self._signal_stop:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

        os.register_at_fork(before=before, after_in_parent=release, after_in_child=in_child)
        os.register_at_fork(after_in_child=release)

    async def complete_registration(self, msg: Any, connect: Any, maybe_tunnel: Any) -> None:
        """Tell the Hub when every socket is connected; ipyparallel's waits for a heartbeat."""
        try:
            await super().complete_registration(msg, connect, maybe_tunnel)
        except Exception:
            traceback.print_exc(file=self.start_log)
            self.start_log.flush()
            raise
        self.session.send(self.registrar, "ready_request", content={"uuid": self.ident})
