"""Magics for running and ended cells: ``%dipcells``, ``%dipcell``, ``%dipwait``, ``%dipstop``, ``%dipstack``,
``%dipdebug`` and ``%dipstatus``; ``%diprun``, whose cell is a script; ``%dipper``."""

from __future__ import annotations

import json
import keyword
import shlex
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.cluster import folder
from ddip.errors import STOPPED, BadInput, CellError, GroupError, RankError
from ddip.notebook import arguments, script_line
from ddip.notebook.arguments import with_examples
from ddip.notebook.base_magics import GroupMagics
from ddip.notebook.first_lines import skip_comments
from ddip.output.area import notify

if TYPE_CHECKING:
    from ddip.group.cells.cell import Cell
    from ddip.group.cells.history import History
    from ddip.group.group import Group
    from ddip.notebook.magics import DipMagics
    from ddip.protocol.status_types import Status

LISTED = 20
"""Number of cells listed without ``-a``."""
WAITS = "%dipwait"


def status_now(group: Group | None, history: History) -> Status:
    """Return the status of `group`, which must be running or None, and of the last cells.

    Asks all ranks, which answer even during a cell. `history` has the cells if there is no group.
    """
    with folder.left_out():
        from ddip.group.status import LISTED, group_status, last_cells

    return group_status(last_cells(list(history), LISTED)) if group is None else group.status()


def status_text(group: Group | None, history: History) -> str:
    """Return the state of the running `group`, if any, and the last cells of `history`, as text for people.

    Asks all ranks, which answer even during a cell.
    """
    with folder.left_out():
        from ddip.group.status import LISTED, last_cells
        from ddip.output.tables.tables import cells_table, info_table

    cells = last_cells(list(history), LISTED)
    blocks = ["there is no group"]
    if group is not None:
        blocks = ["\n".join([group.describe().removeprefix("ddip: "), info_table(group.info()), *group.remarks()])]
    if cells:
        blocks.append(cells_table([cell.row() for cell in cells]))
    errors = {rank: (cell, error) for cell in cells for rank, error in cell.errors.items()}
    lines = [f"rank {rank}, cell {cell.number}: {_error_text(error)}" for rank, (cell, error) in sorted(errors.items())]
    if lines:
        blocks.append("\n".join(["last errors", *lines]))
    return "\n\n".join(blocks)


def _error_text(error: RankError) -> str:
    if error.waited:
        return f"was blocked in {error.waited}"
    return "was stopped" if error.name in STOPPED else str(error)


@magics_class
class CellMagics(GroupMagics):
    """The magics for cells; they use the group of the main magics."""

    def __init__(self, main: DipMagics) -> None:
        super().__init__(main)
        main.shell.events.register("pre_run_cell", self._report_failures)

    def close(self) -> None:
        """Remove the event handler from IPython."""
        self.shell.events.unregister("pre_run_cell", self._report_failures)

    @with_examples(
        "%diprun train.py --lr 0.1            run a script on every rank",
        "%diprun -m package.train --lr 0.1    run a module, as python -m does",
        "%diprun -S all train.py              show all ranks' output, in tabs",
        "%diprun --bg train.py                run it in the background",
    )
    @magic_arguments()
    @argument("-r", "--ranks", metavar="RANK", help="Run on these ranks only: 0,2 or 1-3.")
    @argument("-S", "--see", metavar="RANK", help="Show the output of these ranks, or all; default 0.")
    @argument("--bg", action="store_true", help="Run in the background, and return at once; %%dipwait waits for it.")
    @argument(
        "--timeout",
        metavar="SECONDS",
        help="Stop the script after this time: it fails, and the ranks keep all variables.",
    )
    @argument("-m", dest="module", action="store_true", help="SCRIPT is the name of a module, as for python -m.")
    @argument("script", metavar="SCRIPT", nargs="?", help="Python file, relative to the notebook's folder.")
    @argument("args", metavar="ARGUMENT", nargs="...", help="Arguments of the script; ddip reads no options in them.")
    @line_magic
    def diprun(self, line: str = "") -> None:
        """Run a script for torchrun unchanged on every rank of the group, as one cell.

        The script has its own __main__, like a script that %run runs, and its own command line. Its variables are then
        variables of the ranks, even if it fails. For other options of %%dip, such as --profile, type the line without
        options in a %%dip cell.
        """
        options, words = script_line.split_line(line, self.diprun.parser)
        args = arguments.parse_line(self.diprun, "%diprun", options)
        group = self._main.require_group("%diprun")
        if self._main.autodipper.state != "off":
            self._main.refuse_names_of_ranks(f"%diprun {line}")
        size = group.world_size
        ranks = list(range(size)) if args.ranks is None else arguments.parse_ranks([args.ranks], size, "-r")
        see = None if args.see is None else [args.see]
        shown = arguments.ranks_to_show(see, ranks, size, self._main.show_ranks)
        seconds = None if args.timeout is None else arguments.parse_seconds(args.timeout, "--timeout", 0.1)
        code = shlex.join(["%diprun", *(["-m"] if args.module else []), *words])
        try:
            if args.bg:
                group.start(code, ranks, show_ranks=shown, timeout=seconds)
            else:
                tell = self._main.autodipper.state != "off"
                group.run(code, ranks, show_ranks=shown, timeout=seconds, tell=tell)
        except CellError as error:
            self._main.hints.explain(error)
            raise

    @magic_arguments()
    @argument("-a", "--all", action="store_true", help=f"List all known cells, not only the last {LISTED}.")
    @line_magic
    def dipcells(self, line: str = "") -> None:
        """List running, queued and ended cells with number, ranks, state, seconds and first line."""
        from ddip.output.tables.tables import cells_table

        args = arguments.parse_line(self.dipcells, "%dipcells", line)
        cells = list(self._main.history)
        shown = cells if args.all else [cell for cell in cells[:-LISTED] if not cell.done.done()] + cells[-LISTED:]
        print(cells_table([cell.row() for cell in shown]) if shown else "ddip: no cell has run on ranks yet")

    @with_examples("%dipstatus", "%dipstatus --json          print JSON, for programs")
    @magic_arguments()
    @argument("--json", action="store_true", help="Print JSON; docs/for_programs.md describes it.")
    @line_magic
    def dipstatus(self, line: str = "") -> None:
        """Show the state of the group, even while a cell runs.

        It lists the ranks, the last cells, and the last error of each rank.
        """
        args = arguments.parse_line(self.dipstatus, "%dipstatus", line)
        group, history = self._main.running_group, self._main.history
        if args.json:
            print(json.dumps(status_now(group, history), ensure_ascii=False))
        else:
            print(status_text(group, history))

    @with_examples("%dipcell 12", "%dipcell          the last cell")
    @magic_arguments()
    @argument("number", nargs="?", metavar="CELL", help="Number of the cell; default: the last one.")
    @line_magic
    def dipcell(self, line: str = "") -> None:
        """Show the whole output of a cell again. If the cell still runs, later output also appears here."""
        from ddip.group.cells.again import show_again

        args = arguments.parse_line(self.dipcell, "%dipcell", line)
        cells = list(self._main.history)
        if args.number is None and not cells:
            raise BadInput("%dipcell: no cell has run on ranks yet")
        comms = None if (group := self._main.running_group) is None else group.comms
        show_again(cells[-1] if args.number is None else self._find_cell("%dipcell", args.number), comms)

    @with_examples("%dipwait 12", "%dipwait          all background cells that no one has waited for")
    @magic_arguments()
    @argument("numbers", nargs="*", metavar="CELL", help="Numbers of cells; default: all background cells.")
    @argument(
        "-t", "--timeout", metavar="SECONDS", help="Time to wait; after it, %%dipwait fails and the cell continues."
    )
    @line_magic
    def dipwait(self, line: str = "") -> None:
        """Wait for background cells to end, and raise the error of a failed one.

        Without a number, it waits for all background cells that no one has waited for, and raises the error of the
        first that has failed. The stop button ends the wait; the cells continue.
        """
        args = arguments.parse_line(self.dipwait, "%dipwait", line)
        seconds = None if args.timeout is None else arguments.parse_seconds(args.timeout, "-t", 0)
        numbers = [number for word in args.numbers for number in word.split(",") if number]
        cells = [
            cell for number in numbers for cell in self._find_cells("%dipwait", number)
        ] or self._unreported_cells()
        failed = [cell for cell in cells if not self._wait_for(cell, seconds)]
        if failed:
            raise self._failure_of(failed)

    @with_examples("%dipstop 12", "%dipstop          the background cell")
    @magic_arguments()
    @argument("number", nargs="?", metavar="CELL", help="Number of the cell; default: the background cell.")
    @line_magic
    def dipstop(self, line: str = "") -> None:
        """Stop a background cell, as the stop button stops other cells. The ranks keep their variables."""
        args = arguments.parse_line(self.dipstop, "%dipstop", line)
        if args.number is not None:
            cell = self._find_cell("%dipstop", args.number)
            if cell.done.done():
                raise BadInput(f"%dipstop {args.number}: it has already ended ({cell.outcome_text})")
        else:
            active = [cell for cell in self._main.history.background if not cell.done.done()]
            running = [cell for cell in active if cell.state == "running"] or active
            if len(running) != 1:
                if not running:
                    raise BadInput("%dipstop: no cell runs in the background; %dipcells lists the earlier ones")
                ways = " or ".join(f"%dipstop {cell.number}" for cell in running)
                raise BadInput(f"%dipstop: {len(running)} cells run in the background; type {ways}")
            (cell,) = running
        cell.stop()
        what = f"{cell.outcome_text} after {cell.seconds:.1f} s"
        self._main.confirm_done(f"{cell.text} {'left the queue' if cell.outcome == 'not_run' else what}")

    @magic_arguments()
    @argument("-v", "--verbose", action="store_true", help="Show the whole stacks of all threads.")
    @line_magic
    def dipstack(self, line: str = "") -> None:
        """Show the current position of each rank: its innermost function, and the line of its cell."""
        from ddip.output.tables.tables import places_text, stacks_text

        args = arguments.parse_line(self.dipstack, "%dipstack", line)
        group = self._main.require_group("%dipstack")
        stacks = group.stacks()
        places = {rank: None if stack is None else stack.place for rank, stack in stacks.items()}
        print(stacks_text(stacks) if args.verbose else places_text(places))

    @with_examples(
        "%dipdebug          the last error, or the background cell that waits",
        "%dipdebug -r 2",
        "%dipdebug --dap    attach an IDE, such as VS Code; %dipdebug --off ends this",
    )
    @magic_arguments()
    @argument("number", nargs="?", metavar="CELL", help="Number of a background cell that waits at a breakpoint.")
    @argument("-r", "--rank", metavar="RANK", help="Rank whose error to debug; default: the first that has failed.")
    @argument("--dap", action="store_true", help="Let an IDE attach to all ranks, or those of -r; print launch.json.")
    @argument("--off", action="store_true", help="End --dap on all ranks: IDEs detach.")
    @line_magic
    def dipdebug(self, line: str = "") -> None:
        """Open the debugger at the error of the last cell, or at the breakpoint where a background cell waits.

        To keep the frames of an error until the next cell, run %pdb on in a %%dip cell, or set
        %config DipMagics.keep_frames = True. In a foreground cell, a breakpoint opens the debugger by itself.
        --dap opens ports for an IDE instead, which slows Python code on the ranks down until --off.
        """
        args = arguments.parse_line(self.dipdebug, "%dipdebug", line)
        if args.number == "off" and args.dap:
            raise BadInput(f"%dipdebug {line.strip()}: type %dipdebug --off to end --dap")
        if args.number is not None and (args.dap or args.off):
            raise BadInput(
                f"%dipdebug {line.strip()}: an IDE attaches to ranks, not to a cell; leave out {args.number}"
            )
        group = self._main.require_group("%dipdebug")
        if args.off:
            group.end_ide()
            self._main.confirm_done("no IDE can attach to the ranks any more")
        elif args.dap:
            ranks = None if args.rank is None else arguments.parse_ranks([args.rank], group.world_size, "-r")
            print(group.serve_ide(ranks))
        else:
            number = None if args.number is None else self._find_cell("%dipdebug", args.number).number
            rank = None if args.rank is None else arguments.parse_rank(args.rank, group.world_size, "%dipdebug -r")
            group.debug(rank, number)

    @with_examples("%dipper g")
    @magic_arguments()
    @argument("name", nargs="?", metavar="VARIABLE", help="Variable of the notebook to assign.")
    @line_magic
    def dipper(self, line: str = "") -> None:
        """Assign the `Group` object of the magics to a variable."""
        name = arguments.parse_line(self.dipper, "%dipper", line).name or ""
        if not name.isidentifier() or keyword.iskeyword(name):
            raise BadInput(f"{f'%dipper {name}'.rstrip()}: type the name of a variable, such as %dipper g")
        self.shell.push({name: self._main.require_group("%dipper")})

    # -- helpers

    def _find_cell(self, magic: str, typed: str) -> Cell:
        """Return the cell whose number was `typed` after `magic`; raises BadInput."""
        if not typed.isdecimal():
            raise BadInput(f"{magic} {typed}: type the number of a cell, such as {magic} 12; %dipcells lists them")
        cell = self._main.history.find(int(typed))
        if cell is None:
            numbers = ", ".join(str(known.number) for known in list(self._main.history)[-5:])
            known = f"the last are {numbers}" if numbers else "none was yet"
            raise BadInput(f"{magic} {typed}: no cell with this number has run on ranks; {known}")
        return cell

    def _find_cells(self, magic: str, typed: str) -> list[Cell]:
        """Return the cells with a number; a notebook cell may start several with ``Group.start``."""
        last = self._find_cell(magic, typed)
        return [cell for cell in self._main.history.background if cell.number == last.number] or [last]

    def _unreported_cells(self) -> list[Cell]:
        """Return the background cells that no one has waited for to the end."""
        return [cell for cell in self._main.history.background if not cell.is_outcome_known]

    def _wait_for(self, cell: Cell, seconds: float | None) -> bool:
        """Wait for the cell, and return True if it succeeded; raises GroupError after `seconds`."""
        from ddip.output.cells.background_page import BackgroundOutput

        shown = cell.output
        waiting = shown.shown_by_the_cell_that_waits() if isinstance(shown, BackgroundOutput) else nullcontext()
        with waiting:
            if not cell.wait_for_end(seconds):
                ways = f"%dipwait {cell.number} waits longer, %dipstop {cell.number} ends it"
                if asking := cell.find_asking_ranks():
                    raise GroupError(cell.busy_text(asking))
                raise GroupError(f"{cell.text} still runs after {seconds:g} s: {ways}")
        return cell.error is None

    def _failure_of(self, failed: list[Cell]) -> BaseException:
        """Return the exception of the first failed cell, with hints; print a notice about the others."""
        first, others = failed[0].error, [str(cell.number) for cell in failed[1:]]
        assert first is not None
        if others:
            notify(f"besides {failed[0].text}, {', '.join(others)} also failed; %dipwait NUMBER shows each error")
        if isinstance(first, CellError) and not failed[0].explained:
            failed[0].explained = True
            self._main.hints.explain(first)
        return first

    def _report_failures(self, info: Any) -> None:
        """Print failures in the background since the last cell; IPython calls this before each cell."""
        if skip_comments(str(getattr(info, "raw_cell", ""))).startswith(WAITS) or self._main.autodipper.hidden():
            return
        for cell in self._unreported_cells():
            if cell.done.done() and cell.error is not None and not cell.noted:
                cell.noted = True
                why = cell.message.partition("\n")[0]
                what = why if cell.outcome == "not_run" else f"{cell.text} {cell.outcome_text}: {why}"
                notify(f"{what}; {WAITS} {cell.number} shows all")
