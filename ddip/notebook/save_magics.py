"""``%dipsave`` saves the ranks' variables, and so the state of a training; ``%dipload`` loads them again."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.errors import BadInput, DdipError
from ddip.notebook import arguments
from ddip.notebook.arguments import with_examples
from ddip.notebook.base_magics import GroupMagics
from ddip.output.tables.tables import size_text
from ddip.protocol.text import list_names, print_reasons

if TYPE_CHECKING:
    from ddip.group.group import Group
    from ddip.notebook.magics import DipMagics

WARNINGS = (signal.SIGUSR1, signal.SIGTERM)
"""Signals with which a scheduler announces that it ends the notebook soon."""
POINT_SECONDS = 25.0
"""Longest wait for a point at which the running loop saves; Slurm and Kubernetes end processes 30 s after SIGTERM."""


@magics_class
class SaveMagics(GroupMagics):
    """The magics that save and load the ranks' variables."""

    def __init__(self, main: DipMagics) -> None:
        super().__init__(main)
        self._former: dict[int, Any] = {}
        """Handlers of the signals that a scheduler sends, while ddip handles them."""
        self._watches = False
        """True if ddip looks after each cell whether a save in the background has failed, or is due."""
        self._left_out: dict[str, str] = {}
        """Reasons why the last save after a cell left variables out."""
        self._is_last = False
        """True if the next SIGTERM ends the notebook: the save before it is over, or SIGTERM has come once."""

    @with_examples(
        "%dipsave run1                save all variables of the ranks",
        "%dipsave run1 model opt      save some",
        "%dipsave run1 --bg           train on while threads write the files",
        "%dipsave run1 --every 10m    save after cells, and at ddip.save_point() in loops",
        "%dipsave --stop              end that",
    )
    @magic_arguments()
    @argument("folder", nargs="?", help="Folder to create, or of an earlier save, which is replaced.")
    @argument("names", nargs="*", help="Variables of the ranks; default: all.")
    @argument("--bg", action="store_true", help="Copy the tensors to the CPU, and write them in the background.")
    @argument(
        "--every",
        metavar="TIME",
        help="Save after cells and at ddip.save_point(), at least this far apart: 90s, 10m or 1h.",
    )
    @argument("--stop", action="store_true", help="End --every.")
    @line_magic
    def dipsave(self, line: str = "") -> None:
        """Save the variables of all ranks: models, optimizers, schedulers, random states and other objects.

        %dipload continues from there in another session, also on another number of ranks. Variables that cannot be
        saved, such as iterators and open files, are named. An earlier save is removed when the new one is complete.
        With --every, ddip also saves when the notebook gets SIGTERM or SIGUSR1, with which schedulers warn.
        """
        args = arguments.parse_line(self.dipsave, "%dipsave", line)
        group = self._main.require_group("%dipsave")
        if args.stop:
            if args.folder or args.every or args.bg:
                raise BadInput(f"%dipsave {line.strip()}: --stop stands alone")
            self._end_schedule()
            return
        folder, names = _checked_folder(args.folder, "%dipsave"), arguments.variable_names(args.names, "%dipsave")
        if names and _is_name_of_variable(group, folder):
            typed = line.strip()
            raise BadInput(
                f"%dipsave {typed}: {folder} is a variable of the ranks; type the folder before it: %dipsave FOLDER "
                f"{typed}, or ./{folder} for a new folder of this name"
            )
        if args.every is not None:
            seconds = arguments.parse_seconds(args.every, "--every", 0.1)
            group.save_every(seconds, folder, names)
            self._left_out = {}
            self._begin_schedule()
            self._main.confirm_done(f"saves to {folder} every {args.every}; %dipsave --stop ends it")
            return
        report = group.save(folder, names, background=args.bg)
        if args.bg:
            self._watch_cells()
        count = len(report["variables"])
        how, when = ("writes", "in the background") if args.bg else ("saved", f"in {report['seconds']:.1f} s")
        self._main.confirm_done(
            f"{how} {count} variable{'s' * (count != 1)} of each rank, {size_text(report['size'])}, to {folder} {when}"
        )
        print_reasons("not saved", report["left_out"])

    @with_examples(
        "%dipload run1                load all variables",
        "%dipload run1 model opt      load some",
    )
    @magic_arguments()
    @argument("folder", nargs="?", help="Folder of %%dipsave.")
    @argument("names", nargs="*", help="Variables to load; default: all.")
    @argument(
        "--anyway",
        action="store_true",
        help="Load what another release of Python or torch has saved, and the rest if a variable cannot be loaded.",
    )
    @line_magic
    def dipload(self, line: str = "") -> None:
        """Load the variables of %dipsave into all ranks; training continues as if it had not stopped.

        Existing models, optimizers and schedulers with the same structure are filled in place; other variables are
        replaced. Loading runs code that the files contain, so files of other users are refused.
        """
        args = arguments.parse_line(self.dipload, "%dipload", line)
        group = self._main.require_group("%dipload")
        folder = _checked_folder(args.folder, "%dipload")
        report = group.load(folder, arguments.variable_names(args.names, "%dipload"), anyway=args.anyway)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report["time"]))
        self._main.confirm_done(f"loaded {list_names(report['loaded']) or 'nothing'} of {folder}, saved {when}")
        if report["in_place"]:
            self._main.confirm_done(f"filled in place: {list_names(report['in_place'])}")
        print_reasons("not loaded", {**report["not_loaded"], **report["kept"]})
        if report["holders"]:
            names = list_names(report["holders"])
            print(f"ddip: still in use from before the load, in {names}: run the cells that define them again")

    # -- saves by schedule

    def _watch_cells(self) -> None:
        if not self._watches:
            self._watches = True
            self.shell.events.register("post_run_cell", self._after_cell)

    def _begin_schedule(self) -> None:
        self._watch_cells()
        if not self._former and threading.current_thread() is threading.main_thread():
            for number in WARNINGS:
                self._former[number] = signal.signal(number, self._handle_warning)

    def _end_schedule(self) -> None:
        if (group := self._main.running_group) is not None:
            group.save_every(None)
        for number, handler in self._former.items():
            signal.signal(number, handler)
        self._former.clear()

    def close(self) -> None:
        """End the schedule when the extension is unloaded."""
        self._end_schedule()
        if self._watches:
            self.shell.events.unregister("post_run_cell", self._after_cell)

    def _after_cell(self, result: Any) -> None:
        group = self._main.running_group
        if group is None:
            return
        try:
            if error := group.saves.background_error():
                print(f"ddip: the last save in the background failed, and the former save stays: {error}")
            report = group.save_if_due()
            if report is not None and report["left_out"] != self._left_out:  # once, not after each cell
                self._left_out = report["left_out"]
                print_reasons("not saved", report["left_out"])
        except DdipError as error:
            print(f"ddip: {error}")

    def _handle_warning(self, number: int, frame: FrameType | None) -> None:
        if self._is_last and number == signal.SIGTERM:
            signal.signal(number, self._former.get(number, signal.SIG_DFL))
            os.kill(os.getpid(), number)
        else:
            self._is_last = self._is_last or number == signal.SIGTERM
            threading.Thread(target=self._save_before_end, args=(number,), daemon=True).start()

    def _save_before_end(self, number: int) -> None:
        """Save, then end the notebook if it was asked to end."""
        group = self._main.running_group
        try:
            if group is not None:
                group.save_before_end(POINT_SECONDS)
        except Exception as error:  # the ranks may end at the same time, as all processes of the job get the signal
            print(f"ddip: nothing was saved: {error}")
        if number == signal.SIGTERM:
            os.kill(os.getpid(), number)


def _checked_folder(typed: str | None, magic: str) -> str:
    if typed is None:
        raise BadInput(f"{magic}: type a folder, such as {magic} run1")
    return typed


def _is_name_of_variable(group: Group, folder: str) -> bool:
    """Return whether a typed `folder` does not exist, and is the name of a variable on rank 0."""
    return folder.isidentifier() and not os.path.exists(folder) and group.has_name(folder)
