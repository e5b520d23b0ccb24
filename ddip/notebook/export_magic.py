"""``%dipexport`` writes the distributed cells of the session as a script for torchrun."""

from __future__ import annotations

import os
import pickle
import re
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.cluster import folder
from ddip.cluster.hosts import slurm
from ddip.errors import BadInput
from ddip.notebook import arguments, executions
from ddip.notebook.arguments import with_examples
from ddip.notebook.base_magics import GroupMagics

if TYPE_CHECKING:
    from ddip.export.job_files import JobShape
    from ddip.export.record import Session
    from ddip.export.selection import Plan, Refusal
    from ddip.group.group import Group
    from ddip.notebook.magics import DipMagics


DATA_SUFFIX = ".data.pickle"
"""End of the name of the file with pushed values."""
STAR = re.compile(r"^[ \t]*from[ \t]+([\w.]+)[ \t]+import[ \t]+\*", re.MULTILINE)
"""An import of all names of a module."""


@magics_class
class ExportMagics(GroupMagics):
    """The magic that writes a script; it uses the group of the main magics."""

    def __init__(self, main: DipMagics) -> None:
        super().__init__(main)
        self._executions = executions.Executions(main.shell)

    def close(self) -> None:
        """Stop noting executions."""
        self._executions.close()

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
        help="Run the script under torchrun, and compare these variables and all modules.",
    )
    @argument(
        "--slurm", action="store_true", help="Also write a batch script, train.sbatch, for hosts like the group's."
    )
    @argument(
        "--k8s", action="store_true", help="Also write a Job for Kubernetes, train.yaml, for hosts like the group's."
    )
    @line_magic
    def dipexport(self, line: str = "") -> None:
        """Write the cells that ran on the ranks since the group started as a script for torchrun.

        The script repeats the executions in their order, from the random states of the ranks' start. If ddip knows a
        reason why a part may not be repeated equally, it names the part with its cell and writes nothing.
        """
        with folder.left_out():
            from ddip.export import check, script, selection
            from ddip.export.record import Choice
            from ddip.sharded import values

        args = arguments.parse_line(self.dipexport, "%dipexport", line)
        path, is_checked = _checked_path(args.path, args.force), args.check is not None
        for suffix in [".sbatch"] * args.slurm + [".yaml"] * args.k8s + [DATA_SUFFIX] * args.data:
            _check_free(str(path.with_suffix(suffix)), args.force)
        if is_checked and args.partial:
            raise BadInput("--check --partial: a partial script fails where a part is refused; leave one of them out")
        group = self._main.require_group("%dipexport")
        if is_checked and group.request.hosts:
            raise BadInput("--check: torchrun would start all ranks on this machine, and the group is on other hosts")
        session = self._read_session(group)
        numbers = None if args.cells is None else _checked_numbers(args.cells, session)
        names = _checked_names(args.check or [], group)
        expected = self._fetch_results(group, names) if is_checked else []
        results = sorted({name for packed in expected for name in values.packed_names(packed)})
        choice = Choice(numbers, args.last, args.partial, is_checked, frozenset(results), args.data)
        plan = selection.plan_script(session, choice)
        refusals = [refusal for refusal in plan.refusals if not (refusal.is_doubt and is_checked)]
        if refusals and not args.partial:
            raise BadInput(_refusal_text(path, refusals))
        if not plan.steps:
            raise BadInput(f"%dipexport {path}: no cell that ran on the ranks has a result; {path} was not written")
        data = path.with_suffix(DATA_SUFFIX).name if plan.data else ""
        text = check.accept_style(script.write_script(plan, session, choice, str(path), data))
        _ensure_valid(text, path)
        jobs = _job_files(_job_shape(group, session.threads), path, data, slurm=args.slurm, k8s=args.k8s)
        if is_checked:

            def script_storing(to: str) -> str:
                return script.write_script(plan, session, choice, str(path), f".{data}", check.last_line(results, to))

            print(check.compare_script(script_storing, path, session, expected, plan.data))
            for doubt in dict.fromkeys(refusal.text for refusal in plan.refusals):
                print(f"ddip: other values may differ: {doubt}")
        path.write_text(text, encoding="utf-8")
        if data:
            path.with_name(data).write_bytes(pickle.dumps(plan.data))
        for job, job_text in jobs.items():
            job.write_text(job_text, encoding="utf-8")
        if not is_checked:
            lacks = args.last or numbers is not None
            why = "may differ, since it lacks executions" if lacks else "are not compared yet"
            print(f"ddip: the script's numbers {why}; --check NAMES compares these variables")
        run = f"torchrun --nproc-per-node {session.size} {shlex.quote(str(path))}"
        self._main.confirm_done(f"wrote {path}: {_count_text(plan)}; {run}")
        for job in jobs:
            self._main.confirm_done(f"wrote {job}; its first lines say what to set, and how to start it")

    def _read_session(self, group: Group) -> Session:
        """Return the session since all ranks started."""
        from ddip.export.record import Execution, Session
        from ddip.group.cells.history import KEPT
        from ddip.protocol import on_rank

        history = group.history
        with group.lifecycle.turn:
            group.lifecycle.ensure_ready_for_cell()
            facts = group.ranks.ask(range(group.world_size), on_rank.start_facts())
            events = self._executions.list_events(history, facts[0][2])
            ran = [event for event in events if isinstance(event, Execution) and event.ranks and not event.failure]
            stars = {module for execution in ran for module in STAR.findall(execution.code)}
            (exports,) = group.ranks.ask([0], on_rank.exported_names(sorted(stars)))
        problems = [change.text for change in history.changes if change.resizes]
        if history.is_cut:
            problems.append(f"ddip has kept only the last {KEPT} cells of this session")
        seeds, threads, folders, changed = zip(*facts, strict=True)
        doubts = [change.text for change in history.changes if not change.resizes]
        doubts += [f"{file} has changed since the ranks started" for file in sorted({*sum(changed, [])})]
        return Session(
            tuple(seeds),
            group.spec.backend,
            "cuda" if group.spec.on_gpus else "cpu",
            threads[0],
            folders[0],
            group.request.app,
            events,
            tuple(problems),
            tuple(doubts),
            exports,
        )

    def _fetch_results(self, group: Group, names: list[str]) -> list[bytes]:
        """Return each rank's values of `names` and of all modules; raises BadInput if one has no values."""
        from ddip.protocol import on_rank
        from ddip.sharded import values

        with group.lifecycle.turn:
            group.lifecycle.ensure_ready_for_cell()
            answers = group.ranks.ask(range(group.world_size), on_rank.pack_results(names))
        found = set()
        for rank, (packed, refused) in enumerate(answers):
            found |= values.packed_names(packed)
            for name, why in refused.items():
                raise BadInput(f"--check {name}: {why}, on rank {rank}; leave it out")
        for name in names:
            if name not in found:
                raise BadInput(f"--check {name}: it contains no value to compare; name another variable")
        if not found:
            raise BadInput("--check: no variable of the ranks is a module with parameters; name variables to compare")
        return [packed for packed, _ in answers]


def _checked_path(typed: str | None, force: bool) -> Path:
    if typed is None:
        raise BadInput("%dipexport: type the name of the script, such as %dipexport train.py")
    path = Path(typed).expanduser()
    if path.suffix != ".py":
        raise BadInput(f"%dipexport {typed}: type a name that ends with .py, such as %dipexport {path.stem}.py")
    if path.stem in sys.stdlib_module_names or path.stem in ("torch", "numpy"):
        raise BadInput(f"%dipexport {typed}: such a script would hide the module {path.stem}; type another name")
    if not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise BadInput(f"%dipexport {typed}: files cannot be written to the folder {path.parent}; type another folder")
    _check_free(typed, force)
    return path


def _check_free(typed: str, force: bool) -> None:
    if Path(typed).expanduser().exists() and not force:
        raise BadInput(f"%dipexport: the file {typed} exists; --force overwrites it")


def _job_shape(group: Group, threads: int) -> JobShape:
    """Return the hosts of the group, for a job that runs its script."""
    from ddip.export.job_files import JobShape

    spec, reach = group.spec, group.request.reach
    ranks = tuple(len(spec.ranks_on(host)) for host in spec.hosts)
    options = slurm.parse_options(reach.slurm) if reach.slurm else {}
    return JobShape(ranks, spec.on_gpus, threads, options, reach.setup, reach.python)


def _job_files(shape: JobShape, path: Path, data: str, *, slurm: bool, k8s: bool) -> dict[Path, str]:
    """Return the text of each requested job file."""
    from ddip.export import job_files

    files = {}
    if slurm:
        files[path.with_suffix(".sbatch")] = job_files.write_slurm_file(shape, path)
    if k8s:
        files[path.with_suffix(".yaml")] = job_files.write_kubernetes_file(shape, path, data)
    return files


def _count_text(plan: Plan) -> str:
    from ddip.export.selection import LeftOut

    count, left = len({step.number for step in plan.steps}), sum(isinstance(part, LeftOut) for part in plan.parts)
    return f"{count} cell{'s' * (count != 1)}" + (f", {left} left as comment{'s' * (left != 1)}" if left else "")


def _checked_numbers(typed: str, session: Session) -> frozenset[int]:
    numbers = executions.parse_numbers(typed, max((event.number for event in session.events), default=0))
    on_ranks = {event.number for event in session.events if event.ranks is not None}
    known = {event.number for event in session.events}
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


def _refusal_text(path: Path, refusals: list[Refusal]) -> str:
    listed = "".join(f"\n  {text}" for text in dict.fromkeys(refusal.text for refusal in refusals))
    ways = "--partial writes it with raise NotImplementedError at these places, so that it stops at the first"
    if all(refusal.is_doubt for refusal in refusals):
        ways = "--check NAMES writes it if these variables are equal; " + ways
    return f"%dipexport {path}: not written, since the script may not repeat the session:{listed}\n{ways}"


def _ensure_valid(text: str, path: Path) -> None:
    try:
        compile(text, str(path), "exec")
    except SyntaxError as error:
        line = text.split("\n")[(error.lineno or 1) - 1].strip()
        raise BadInput(f"%dipexport {path}: not written, since a script cannot contain {line!r}: {error.msg}") from None
