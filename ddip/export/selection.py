"""Decide which statements of a session the script runs, and refuse what may not be repeated equally.

A statement on ranks stays unless it is certain that nothing later depends on it: everything but plain assignments and
definitions may draw random numbers, change an object or communicate.
"""

from __future__ import annotations

import ast
import io
import itertools
import pickle
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ddip.export import code_names, translation
from ddip.export.code_names import BUILTINS, IMPORTS, PROVIDED
from ddip.export.record import Choice, Execution, Push, Session
from ddip.export.translation import Statement

MODULES = ("os", "torch", "subprocess", "argparse")
"""Modules that the script imports itself, so that no variable may have their names."""
EVERYWHERE: tuple[int, ...] | None = None
"""Ranks of a step that all ranks run."""
LITERAL_CHARS = 200
"""Maximum length of a pushed value that the script has as a literal."""
WITHOUT = "run the notebook again without it, or choose cells with --cells"
DATA = "its value cannot be written as Python code; --data stores it in a file beside the script"
RESERVED = (
    *("SEEDS", "start_rank", "end_rank", "run_cells", "from_ranks", "run_script", "pushed_values", "parse_options"),
    *("session_options", "show_results", "copied", "pulled", "begin_cell", "use_app"),
    *("end_cell", "cell_group", "close_figures"),
)
"""Names that the script uses itself."""


@dataclass
class Step:
    """A statement of the script."""

    statement: Statement
    number: int
    """Number of its execution."""
    ranks: tuple[int, ...] | None = EVERYWHERE
    """Ranks that run it; None for all."""


@dataclass
class LeftOut:
    """A cell that the script shows only as a comment."""

    number: int
    reason: str
    code: str


@dataclass
class Refusal:
    """A reason why the script would not repeat the session, or may not."""

    number: int
    """Number of the cell; 0 if it concerns the whole session."""
    reason: str
    code: str = ""
    is_doubt: bool = False
    """True if a comparison of values can show that they are equal nevertheless."""

    @property
    def text(self) -> str:
        """The reason with the number of the cell."""
        return f"cell {self.number}: {self.reason}" if self.number else self.reason


Part = Step | LeftOut | Refusal


@dataclass
class Plan:
    """The parts of a script in order."""

    parts: list[Part] = field(default_factory=list)
    shown: list[tuple[int, list[str]]] = field(default_factory=list)
    """Numbers and code of notebook cells that use pulled values; rank 0 runs them after all cells of the ranks."""
    data: list[bytes] = field(default_factory=list)
    """Saved dicts of pushed variables that the script reads from a file."""

    @property
    def steps(self) -> list[Step]:
        """The statements that run."""
        return [part for part in self.parts if isinstance(part, Step)]

    @property
    def refusals(self) -> list[Refusal]:
        """All reasons against the script."""
        return [part for part in self.parts if isinstance(part, Refusal)]

    def refuse(self, number: int, reason: str, code: str = "", *, is_doubt: bool = False) -> None:
        """Add a reason against the script at the current place."""
        self.parts.append(Refusal(number, reason, code, is_doubt))


def plan_script(session: Session, choice: Choice) -> Plan:
    """Return the parts of the script for a session."""
    plan = Plan()
    for reason in session.problems:
        plan.refuse(0, reason, is_doubt=choice.numbers is not None)
    for reason in session.doubts:
        plan.refuse(0, reason, is_doubt=True)
    failed: list[tuple[Execution, list[Statement]]] = []
    local = _LocalCode()
    events = _chosen_events(session, choice)
    translated = _translate_cells(events, session)
    for event in events:
        if isinstance(event, Push):
            _add_push(plan, event, session, choice)
        elif event.ranks is None:
            plan.parts += local.read_cell(event)
        else:
            statements = translated[id(event)]
            if event.failure:
                failed.append((event, statements))
            _add_cell(plan, event, statements, session)
    plan.shown = local.shown
    _check_failed(plan, failed)
    _leave_out_idle(plan, choice)
    is_whole = not (failed or choice.last or choice.numbers is not None)
    _check_names(plan, is_whole)
    return plan


def _chosen_events(session: Session, choice: Choice) -> list[Execution | Push]:
    events = list(session.events)
    if choice.numbers is not None:
        events = [event for event in events if event.number in choice.numbers]
    if choice.last:
        last = {
            event.cell or event.code: event
            for event in events
            if isinstance(event, Execution) and event.ranks is not None and not event.failure
        }
        events = [
            event
            for event in events
            if isinstance(event, Push) or event.ranks is None or last.get(event.cell or event.code, event) is event
        ]
    return events


def _translate_cells(events: Sequence[Execution | Push], session: Session) -> dict[int, list[Statement]]:
    """Return the statements of each execution on ranks, by its identity.

    ``import *`` becomes imports of the names in use.
    """
    cells = [event for event in events if isinstance(event, Execution) and event.ranks is not None]
    translated = {id(cell): translation.translate_cell(cell.code) for cell in cells}
    used = {name for found in translated.values() for statement in found for name in statement.names.everything}
    for found in translated.values():
        for at, star in reversed([*enumerate(found)]):
            if star.star in session.exports:
                found[at : at + 1] = translation.import_used(star, session.exports[star.star], used)
    nodes = [statement.node for found in translated.values() for statement in found if statement.node is not None]
    nones = frozenset().union(*map(code_names.none_names, nodes))
    return {cell: [_doubt_nones(statement, nones) for statement in found] for cell, found in translated.items()}


def _doubt_nones(statement: Statement, nones: frozenset[str]) -> Statement:
    """Return the statement, with a doubt if its seed may be None.

    `nones`: names that may be None in any cell.
    """
    if statement.doubt or statement.problem or statement.node is None:
        return statement
    return replace(statement, doubt=code_names.find_doubt(statement.node, nones))


def _add_cell(plan: Plan, execution: Execution, statements: list[Statement], session: Session) -> None:
    number = execution.number
    if execution.failure:
        plan.parts.append(LeftOut(number, f"it failed: {execution.failure}", execution.code))
        return
    if execution.overlaps:
        plan.refuse(number, f"it ran at the same time as cell {execution.overlaps}", is_doubt=True)
    everyone = execution.ranks is None or len(execution.ranks) == session.size
    for statement in statements:
        if statement.problem:
            plan.refuse(number, statement.problem, statement.text)
        elif statement.doubt:
            plan.refuse(number, f"{translation.first_line(statement.text)}: {statement.doubt}", is_doubt=True)
        plan.parts.append(Step(statement, number, EVERYWHERE if everyone else execution.ranks))


# -- pushes


def _add_push(plan: Plan, push: Push, session: Session, choice: Choice) -> None:
    """Add the assignment of pushed values: as literals, or from a file."""
    ranks = EVERYWHERE if len(push.ranks) == session.size else push.ranks
    why, lines = "it is too large, or cannot be pickled; create it in a %%dip cell", list[str]()
    if push.data is not None:
        values, foreign = _load_push(push.data)
        lines, why = _literal_lines(values), DATA
        if foreign:
            lines, why = [], f"it contains {foreign}; create it in a %%dip cell"
        elif not lines and choice.stores_data:
            lines = [f"{', '.join(push.names)}{',' * (len(push.names) == 1)} = pushed_values({len(plan.data)})"]
            plan.data.append(push.data)
    names = code_names.Names(frozenset(push.names))
    if not lines:
        problem = f"%dipush {' '.join(push.names)}: {why}"
        plan.refuse(push.number, problem)
        lines = [""]
    for line in lines:
        node = ast.parse(line).body[0] if line else None
        statement = Statement(line, node, names, "" if line else why)
        plan.parts.append(Step(statement, push.number, ranks))


def _load_push(data: bytes) -> tuple[dict[str, Any], str]:
    """Return pushed values, and a description of parts that other processes may not load equally."""
    found: list[str] = []

    class Loader(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.partition(".")[0] in ("__main__", "cloudpickle", "ddip"):
                found.append("code of the notebook")
            elif module.startswith(("torch.nn", "torch.optim")) and name != "Parameter":
                found.append("a module or optimizer")
            elif (module, name) in (("builtins", "set"), ("builtins", "frozenset")):
                found.append("a set, whose order may differ between processes")
            return super().find_class(module, name)

    loading = types.SimpleNamespace(__name__="pickle", Unpickler=Loader, load=pickle.load)
    values = torch.load(io.BytesIO(data), pickle_module=loading, weights_only=False)
    if any(isinstance(value, (set, frozenset)) for value in values.values()):
        found.append("a set, whose order may differ between processes")
    return values, next(iter(found), "")


def _literal_lines(values: dict[str, Any]) -> list[str]:
    """Return assignments of literals that give exactly these values; empty if there are none."""
    texts = {name: repr(value) for name, value in values.items()}
    if max(map(len, texts.values())) > LITERAL_CHARS:
        return []
    try:
        made = {name: ast.literal_eval(text) for name, text in texts.items()}
    except (ValueError, SyntaxError):
        return []
    return [f"{name} = {text}" for name, text in texts.items()] if pickle.dumps(made) == pickle.dumps(values) else []


# -- pulls


class _LocalCode:
    """Collects the notebook's code for pulled values, and the steps that copy these on the ranks."""

    def __init__(self) -> None:
        self.shown: list[tuple[int, list[str]]] = []
        self._known: set[str] = set()
        """Names that the collected code binds."""
        self._imports: list[Statement] = []
        """Imports of earlier cells that the collected code may need."""
        self._pulls = 0

    def read_cell(self, execution: Execution) -> Iterator[Part]:
        """Collect a cell if it uses pulled values; yield steps for the ranks, or the cell as a comment."""
        statements = translation.translate_cell(execution.code, in_notebook=True)
        if execution.is_former:
            self._imports += [statement for statement in statements if isinstance(statement.node, IMPORTS)]
            return
        lines: list[str] = []
        steps: list[Step] = []
        known, pulls, why = set(self._known), self._pulls, ""
        imports = {name: statement for statement in self._imports for name in statement.names.binds}
        used: dict[str, Statement] = {}
        for statement in statements:
            if statement.pull is not None:
                targets, copy = _parse_pull(statement.pull, execution.number)
                why = why or ("" if targets else f"%dipull {statement.pull}")
                lines.append(f"({', '.join(targets)},) = pulled[{pulls}]")
                steps += copy
                pulls, known = pulls + 1, known.union(targets)
                continue
            reads = (statement.names.reads | statement.names.deferred) - BUILTINS - statement.names.binds - known
            used |= {name: imports[name] for name in reads if name in imports}
            missing = sorted(
                (statement.names.needs | statement.names.reads - statement.names.binds)
                - BUILTINS
                - known
                - imports.keys()
                - {"display"}
            )
            why = why or statement.problem or (f"it reads the notebook's {missing[0]}" if missing else "")
            known |= statement.names.binds
            lines.append(statement.text)
        is_user = bool(steps) or any(
            (statement.names.reads | statement.names.deferred) & self._known for statement in statements
        )
        self._imports += [statement for statement in statements if isinstance(statement.node, IMPORTS)]
        if steps and "%dipush" in execution.code:
            why = why or "it pulls and pushes, in an order that ddip does not know"
        if why or execution.failure or not is_user:
            self._known -= {name for statement in statements for name in _changed_names(statement)}
        if not is_user or execution.failure:
            return
        if why:
            yield LeftOut(execution.number, f"the notebook ran it: {why}", execution.code)
            return
        yield from steps
        first = [statement.text.strip() for statement in dict.fromkeys(used.values())]
        self._known, self._pulls = known.union(used), pulls
        self.shown.append((execution.number, [*first, *lines]))


def _changed_names(statement: Statement) -> set[str]:
    """Return the variables that a statement assigns, or of which it assigns items or attributes."""
    if statement.pull is not None:
        return set(re.findall(r"\w+", statement.pull))
    names = {*statement.names.binds, *statement.names.sets}
    for node in ast.walk(statement.node) if statement.node is not None else ():
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            names.update(inner.id for inner in ast.walk(node.value) if isinstance(inner, ast.Name))
    return names


def _parse_pull(line: str, number: int) -> tuple[list[str], list[Step]]:
    """Return the notebook's names of a pull, and the step that copies the values on the ranks.

    There are no names if the script cannot repeat the pull, such as one with ``--now``.
    """
    found = re.fullmatch(r"(?:-r all )?([\w, ]+?)(?: -r all)?", " ".join(line.split()))
    words = found[1].replace(",", " ").split() if found else []
    if not words or not all(word.isidentifier() for word in words) or words[0] == "as":
        return [], []
    sources: list[str] = []
    targets: list[str] = []
    pending = iter(words)
    for word in pending:
        if word == "as":
            targets[-1] = next(pending, "")
        else:
            sources.append(word)
            targets.append(word)
    from_all = "-r all" in " ".join(line.split())
    values = ", ".join(f"{'from_ranks' if from_all else 'copied'}({name})" for name in sources)
    text, read = f"pulled.append(({values},))", frozenset(sources)
    statement = Statement(text, ast.parse(text).body[0], code_names.Names(reads=read, needs=read), pull=line)
    return targets, [Step(statement, number, EVERYWHERE if from_all else (0,))]


# -- failed and idle cells


def _check_failed(plan: Plan, failed: Sequence[tuple[Execution, list[Statement]]]) -> None:
    """Refuse the script if a failed cell may have had an effect before its error."""
    for execution, statements in failed:
        if execution.never_began or translation.has_syntax_error(execution.code):
            continue
        if not _is_harmless(execution, statements, plan.steps):
            reason = (
                f"it failed ({execution.failure}) and may have changed variables or random states before; {WITHOUT}"
            )
            at = next(i for i, part in enumerate(plan.parts) if part.number == execution.number)
            plan.parts.insert(at, Refusal(execution.number, reason, is_doubt=True))


def _is_harmless(execution: Execution, statements: Sequence[Statement], steps: Sequence[Step]) -> bool:
    """Return True if a failed cell cannot have changed anything that another cell uses."""
    origins = {
        origin
        for step in steps
        if isinstance(step.statement.node, IMPORTS)
        for origin in code_names.import_origins(step.statement.node).items()
    }
    used = {name for step in steps for name in step.statement.names.everything}
    for statement in statements:
        if statement.problem or statement.script:
            return False
        if isinstance(statement.node, IMPORTS):
            if root := code_names.untrusted_import(statement.node):
                return execution.failure == f"ModuleNotFoundError: No module named {root!r}"
            if not code_names.import_origins(statement.node).items() <= origins:
                return False
        elif not code_names.is_pure(statement.node) or statement.names.binds & used:
            return False
    return True


def _leave_out_idle(plan: Plan, choice: Choice) -> None:
    """Replace cells on ranks whose results nothing later reads by comments."""
    names_of_steps = [step.statement.names for step in plan.steps]
    deferred = {name for names in names_of_steps for name in names.deferred | names.mentioned}
    live = {*choice.results, *PROVIDED}
    kept: list[Part] = []
    has_script = any(step.statement.script for step in plan.steps)
    cells = itertools.groupby(plan.parts, key=lambda part: part.number if isinstance(part, Step) else id(part))
    for group in reversed([list(parts) for _, parts in cells]):
        steps = [part for part in group if isinstance(part, Step)]
        bound = {name for step in steps for name in step.statement.names.binds}
        pure = all(code_names.is_pure(step.statement.node) and not step.statement.script for step in steps)
        if steps and pure and not has_script and not bound & (live | deferred):
            reason = f"nothing later reads this {', '.join(sorted(bound))}" if bound else "it only shows values"
            text = "\n".join(step.statement.text for step in steps)
            if any(step.statement.node is not None for step in steps):
                kept.append(LeftOut(steps[0].number, reason, text))
            else:
                kept += steps
            continue
        for step in reversed(steps):
            names = step.statement.names
            if step.ranks is EVERYWHERE:
                live -= code_names.certain_binds(step.statement.node) & names.binds
            live |= names.reads | {name for name in names.deferred if not code_names.is_pure(step.statement.node)}
        kept += reversed(group)
    plan.parts = kept[::-1]


# -- checks


def _check_names(plan: Plan, is_whole: bool) -> None:
    """Refuse names that no earlier statement binds, and those that the script needs itself.

    `is_whole`: the session has run all of it, so that functions that read other names were not called.
    """
    steps = plan.steps
    everything = {name for step in steps for name in step.statement.names.everything}
    for name in sorted(everything.intersection(RESERVED)):
        plan.refuse(0, f"the script uses the name {name} itself; give your variable another one")
    for step in steps:
        node = step.statement.node
        origins = code_names.import_origins(node) if isinstance(node, IMPORTS) else {}
        for name in sorted((step.statement.names.binds | step.statement.names.sets).intersection(MODULES)):
            if origins.get(name) != name:
                plan.refuse(step.number, f"the script uses the module {name} itself; give your variable another name")
    if any(step.statement.script or step.statement.problem for step in steps):
        return
    known = {*BUILTINS, *PROVIDED, "display", "os", "subprocess"}  # of translated magics
    bound = {name for step in steps for name in step.statement.names.binds | step.statement.names.sets}
    reported: set[str] = set()
    for step in steps:
        found = step.statement.names
        strings = {
            constant.value
            for constant in (ast.walk(step.statement.node) if step.statement.node is not None else ())
            if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
        }
        lost = set() if is_whole else found.deferred - strings - known - bound
        for name in sorted((found.needs - known | lost) - reported):
            reported.add(name)
            plan.refuse(step.number, f"it reads {name}, which no exported cell assigns")
        known |= found.binds | found.sets
