"""``%makedip --keep`` and ``--attach``: the magics of this notebook run in the keeper of a kept group.

While a notebook is attached, each of ddip's magics is replaced by one that sends the same text to the keeper, where the
magic of the same name runs. ``%dipush`` and ``%dipull`` run here, and copy values through the keeper
(``ddip/kept/kept_objects.py``).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ddip.cluster.processes import ownership, preload_client, processes
from ddip.errors import BadInput, GroupError, RequestInterrupted
from ddip.kept import kept_folder
from ddip.kept.keeper_link import KeeperEnded, KeeperLink, error_of
from ddip.kept.kept_folder import KeptGroup
from ddip.notebook import arguments, both_sides
from ddip.notebook.autodip import AUTODIP_OFF
from ddip.output import area

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.kept.kept_objects import KeptObjects
    from ddip.notebook.magics import DipMagics

START_SECONDS = 60.0
"""Time that a keeper may take to start."""
NOT_KEPT = ("dipper",)
"""Magics that need the group in the notebook's own process."""
LEAVE_AT_STOP = ("dipwait", "dipwatch")
"""Magics that end without an error at a stop, since only they are stopped."""
HERE = ("autodip", "dipush", "dipull")
"""Magics that run in the notebook: the last two with `KeptObjects` in place of the group."""


class KeptGroups:
    """The kept group of this notebook, if it has one."""

    def __init__(self, main: DipMagics) -> None:
        self._main = main
        self._session: KeptSession | None = None

    @property
    def objects(self) -> KeptObjects | None:
        """The stand-in for the group in ``%dipush`` and ``%dipull``; None if there is no kept group."""
        return None if self._session is None else self._session.objects

    def list_free(self) -> list[str]:
        """Return the names of kept groups that no kernel holds."""
        return [kept.name for kept in kept_folder.list_kept() if not kept.is_claimed]

    def start(self, line: str, seconds: float) -> None:
        """Start a keeper, and in it the group of the ``%makedip`` `line`; nothing is left if that fails."""
        kept = start_keeper(seconds)
        try:
            self._session = KeptSession(self._main, kept, self._forget, is_new=True)
            self._session.run("line", "makedip", line)
            if not self._session.has_group():
                raise BadInput(f"%makedip {line.strip()}: this line starts no group")
        except BaseException:
            if self._session is not None:
                self._session.end()
            kept.end()
            raise
        print(
            f"ddip: the group {kept.name} is kept for {kept_folder.keep_time_text(seconds)} after this kernel ends; "
            "%makedip --attach continues it"
        )

    def attach(self, name: str) -> None:
        """Attach this notebook to the kept group `name`; empty: the only one that no kernel holds."""
        self._session = KeptSession(self._main, kept_folder.find_kept(name), self._forget, is_new=False)
        try:
            self._session.show_past()
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Leave the group to its keeper; does nothing if there is none."""
        if self._session is not None:
            self._session.detach()

    def _forget(self) -> None:
        self._session = None


def start_keeper(seconds: float) -> KeptGroup:
    """Start a keeper, whose group continues for `seconds` without a kernel, and return it.

    Raises GroupError and RequestInterrupted; no process is left then.
    """
    name = kept_folder.choose_name(preload_client.notebook_name())
    environment = {key: value for key, value in os.environ.items() if key not in ("JPY_PARENT_PID", processes.MARKED)}
    about = json.dumps({"name": name, "seconds": seconds})
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            preload_client.module_command("ddip.kept.keeper"),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**environment, kept_folder.ABOUT: about, **preload_client.python_path()},
        )
        threading.Thread(target=process.wait, daemon=True).start()  # else it stays as a zombie after its end
        until = time.monotonic() + START_SECONDS
        try:
            while True:
                found = [kept for kept in kept_folder.list_kept() if kept.pid == process.pid]
                if found:
                    return found[0]
                if process.poll() is not None or time.monotonic() > until:
                    log.seek(0)
                    end = "\n  ".join(log.read().decode(errors="replace").splitlines()[-10:])
                    raise GroupError(f"the keeper did not start; end of its log:\n  {end}")
                time.sleep(0.02)
        except BaseException as error:
            process.kill()
            process.wait()
            ownership.clear_up_orphans()
            if isinstance(error, KeyboardInterrupt):
                raise RequestInterrupted("the start was interrupted; there is no group") from None
            raise


class KeptSession:
    """The notebook's attachment to the kept group `kept`; the constructor attaches, and raises GroupError.

    `on_end` is called when it ends; `is_new`: the keeper has just been started, and takes over the notebook's settings.
    """

    def __init__(self, main: DipMagics, kept: KeptGroup, on_end: Callable[[], object], is_new: bool) -> None:
        from ddip.kept.kept_objects import KeptObjects

        self._main, self._on_end = main, on_end
        self._shell: InteractiveShell = main.shell
        self.kept = kept
        self._sent = {} if is_new else self._main.group_settings()
        """The settings that the keeper has."""
        self._link = KeeperLink(kept, kept_folder.holder_text(preload_client.notebook_name(), os.getpid()))
        self._replaced: dict[tuple[str, str], Any] = {}
        try:
            if is_new:
                self._link.show_records({})
            if not area.is_page():
                self._link.announce_prompt()
            self.objects = KeptObjects(self._call_for_objects, Path(kept.folder))
            self._replace_magics()
            main.hints.kept_call = self._link.try_call
            self._pass_on_warnings()
            atexit.register(self.detach)
        except BaseException:
            self.detach()
            raise

    def _pass_on_warnings(self) -> None:
        """Pass SIGUSR1, a scheduler's warning, on to the keeper, where ``%dipsave --every`` handles it."""
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
            signal.signal(signal.SIGUSR1, self._pass_on)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):  # the keeper has ended
            os.kill(self.kept.pid, number)

    # -- magics

    def _replace_magics(self) -> None:
        """Replace ddip's magics in IPython by ones that run in the keeper."""
        found = self._shell.magics_manager.magics
        for kind, magics in found.items():
            for name, magic in magics.items():
                owner = type(getattr(magic, "__self__", None))
                if owner.__module__.startswith("ddip.notebook.") and owner.__name__ != "Misplaced" and name not in HERE:
                    self._replaced[kind, name] = magic
        for (kind, name), magic in self._replaced.items():
            found[kind][name] = self._forwarder(kind, name, magic)

    def _restore_magics(self) -> None:
        found = self._shell.magics_manager.magics
        for (kind, name), magic in self._replaced.items():
            found[kind][name] = magic
        self._replaced.clear()
        self._main.hints.kept_call = None

    def _forwarder(self, kind: str, name: str, magic: Any) -> Any:
        """Return a function for IPython that runs the magic `name` in the keeper; it has the help of `magic`."""

        @functools.wraps(magic)
        def run_in_keeper(line: str = "", cell: str | None = None) -> Any:
            try:
                return self._run_magic(kind, name, line, cell, magic)
            except KeeperEnded:
                self.detach()
                raise

        return run_in_keeper

    def _run_magic(self, kind: str, name: str, line: str, cell: str | None, magic: Any) -> Any:
        if name in NOT_KEPT:
            raise BadInput(f"%{name}: it does not work with a kept group, which another process owns")
        if name == "dip" and cell is not None:
            where = arguments.parse_line(magic, "%%dip", line).where
            if where == "local":
                return magic(line, cell)
            if where == "everywhere":
                self._main.parse_dip(line)  # raises before anything has run
                line = re.sub(r"(^|\s)everywhere(?=\s|$)", " ", line, count=1)
                is_both = bool(both_sides.magic_names(cell))
                self._main.run_here(cell, is_both)
                cell = both_sides.for_ranks(cell) if is_both else cell
        if name == "makedip":
            args = arguments.parse_line(magic, "%makedip", line)
            if args.keep is not None or args.attach is not None:
                typed = f"%makedip {line.strip()}"
                raise BadInput(f"{typed}: this notebook is attached to {self.kept.name}; %makedip -k ends it")
        self.run(kind, name, line, cell)
        if name == "makedip" and not self.has_group():
            was_on = self._main.autodipper.state != "off"
            self._main.autodipper.off()
            self.end()
            if was_on:
                print(f"ddip: {AUTODIP_OFF}")
        return None

    def run(self, kind: str, name: str, line: str, cell: str | None = None) -> None:
        """Run a magic in the keeper, in a cell with the number of the running one; raises its error."""
        area.flush_streams()
        self._prepare()
        # called directly: IPython has replaced {expression} and $name in the line already
        typed = f"({line!r})" if cell is None else f"({line!r}, {cell!r})"
        code = f"get_ipython().find_magic({name!r}, {kind!r}){typed}"
        reply = self._link.run_code(code, self._may_ask(), may_end_well=name in LEAVE_AT_STOP)
        area.show_pages(reply.get("payload", []))
        if reply["status"] != "ok":
            raise error_of(reply)

    def _may_ask(self) -> bool:
        kernel = getattr(self._shell, "kernel", None)
        return kernel is None or bool(getattr(kernel, "_allow_stdin", False))

    def _prepare(self) -> None:
        settings = self._main.group_settings()
        changed = {name: value for name, value in settings.items() if self._sent.get(name, ...) != value}
        try:
            directory = os.getcwd()
        except OSError:  # it was removed
            directory = ""
        self._link.post("prepare_cell", area.cell_number() or 1, directory, changed)
        self._sent = settings

    def has_group(self) -> bool:
        """Return True if the keeper has a group."""
        return bool(self._link.call("has_group"))

    def _call_for_objects(self, function: str, *values: Any) -> Any:
        try:
            self._prepare()
            return self._link.call(function, *values, is_interruptible=True)
        except KeeperEnded:
            self.detach()
            raise

    # -- attach, detach

    def show_past(self) -> None:
        """Show the output since the former kernel's end; continue with its settings and numbers of cells."""
        report = self._link.ask_keeper("attach_report")
        self._continue_numbers(report["next"])
        for name, value in json.loads(report["settings"]).items():
            setattr(self._main, name, value)
        self._sent = self._main.group_settings()
        print(report["about"] or "ddip: the group has not formed")
        if report["running"]:
            cells = ", ".join(f"[{number}]" for number in report["running"])
            print(f"ddip: still running: {cells}")
        area.flush_streams()
        self._link.show_records(report["records"])

    def _continue_numbers(self, following: int) -> None:
        history = self._shell.history_manager
        if history is None:
            return
        missing = following - len(history.input_hist_parsed)
        for entries in (history.input_hist_parsed, history.input_hist_raw):
            entries.extend([""] * missing)
        if missing > 0:
            self._shell.execution_count += missing

    def detach(self) -> None:
        """Leave the group to its keeper."""
        self._leave(lambda: self._link.ask_keeper("note_seen"))

    def end(self) -> None:
        """End the group and its keeper."""
        self._leave(self._link.end_keeper)

    def _leave(self, tell: Callable[[], object]) -> None:
        atexit.unregister(self.detach)
        self._restore_magics()
        is_ours = signal.getsignal(signal.SIGUSR1) == self._pass_on
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        try:
            with contextlib.suppress(GroupError):
                tell()
        finally:
            self._link.close()
            self._on_end()
