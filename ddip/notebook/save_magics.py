"""``%dipsave`` saves the ranks' variables, and so the state of a training; ``%dipload`` loads them again."""

from __future__ import annotations

import time
from collections.abc import Mapping

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.errors import BadInput
from ddip.notebook import arguments
from ddip.notebook.arguments import with_examples
from ddip.notebook.group_magics import GroupMagics
from ddip.output.tables.tables import size_text

SHOWN_NAMES = 8


@magics_class
class SaveMagics(GroupMagics):
    """The magics that save and load the ranks' variables."""

    @with_examples(
        "%dipsave run1                save all variables of the ranks",
        "%dipsave run1 model opt      save some",
        "%dipsave run1 --bg           train on while threads write the files",
    )
    @magic_arguments()
    @argument("folder", nargs="?", help="Folder to create, or of an earlier save, which is replaced.")
    @argument("names", nargs="*", help="Variables of the ranks; default: all.")
    @argument("--bg", action="store_true", help="Copy the tensors to the CPU, and write them in the background.")
    @line_magic
    def dipsave(self, line: str = "") -> None:
        """Save the variables of all ranks: models, optimizers, schedulers, random states and other objects.

        %dipload continues from there in another session, also on another number of ranks. Variables that cannot be
        saved, such as iterators and open files, are named. An earlier save is removed when the new one is complete.
        """
        args = arguments.parse_line(self.dipsave, "%dipsave", line)
        group = self._main.require_group("%dipsave")
        folder = _checked_folder(args.folder, "%dipsave")
        report = group.save(folder, arguments.variable_names(args.names, "%dipsave"), background=args.bg)
        count = len(report["variables"])
        how = "writing" if args.bg else "saved"
        self._main.confirm_done(
            f"{how} {count} variable{'s' * (count != 1)} of each rank, {size_text(report['size'])}, to {folder} in "
            f"{report['seconds']:.1f} s"
        )
        _print_reasons("not saved", report["left_out"])

    @with_examples(
        "%dipload run1                load all variables",
        "%dipload run1 model opt      load some",
    )
    @magic_arguments()
    @argument("folder", nargs="?", help="Folder of %%dipsave.")
    @argument("names", nargs="*", help="Variables to load; default: all.")
    @argument("--anyway", action="store_true", help="Load what another release of Python or torch has saved.")
    @line_magic
    def dipload(self, line: str = "") -> None:
        """Load the variables of %dipsave into all ranks, so that a training continues as if it had not stopped.

        Existing models, optimizers and schedulers with the same structure are filled in place; other variables are
        replaced. Loading runs code that the files contain, so files of other users are refused.
        """
        args = arguments.parse_line(self.dipload, "%dipload", line)
        group = self._main.require_group("%dipload")
        folder = _checked_folder(args.folder, "%dipload")
        report = group.load(folder, arguments.variable_names(args.names, "%dipload"), anyway=args.anyway)
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report["time"]))
        self._main.confirm_done(f"loaded {_list_names(report['loaded'])} of {folder}, saved {when}")
        if report["in_place"]:
            self._main.confirm_done(f"filled in place: {_list_names(report['in_place'])}")
        _print_reasons("not loaded", {**report["not_loaded"], **report["kept"]})
        if report["holders"]:
            names = _list_names(report["holders"])
            print(f"ddip: {names}: holds a model or optimizer from before the load; run its cell again")


def _checked_folder(typed: str | None, magic: str) -> str:
    if typed is None:
        raise BadInput(f"{magic}: type a folder, such as {magic} run1")
    return typed


def _list_names(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def _print_reasons(what: str, reasons: Mapping[str, str]) -> None:
    """Print the variables by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        print(f"ddip: {what}: {_list_names(names)}: {why}")
