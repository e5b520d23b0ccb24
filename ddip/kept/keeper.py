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
from pathlib import Path
from typing import Any

import cloudpickle
import setproctitle
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from ddip.cluster.processes import ownership
from ddip.cluster.processes.processes import Proc
from ddip.errors import GroupError
from ddip.group import session
from ddip.kept import kept_folder
from ddip.kept.cell_records import CellRecords
from ddip.kept.kept_folder import KeptGroup

POLL_SECONDS = 0.5
"""Time between two looks for a kernel that holds the claim."""
SHOWN = ("stream", "display_data", "update_display_data", "execute_result", "error", "clear_output")
"""Types of the messages to record."""


class Keeper:
    """The state of this process: its record, what its cells have shown, and for how long it has been alone."""

    def __init__(self, app: IPKernelApp, name: str, seconds: float, folder: Path) -> None:
        self._app = app
        self.shell: Any = app.shell
        me = Proc.of(os.getpid())
        self.kept = KeptGroup(name, me.pid, me.started, seconds, str(folder))
        self._records = CellRecords()
        self._alone_since = time.time()
        self._is_alone = True
        self._is_ending = threading.Lock()
        self.noted: dict[str, Any] = {}
        """The variables at the last `note_names`."""

    def record_messages(self) -> None:
        """Record from now on what the session sends for pages."""
        session: Any = self._app.session
        send, me = session.send, os.getpid()

        def send_and_record(stream: Any, msg_or_type: Any, *arguments: Any, **options: Any) -> Any:
            message = send(stream, msg_or_type, *arguments, **options)
            if message and message["header"]["msg_type"] in SHOWN and os.getpid() == me:
                request = message["parent_header"].get("msg_id", "")
                self._records.add(request, self.count_cells() - 1, message["header"]["msg_type"], message["content"])
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
        while True:
            time.sleep(POLL_SECONDS)
            is_alone = kept_folder.can_claim(Path(self.kept.folder))
            if is_alone and not self._is_alone:
                self._alone_since = time.time()
            self._is_alone = is_alone
            if is_alone and time.time() - self._alone_since > self.kept.seconds:
                self.end()

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
        """Return what a kernel that has just attached shows: the number of the next cell, records, running cells."""
        group = session.current_group()
        cells = [] if group is None else [cell for cell in group.cells if cell.outcome is None]
        since = self._alone_since - POLL_SECONDS  # when it may have begun
        records = self._records.select(since, {cell.number for cell in cells})
        return {
            "next": self.count_cells(),
            "about": "" if group is None else group.describe(),
            "running": sorted({cell.number for cell in cells}),
            "records": records,
        }


class KeeperKernel(IPythonKernel):  # type: ignore[misc]
    """IPython's kernel, which also answers a kernel that attaches while the keeper runs a cell."""

    control_msg_types = [
        *IPythonKernel.control_msg_types,
        "ddip_attach_request",
        "ddip_call_request",
        "ddip_end_request",
    ]

    def ddip_attach_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Answer with `Keeper.attach_report`."""
        assert self.session is not None
        self.session.send(stream, "ddip_attach_reply", current().attach_report(), parent, ident=ident)

    def ddip_call_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """Answer with the result of ``Group.try_call``, such as the completions of a rank."""
        group, content, answer = session.current_group(), parent["content"], None
        if group is not None:
            with contextlib.suppress(GroupError):
                answer = group.try_call(pickle.loads(base64.b64decode(content["call"])), content["seconds"])
        assert self.session is not None
        self.session.send(stream, "ddip_call_reply", {"answer": answer}, parent, ident=ident)

    def ddip_end_request(self, stream: Any, ident: Any, parent: dict[str, Any]) -> None:
        """End the keeper and its group."""
        threading.Thread(target=current().end, name="ddip-end").start()


_keeper: Keeper | None = None
"""The keeper of this process, from its start on."""


def current() -> Keeper:
    """Return the keeper of this process."""
    assert _keeper is not None
    return _keeper


def main() -> None:
    """Run the keeper until it ends itself."""
    global _keeper
    about = json.loads(os.environ.pop(kept_folder.ABOUT))
    setproctitle.setproctitle(f"ddip keeper ({about['name']})")
    folder = ownership.make_run_folder()
    try:
        (folder / kept_folder.CLAIM).touch(0o600)
        app = IPKernelApp.instance(
            kernel_class=KeeperKernel,
            transport="ipc",
            ip=str(folder / "k"),
            connection_file=str(folder / kept_folder.CONNECTION),
            quiet=True,
        )
        app.config.HistoryManager.hist_file = ":memory:"
        app.initialize([])
        _keeper = Keeper(app, about["name"], about["seconds"], folder)
        _keeper.shell.extension_manager.load_extension("ddip")
        _keeper.record_messages()
        signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=current().end).start())
        _keeper.begin()
    except BaseException:
        ownership.remove_files(folder, "", "")
        raise
    app.start()


# -- called by the kernel that is attached, as code between its cells


def prepare_cell(number: int, directory: str, settings: dict[str, Any]) -> None:
    """Prepare for the cell `number` of the notebook: its number, its folder, and the changed settings of ddip."""
    shell = current().shell
    for history in (shell.history_manager.input_hist_parsed, shell.history_manager.input_hist_raw):
        history[number:] = [""] * (number - len(history))  # also shortens it: two magics of a cell share its number
    shell.execution_count = number
    with contextlib.suppress(OSError):
        os.chdir(directory)
    magics = shell.magics_manager.registry["DipMagics"]
    for name, value in settings.items():
        setattr(magics, name, value)


def has_group() -> bool:
    """Return True if the group runs."""
    return session.current_group() is not None


def take_values(path: str) -> None:
    """Take over the notebook's variables from a file, until `forget_names`."""
    note_names()
    current().shell.user_ns.update(cloudpickle.loads(Path(path).read_bytes()))


def note_names() -> None:
    """Note the variables that exist now."""
    current().noted = dict(current().shell.user_ns)


def _find_new() -> list[str]:
    namespace, noted = current().shell.user_ns, current().noted
    new = [
        name for name, value in namespace.items() if not name.startswith("_") and noted.get(name, noted) is not value
    ]
    return [name for name in new if name not in ("In", "Out")]


def forget_names() -> None:
    """Remove the variables that were created since `note_names`."""
    for name in _find_new():
        del current().shell.user_ns[name]


def give_values(path: str) -> None:
    """Write the variables that were created since `note_names` to a file, and remove them."""
    namespace = current().shell.user_ns
    Path(path).write_bytes(cloudpickle.dumps({name: namespace[name] for name in _find_new()}))
    forget_names()
