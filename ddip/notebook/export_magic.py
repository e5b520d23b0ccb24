"""``%dipexport`` writes the distributed cells of the session as a script for torchrun."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.magic import Magics, line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.errors import BadInput
from ddip.notebook import arguments, executions
from ddip.notebook.arguments import with_examples

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.export.record import Session
    from ddip.group.group import Group
    from ddip.notebook.magics import DipMagics


@magics_class
class ExportMagics(Magics):
    """The magic that writes a script; it uses the group of the main magics."""

    shell: InteractiveShell

    def __init__(self, main: DipMagics) -> None:
        super().__init__(shell=main.shell)
        self._main = main
        self.executions = executions.Executions(main.shell)

    @with_examples(
        "%dipexport train.py                       all cells since the group started",
        "%dipexport train.py --check model         run it, and compare model with the session's",
        "%dipexport train.py --cells 3-9,12        these executions only",
        "%dipexport train.py --data                with pushed values in a file beside it",
    )
    @magic_arguments()
    @argument("path", nargs="?", metavar="SCRIPT", help="File to write, such as train.py.")
    @argument("--cells", metavar="CELLS", help="Numbers of the executions to export: 3-9,12; default: all.")
    @argument("--last", action="store_true", help="Take each cell once, in its last version; the numbers may differ.")
    @argument("--force", action="store_true", help="Overwrite an existing file.")
    @argument(
        "--data", action="store_true", help="Write pushed values to a file, instead of the notebook's code for them."
    )
    @argument(
        "--partial",
        action="store_true",
        help="Write raise NotImplementedError for code that has no translation, instead of refusing it.",
    )
    @argument(
        "--check",
        nargs="*",
        metavar="NAME",
        help="Run the script under torchrun, and compare these variables; default: all modules.",
    )
    @line_magic
    def dipexport(self, line: str = "") -> None:
        """Write the cells that ran on the ranks since the group started as a script for torchrun.

        The script repeats the executions in their order, from the random states of the ranks' start. Failed cells, and
        cells whose results nothing later reads, stay as comments.
        """
        from ddip.export import check, script, selection
        from ddip.export.record import Choice
        from ddip.sharded import values

        args = arguments.parse_line(self.dipexport, "%dipexport", line)
        path = _checked_path(args.path, args.force)
        group = self._main.require_group("%dipexport")
        session, remarks = self._read_session(group)
        numbers = None if args.cells is None else _checked_numbers(args.cells, session)
        names = _checked_names(args.check or [], group)
        if args.check is not None and group.request.hosts:
            raise BadInput("--check: torchrun would start all ranks on this machine, and the group is on other hosts")
        expected = [] if args.check is None else self._fetch_results(group, names)
        results = names or (sorted(values.packed_names(expected[0])) if expected else [])
        choice = Choice(numbers, args.last, args.partial, frozenset(results), args.data)
        plan = selection.plan_script(session, choice)
        if plan.problems and not args.partial:
            raise BadInput(_refusal_text(path, plan.problems))
        if not plan.steps:
            raise BadInput(f"%dipexport {path}: no cell that ran on the ranks has a result; {path} was not written")
        data = f"{path.stem}.data.pickle" if args.data and plan.stored else ""
        text = script.write_script(plan, session, choice, path.name, data=data)
        _ensure_valid(text, path)
        text = check.keep_style(text, path)
        pushed = self._packed_values(plan.stored) if data else b""
        path.write_text(text)
        if data:
            path.with_name(data).write_bytes(pushed)
        for remark in [*remarks, *plan.problems]:
            print(f"ddip: {remark}")
        if args.last:
            print("ddip: each cell appears once, so the numbers may differ from those of the session")
        count = len({step.number for step in plan.steps})
        left = len(plan.left_out)
        more = f", {left} left out as comments" if left else ""
        self._main.confirm_done(f"wrote {path}: {count} cells{more}; torchrun --nproc-per-node {session.size} {path}")
        if args.check is not None:
            text = script.write_script(plan, session, choice, path.name, check.last_lines(results), data)
            print(check.compare_script(text, path, session.size, expected))

    def _read_session(self, group: Group) -> tuple[Session, list[str]]:
        """Return the session since the group started, and remarks on what the script does not repeat."""
        from ddip.export.record import Session
        from ddip.protocol import on_rank

        with group.lifecycle.turn:
            group.lifecycle.ensure_ready_for_cell()
            facts = group.ranks.ask(range(group.world_size), on_rank.start_seed())
        started = group.lifecycle.started
        cells = [cell for cell in self._main.history if cell.submitted >= started]
        seeds, threads = zip(*facts, strict=True)
        session = Session(
            tuple(seeds),
            group.spec.backend,
            "cuda" if group.spec.on_gpus else "cpu",
            threads[0],
            group.request.app,
            self.executions.list_executions(self._main.history, started),
        )
        remarks = [
            f"{change.text}: the script does not repeat this; --check shows whether the numbers are equal"
            for change in self._main.history.changes
            if change.at >= started and not change.resizes and not self.executions.has_pushed(change.pushed_by)
        ]
        remarks += [
            f"cell {cell.number} {cell.outcome_text}: the script leaves it out, with all that it had done before"
            for cell in cells
            if cell.outcome not in ("ok", None)
        ]
        return session, remarks

    def _packed_values(self, names: list[str]) -> bytes:
        import cloudpickle

        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise BadInput(f"%dipexport --data: the notebook has no variable {', '.join(missing)}; push another one")
        try:
            return bytes(cloudpickle.dumps({name: self.shell.user_ns[name] for name in names}))
        except Exception as error:
            raise BadInput(f"%dipexport --data: {', '.join(names)} cannot be pickled: {error}") from None

    def _fetch_results(self, group: Group, names: list[str]) -> list[bytes]:
        """Return each rank's values of `names`, or of all modules; raises BadInput for one that has no values."""
        from ddip.protocol import on_rank

        with group.lifecycle.turn:
            group.lifecycle.ensure_ready_for_cell()
            answers = group.ranks.ask(range(group.world_size), on_rank.pack_results(names))
        for rank, (_, refused) in enumerate(answers):
            for name, why in refused.items():
                raise BadInput(f"--check {name}: {why}, on rank {rank}; leave it out")
        return [packed for packed, _ in answers]


def _checked_path(typed: str | None, force: bool) -> Path:
    if typed is None:
        raise BadInput("%dipexport: type the name of the script, such as %dipexport train.py")
    path = Path(typed).expanduser()
    if path.suffix != ".py":
        raise BadInput(f"%dipexport {typed}: type a name that ends with .py, such as %dipexport {path.stem}.py")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise BadInput(f"%dipexport {typed}: files cannot be written to the folder {path.parent}; type another folder")
    if path.exists() and not force:
        raise BadInput(f"%dipexport {typed}: the file exists; --force overwrites it")
    return path


def _checked_numbers(typed: str, session: Session) -> frozenset[int]:
    numbers = executions.parse_numbers(typed, max((one.number for one in session.executions), default=0))
    on_ranks = {one.number for one in session.executions if one.ranks is not None}
    known = {one.number for one in session.executions}
    unknown = sorted(numbers - known)
    if not numbers & on_ranks or (unknown and "-" not in typed):
        what = f"no cell {unknown[0]} has run" if unknown else "none of these cells ran on the ranks"
        raise BadInput(f"--cells {typed}: {what} since the group started; %dipcells lists the cells")
    return numbers


def _checked_names(typed: list[str], group: Group) -> list[str]:
    names = [name for word in typed for name in word.split(",") if name]
    known = group.variable_names("")
    for name in names:
        if name not in known:
            raise BadInput(
                f"--check {name}: rank 0 has no variable {name}{arguments.suggest_names('--check', [name], known)}"
            )
    return names


def _refusal_text(path: Path, problems: list[str]) -> str:
    listed = "".join(f"\n  {problem}" for problem in problems)
    return (
        f"%dipexport {path}: not written, since the script would not repeat the session:{listed}\n--partial writes it"
    )


def _ensure_valid(text: str, path: Path) -> None:
    try:
        compile(text, str(path), "exec")
    except SyntaxError as error:
        raise BadInput(f"%dipexport {path}: not written, since {(error.text or '').strip()!r} {error.msg}") from None
