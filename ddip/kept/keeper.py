"""The keeper: a process that owns a group in place of the notebook's kernel, so that the group outlives the kernel.

    notebook's kernel                    keeper                               controller, ranks
    -----------------                    ------                               -----------------
    %makedip --keep ----- starts ------> an IPython kernel with ddip loaded
    a magic ------------- code --------> the same magic ---- starts, uses --> group
    output of the cell <- messages ----- its output <------------------------ output
    ends, is killed
                                         records the output of cells, waits
    another kernel
    %makedip --attach --- claims ------> (``kept_folder.py``)
                     <--- records ------

The keeper is to its group what a notebook's kernel is otherwise. So all that ddip does for a group also holds for a
kept one: the ranks end with the keeper, groups on several hosts keep their connections, and background cells go on.
Its sockets are files in a folder that only this user can enter.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import setproctitle
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from ddip.cluster.processes import ownership
from ddip.cluster.processes.processes import Proc
from ddip.errors import GroupError
from ddip.group import session
from ddip.group.group import Group
from ddip.kept import kept_folder, kept_objects
from ddip.kept.cell_records import CellRecords
from ddip.kept.kept_folder import KeptGroup
from ddip.output import area

POLL_SECONDS = 0.5
"""Time between two looks for a kernel that holds the claim."""
NO_GROUP_SECONDS = 10.0
"""Time for which a keeper without a group waits for a kernel."""
SHOWN = ("stream", "display_data", "update_display_data", "execute_result", "error", "clear_output")
"""Types of the messages to record."""


class Keeper:
    """The keeper's record, the output of its cells, and the time since a kernel was attached."""

    def __init__(self, app: IPKernelApp, name: str, seconds: float, folder: Path) -> None:
        self._app = app
        self.shell: Any = app.shell
        me = Proc.of(os.getpid())
        self.kept = KeptGroup(name, me.pid, me.started, seconds, str(folder))
        self._records = CellRecords()
        self._seen_until = time.monotonic()
        """The time until which a kernel has seen all output."""
        self._is_alone = False
        self._is_ending = threading.Lock()

    def record_messages(self) -> None:
        """Record from now on what the session sends for pages."""
        session: Any = self._app.session
        send, me, lock = session.send, os.getpid(), threading.RLock()

        def send_and_record(stream: Any, msg_or_type: Any, *arguments: Any, **options: Any) -> Any:
            if os.getpid() != me:  # a child, in which another thread may have held the lock
                return send(stream, msg_or_type, *arguments, **options)
            with lock:  # records have the order of the messages
                message = send(stream, msg_or_type, *arguments, **options)
                if message and message["header"]["msg_type"] in SHOWN:
                    self._records.add(message, self.count_cells() - 1)
            return message

        session.send = send_and_record

    def count_cells(self) -> int:
        """Return the number of the next cell."""
        return len(self.shell.history_manager.input_hist_parsed)

    def begin(self) -> None:
        """Accept kernels: write the record, and end this process once it has been alone for too long."""
        self.kept.write()
        threading.Thread(target=self._watch, name="ddip-keeper", daemon=True).start()

    def _watch(self) -> None:
        alone_since = time.monotonic()
        while True:
            time.sleep(POLL_SECONDS)
            is_alone, now = kept_folder.can_claim(Path(self.kept.folder)), time.monotonic()
            if is_alone and not self._is_alone:
                alone_since = now
                self._seen_until = max(self._seen_until, now - POLL_SECONDS)  # when it may have begun
            self._is_alone = is_alone
            seconds = self.kept.seconds if has_group() else min(NO_GROUP_SECONDS, self.kept.seconds)
            if is_alone and now - alone_since > seconds:
                self.end()

    def note_seen(self) -> None:
        """Note that the kernel that is attached has shown all output until now."""
        self._seen_until = time.monotonic()

    def try_call(self, call: str, seconds: float) -> dict[str, Any] | None:
        """Return the result of ``Group.try_call`` for a call that is pickled and in base64."""
        group = session.current_group()
        with contextlib.suppress(GroupError):
            return None if group is None else group.try_call(pickle.loads(base64.b64decode(call)), seconds)
        return None

    def begin_end(self) -> None:
        """Begin to end the group and this process, and return at once."""
        threading.Thread(target=self.end, name="ddip-end").start()

    def end(self) -> None:
        """End the group and this process, and remove all files; any thread may call it."""
        if not self._is_ending.acquire(blocking=False):
            return
        group = session.current_group()
        with contextlib.suppress(Exception):
            if group is not None:
                group.shutdown()
        ownership.remove_files(Path(self.kept.folder), "", "")
        os._exit(0)

    def attach_report(self) -> dict[str, Any]:
        """Return what a kernel shows after it has attached.

        ``next``: number of the next cell; ``about``: the group in one line; ``running``: numbers of the running cells;
        ``records``: see `CellRecords.select`; ``settings``: as JSON.
        """
        group = session.current_group()
        cells = [] if group is None else [cell for cell in group.cells if cell.outcome is None]
        records = self._records.select(self._seen_until, {cell.number for cell in cells})
        self.note_seen()
        return {
            "settings": json.dumps(find_magics().group_settings()),
            "next": self.count_cells(),
            "about": "" if group is None else group.describe(),
            "running": sorted({cell.number for cell in cells}),
            "records": records,
        }


class KeeperKernel(IPythonKernel):  # type: ignore[misc]
    """IPython's kernel, which also answers a kernel that attaches while the keeper runs a cell."""

    msg_types = [*IPythonKernel.msg_types, "ddip_task_request"]
    control_msg_types = [*IPythonKernel.control_msg_types, "ddip_control_request"]

    def ddip_task_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Call one of `TASKS` between two cells."""
        content = parent["content"]
        reply: dict[str, Any]
        try:
            value = TASKS[content["function"]](*json.loads(content["arguments"]))
            reply = {"status": "ok", "value": json.dumps(value)}
        except BaseException as error:  # including the stop button, of which the notebook must learn
            render = getattr(error, "_render_traceback_", None)
            lines = traceback.format_exception(error) if render is None else render()
            reply = {"status": "error", "ename": type(error).__name__, "evalue": str(error), "traceback": lines}
        area.flush_streams()
        assert self.session is not None
        self.session.send(stream, "ddip_task_reply", reply, parent, ident=ident)

    def ddip_control_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Call a method of the keeper, even while a cell runs."""
        content = parent["content"]
        value = getattr(current_keeper(), content["method"])(*content["arguments"])
        assert self.session is not None
        self.session.send(stream, "ddip_control_reply", {"value": value}, parent, ident=ident)


_keeper: Keeper | None = None
"""The keeper of this process, from its start on."""


def current_keeper() -> Keeper:
    """Return the keeper of this process."""
    assert _keeper is not None
    return _keeper


class KeeperApp(IPKernelApp):  # type: ignore[misc]
    """IPython's kernel application without the user's startup files, which belong to the notebook."""

    def init_code(self) -> None:
        """Run nothing."""


def main() -> None:
    """Run the keeper until it ends itself."""
    global _keeper
    about = json.loads(os.environ.pop(kept_folder.ABOUT))
    setproctitle.setproctitle(f"ddip keeper ({about['name']})")
    folder = ownership.make_run_folder()
    try:
        (folder / kept_folder.CLAIM).touch(0o600)
        app = KeeperApp.instance(kernel_class=KeeperKernel, quiet=True)
        app.config.HistoryManager.hist_file = ":memory:"
        # after the user's configuration, which may set these too
        ours = {"transport": "ipc", "ip": str(folder / "k"), "connection_file": str(folder / kept_folder.CONNECTION)}
        app.initialize([f"--IPKernelApp.{name}={value}" for name, value in ours.items()])
        _keeper = Keeper(app, about["name"], about["seconds"], folder)
        _keeper.shell.extension_manager.load_extension("ddip")
        find_magics().kept = None  # --keep has no effect here
        _keeper.record_messages()
        signal.signal(signal.SIGTERM, lambda *_: current_keeper().begin_end())
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until `%dipsave --every`
        log = os.open(folder / kept_folder.LOG, os.O_WRONLY | os.O_CREAT, 0o600)
        for descriptor in (1, 2):  # until here, the notebook reads them
            os.dup2(log, descriptor)
        os.close(log)
        _keeper.begin()
    except BaseException:
        ownership.remove_files(folder, "", "")
        raise
    app.start()


def find_magics() -> Any:
    """Return the main magics of this process."""
    return current_keeper().shell.magics_manager.registry["DipMagics"]


# -- tasks of the kernel that is attached


def prepare_cell(number: int, directory: str, settings: dict[str, Any]) -> None:
    """Set the number of the next cell, the working folder, and the settings that the notebook has changed."""
    shell = current_keeper().shell
    for history in (shell.history_manager.input_hist_parsed, shell.history_manager.input_hist_raw):
        history[number:] = [""] * (number - len(history))  # also shortens it: two magics of a cell share its number
    shell.execution_count = number
    with contextlib.suppress(OSError):
        os.chdir(directory)
    for name, value in settings.items():
        setattr(find_magics(), name, value)


def has_group() -> bool:
    """Return True if the group runs."""
    return session.current_group() is not None


def _with_group(function: Callable[..., Any]) -> Callable[..., Any]:
    def call_with_group(*arguments: Any) -> Any:
        group = session.current_group()
        if group is None:
            raise GroupError("the kept group has ended; %makedip starts one")
        return function(group, *arguments)

    return call_with_group


TASKS: dict[str, Callable[..., Any]] = {
    "prepare_cell": prepare_cell,
    "has_group": has_group,
    "world_size": _with_group(lambda group: group.world_size),
    "variable_names": _with_group(Group.variable_names),
    "push_modules": _with_group(kept_objects.push_modules),
    "find_lacking": _with_group(kept_objects.find_lacking),
    "push_file": _with_group(kept_objects.push_file),
    "fetch_file": _with_group(kept_objects.fetch_file),
}
"""Functions that the notebook calls."""
