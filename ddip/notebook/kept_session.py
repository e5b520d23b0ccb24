"""``%makedip --keep`` and ``--attach``: the magics of this notebook run in the keeper of a kept group.

While a notebook is attached, each of ddip's magics is replaced by one that sends the same text to the keeper, where the
magic of the same name runs. Values of ``%dipush`` and ``%dipull`` travel in files of the keeper's folder.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle

from ddip.cluster.processes import preload_client, processes
from ddip.errors import BadInput, GroupError
from ddip.kept import kept_folder
from ddip.kept.keeper_link import KeeperEnded, KeeperLink, error_of
from ddip.kept.kept_folder import LOG, KeptGroup
from ddip.notebook.objects import is_result_used
from ddip.output import area

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.notebook.magics import DipMagics

START_SECONDS = 60.0
"""Time that a keeper may take to start."""
NOT_KEPT = ("dipper", "dipexport")
"""Magics that need the group, or the notebook's history, in the notebook's own process."""
OWN_SETTINGS = ("warm", "warm_apps", "local_magics", "verbose")
"""Settings that concern only the notebook."""
NAMES = re.compile(r"[^\W\d]\w*")


class KeptGroups:
    """The kept group of this notebook, if it has one."""

    def __init__(self, main: DipMagics) -> None:
        self._main = main
        self._session: KeptSession | None = None

    @property
    def is_attached(self) -> bool:
        """True while the magics run in a keeper."""
        return self._session is not None

    def list_free(self) -> list[str]:
        """Return the names of kept groups that no kernel holds."""
        return [kept.name for kept in kept_folder.list_kept() if not kept.is_claimed]

    def start(self, line: str, seconds: float) -> None:
        """Start a keeper, and in it the group of the ``%makedip`` `line`; nothing is left if that fails."""
        self._session = session = KeptSession(self._main, start_keeper(seconds), self._forget, is_new=True)
        try:
            session.run(f"%makedip {without_keep(line)}")
        except BaseException:
            session.end()
            raise
        print(
            f"ddip: the group {session.kept.name} is kept for {time_text(seconds)} after this kernel ends; "
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
    """Start a keeper, whose group continues for `seconds` without a kernel, and return it; raises GroupError."""
    name = kept_folder.choose_name(preload_client.notebook_name())
    log = Path(tempfile.mkstemp(prefix="ddip-keeper-", suffix=".log")[1])
    environment = {key: value for key, value in os.environ.items() if key not in ("JPY_PARENT_PID", processes.MARKED)}
    about = json.dumps({"name": name, "seconds": seconds})
    with log.open("wb") as file:
        process = subprocess.Popen(
            preload_client.module_command("ddip.kept.keeper"),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            env={**environment, kept_folder.ABOUT: about, **preload_client.python_path()},
        )
    threading.Thread(target=process.wait, daemon=True).start()  # else it stays as a zombie after its end
    until = time.monotonic() + START_SECONDS
    try:
        while True:
            found = [kept for kept in kept_folder.list_kept() if kept.pid == process.pid]
            if found:
                shutil.move(log, Path(found[0].folder, LOG))
                return found[0]
            if process.poll() is not None or time.monotonic() > until:
                end = "\n  ".join(log.read_text(errors="replace").splitlines()[-10:])
                raise GroupError(f"the keeper did not start; end of its log:\n  {end}")
            time.sleep(0.02)
    except BaseException:
        process.kill()
        log.unlink(missing_ok=True)
        raise


class KeptSession:
    """The notebook's attachment to the kept group `kept`; the constructor attaches, and raises GroupError.

    `on_end` is called when it ends; `is_new`: the keeper has just been started, and takes over the notebook's settings.
    """

    def __init__(self, main: DipMagics, kept: KeptGroup, on_end: Callable[[], object], is_new: bool) -> None:
        self._main, self._on_end = main, on_end
        self._shell: InteractiveShell = main.shell
        self.kept = kept
        self._sent = {} if is_new else self._settings()
        """The settings that the keeper has, or that the notebook has not changed since it attached."""
        holder = f"the kernel of {preload_client.notebook_name() or 'another notebook'} (PID {os.getpid()})"
        self._link = KeeperLink(kept, holder)
        if not area.is_page():
            self._link.announce_prompt()
        self._replaced: dict[tuple[str, str], Any] = {}
        self._replace_magics()
        main.hints.kept_call = self._link.try_call
        atexit.register(self.detach)

    # -- magics

    def _replace_magics(self) -> None:
        """Replace ddip's magics in IPython by ones that run in the keeper."""
        found = self._shell.magics_manager.magics
        for kind, magics in found.items():
            for name, magic in magics.items():
                owner = type(getattr(magic, "__self__", None))
                if (
                    owner.__module__.startswith("ddip.notebook.")
                    and owner.__name__ != "Misplaced"
                    and name != "autodip"
                ):
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
        where = line.split()[:1]
        if name in NOT_KEPT:
            raise BadInput(
                f"%{name}: it does not work with a kept group, which another process owns; %makedip -k ends it"
            )
        if name == "dip" and where == ["local"]:
            return magic(line, cell)
        if name == "dip" and where == ["everywhere"]:
            self._main.run_here(cell or "", False)
            line = line.replace("everywhere", "", 1)
        if name == "makedip" and re.search(r"--(keep|attach)\b", line):
            raise BadInput(
                f"%makedip {line.strip()}: this notebook is attached to {self.kept.name}; %makedip -k ends it"
            )
        names = NAMES.findall(line)
        code = f"%{name} {line}" if kind == "line" else f"%%{name} {line}\n{cell}"
        if name == "dipush":
            self._send_values(names)
        if name == "dipull":
            self._call_keeper("note_names")
        self.run(code)
        if name == "dipush":
            self._call_keeper("forget_names")
        if name == "makedip" and not self._call_keeper("has_group"):
            self.end()
        return self._fetch_values(names) if name == "dipull" else None

    def run(self, code: str) -> None:
        """Run `code` in the keeper as a cell with the number of the running one; raises its error."""
        self._prepare()
        reply = self._link.run_code(code, allow_stdin=self._may_ask())
        area.show_pages(reply.get("payload", []))
        if reply["status"] != "ok":
            raise error_of(reply)

    def _may_ask(self) -> bool:
        kernel = getattr(self._shell, "kernel", None)
        return kernel is None or bool(getattr(kernel, "_allow_stdin", False))

    def _settings(self) -> dict[str, Any]:
        names = self._main.trait_names(config=True)
        return {name: getattr(self._main, name) for name in names if name not in OWN_SETTINGS}

    def _prepare(self) -> None:
        settings = self._settings()
        changed = {name: value for name, value in settings.items() if self._sent.get(name, ...) != value}
        number = area.cell_number()
        self._call_keeper("prepare_cell", number or 1, os.getcwd(), changed)
        self._sent = settings

    def _call_keeper(self, name: str, *arguments: Any) -> Any:
        """Call a function of ``ddip/kept/keeper.py`` in the keeper, and return its value, which JSON can hold."""
        typed = ", ".join(map(repr, arguments))
        return self._link.evaluate(f"__import__('sys').modules['ddip.kept.keeper'].{name}({typed})")

    def _send_values(self, names: list[str]) -> None:
        """Give the keeper the notebook's variables among `names`."""
        values = {name: self._shell.user_ns[name] for name in names if name in self._shell.user_ns}
        path = Path(self.kept.folder, "values")
        try:
            path.write_bytes(cloudpickle.dumps(values))
            self._call_keeper("take_values", str(path))
        finally:
            path.unlink(missing_ok=True)

    def _fetch_values(self, names: list[str]) -> Any:
        """Take over the variables that a ``%dipull`` has stored in the keeper; return them if the line uses them."""
        path = Path(self.kept.folder, "values")
        try:
            self._call_keeper("give_values", str(path))
            values = cloudpickle.loads(path.read_bytes())
        finally:
            path.unlink(missing_ok=True)
        self._shell.push(values)
        if not is_result_used(sys._getframe()):
            return None
        found = [values[name] for name in dict.fromkeys(names) if name in values]
        return tuple(found) if len(found) > 1 else found[0]

    # -- attach, detach

    def show_past(self) -> None:
        """Show what the group has done since its former kernel, and continue the numbers of its cells."""
        report = self._link.ask_keeper("ddip_attach")
        self._continue_numbers(report["next"])
        print(report["about"] or "ddip: the group has not formed")
        if report["running"]:
            cells = ", ".join(f"[{number}]" for number in report["running"])
            print(
                f"ddip: cell{'s' * (len(report['running']) > 1)} {cells} run{'s' * (len(report['running']) == 1)} still"
            )
        area.flush_streams()
        self._link.show_records(report["records"])

    def _continue_numbers(self, following: int) -> None:
        history = self._shell.history_manager
        if history is None:
            return
        missing = following - len(history.input_hist_parsed)
        for entries in (history.input_hist_parsed, history.input_hist_raw):
            entries[1:1] = [""] * max(0, missing)
        if missing > 0:
            self._shell.execution_count += missing

    def detach(self) -> None:
        """Leave the group to its keeper."""
        atexit.unregister(self.detach)
        self._restore_magics()
        self._link.close()
        self._on_end()

    def end(self) -> None:
        """End the group and its keeper."""
        atexit.unregister(self.detach)
        self._restore_magics()
        self._link.end_keeper()
        self._on_end()


def time_text(seconds: float) -> str:
    """Return a time such as ``30 min`` or ``90 s``."""
    return f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"


def without_keep(line: str) -> str:
    """Return the ``%makedip`` line without ``--keep`` and its time, for the keeper."""
    return re.sub(r"--keep(?:[ =][\d.]+[smh]?(?!\S))?", "", line).strip()
