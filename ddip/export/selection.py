"""Decide which statements of a session the script runs, and on which ranks; the other cells become comments.

A statement stays unless it is certain that nothing later depends on it: everything but plain assignments and
definitions may draw random numbers, change an object or communicate.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ddip.export import code_names as names
from ddip.export import translation
from ddip.export.code_names import BUILTINS, PROVIDED, Names
from ddip.export.record import Choice, Execution, Session
from ddip.export.translation import Statement

EVERYWHERE: tuple[int, ...] | None = None
"""Ranks of a step that all ranks run."""
RANDOM = ("rand", "shuffle", "sample", "permutation", "choice", "normal_(", "uniform")
FROM_RANKS = "from_ranks"
"""Function of the script that collects a variable of all ranks."""
APPS = ("deepspeed", "hf", "lightning")
"""Apps that a script can prepare."""
SEEDED = ("seed", "default_rng(", "random_state", "generator")


@dataclass
class Step:
    """A statement of the script."""

    statement: Statement
    number: int
    """Number of its execution."""
    ranks: tuple[int, ...] | None = EVERYWHERE
    """Ranks that run it; None for all."""
    in_notebook: bool = False
    """True if the notebook ran it; the script then keeps the random states of the ranks."""
    pulls: frozenset[str] = frozenset()
    """The ranks' variables that it copies to the notebook's side."""
    shares: frozenset[str] = frozenset()
    """Variables that the notebook and the ranks have in common from now on."""


@dataclass
class LeftOut:
    """A cell that the script shows only as a comment."""

    number: int
    reason: str
    code: str


@dataclass
class Plan:
    """The parts of a script in order, and the reasons why it would not repeat the session."""

    parts: list[Step | LeftOut] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    stored: list[str] = field(default_factory=list)
    """Pushed variables that the script reads from a file."""

    @property
    def left_out(self) -> list[LeftOut]:
        """The cells that do not run."""
        return [part for part in self.parts if isinstance(part, LeftOut)]

    @property
    def steps(self) -> list[Step]:
        """The statements that run."""
        return [part for part in self.parts if isinstance(part, Step)]


@dataclass
class _Cell:
    """An execution with its statements."""

    execution: Execution
    statements: list[Statement]
    kept: list[bool] = field(default_factory=list)
    """Of a notebook cell: the statements that the script runs."""
    on_rank_0: bool = False
    """True for a notebook cell that uses pulled values."""
    inserted: dict[int, list[Step]] = field(default_factory=dict)
    """Steps that replace a ``%dipush`` or ``%dipull``, by its position."""

    @property
    def is_local(self) -> bool:
        return self.execution.ranks is None


def plan_script(session: Session, choice: Choice) -> Plan:
    """Return the parts of the script for a session."""
    plan = Plan()
    cells = [
        _Cell(one, translation.translate_cell(one.code, one.ranks is None))
        for one in _chosen_executions(session, choice)
    ]
    notebook = [cell for cell in cells if cell.is_local and not cell.execution.failure]
    for cell in notebook:
        cell.kept = [False] * len(cell.statements)
    _follow_pushes(notebook, session, choice, plan)
    _follow_pulls(notebook, session, plan)
    reasons = _find_idle(cells, choice.results)
    for cell in cells:
        plan.parts += _parts_of(cell, session, reasons.get(id(cell), ""))
    _check_names(plan, cells)
    _check_sides(plan)
    for step in plan.steps:
        if step.statement.problem and not choice.partial:
            plan.problems.append(f"cell {step.number}: {step.statement.problem}")
    _check_group(plan, cells, session)
    return plan


def _check_group(plan: Plan, cells: Sequence[_Cell], session: Session) -> None:
    """Add a problem for cells of another number of ranks, and for an app that a script cannot prepare."""
    resized = [cell.execution for cell in cells if cell.execution.resized]
    if resized:
        last = resized[-1]
        plan.problems.append(f"{last.resized} after cell {last.number}; --cells {last.number + 1}- takes later cells")
    if session.app not in (None, *APPS):
        plan.problems.append(f"-a {session.app}: a script cannot prepare this app")


def _chosen_executions(session: Session, choice: Choice) -> list[Execution]:
    executions = list(session.executions)
    if choice.numbers is not None:  # cells of the notebook come along if a chosen push needs them
        executions = [one for one in executions if one.ranks is None or one.number in choice.numbers]
    if choice.last:
        last = {one.cell or one.code: one for one in executions if not one.failure}
        executions = [one for one in executions if one.ranks is None or last.get(one.cell or one.code, one) is one]
    return executions


# -- the notebook's side


def _list_statements(cells: Sequence[_Cell]) -> list[tuple[_Cell, int, Statement]]:
    return [(cell, i, statement) for cell in cells for i, statement in enumerate(cell.statements)]


def _follow_pushes(notebook: Sequence[_Cell], session: Session, choice: Choice, plan: Plan) -> None:
    """Keep the notebook's statements that made pushed values, or store the values."""
    statements = _list_statements(notebook)
    for position, (cell, i, statement) in enumerate(statements):
        if statement.transfer is None or statement.transfer.magic != "dipush":
            continue
        if choice.numbers is not None and cell.execution.number not in choice.numbers:
            continue
        pushed, _, ranks = translation.parse_transfer(statement.transfer)
        number = cell.execution.number
        where = _ranks_typed(ranks, session.size)
        comment = Statement(f"# %dipush {statement.transfer.line}", None, Names())
        cell.inserted[i] = [Step(comment, number, shares=frozenset(pushed))]
        if choice.stores_data:
            later = {name for _, _, one in statements[position:] for name in one.names.binds}
            for name in sorted(later.intersection(pushed)):
                plan.problems.append(f"%dipush {name} in cell {number}: the notebook has assigned {name} again since")
            cell.inserted[i] += [
                Step(_added_statement(f"{name} = stored_value({name!r})"), number, where, shares=frozenset({name}))
                for name in pushed
            ]
            plan.stored += [name for name in pushed if name not in plan.stored]
            continue
        missing = _keep_makers(statements[:position], set(pushed))
        for name in sorted(missing):
            plan.problems.append(
                f"%dipush {name} in cell {number}: {missing[name]}; --data writes its value to a file beside the script"
            )


def _added_statement(text: str, *needs: str) -> Statement:
    """Return an assignment that the script adds, as a statement."""
    node = ast.parse(text).body[0]
    return Statement(text, node, Names(names.certain_binds(node)), needs=frozenset(needs))


def _keep_makers(before: Sequence[tuple[_Cell, int, Statement]], needed: set[str]) -> dict[str, str]:
    """Keep the statements that made the variables `needed`.

    Returns the reason for each variable without a known origin.
    """
    origin: dict[str, str] = {}
    deferred: set[str] = set()
    found: set[str] = set()
    while True:
        live, former = {*needed, *deferred}, set(deferred)
        for cell, i, one in reversed(before):
            if one.transfer is not None:
                pulled = _pulled_names(one) & live if one.transfer.magic == "dipull" else set()
                origin |= {name: f"{name} comes from %dipull" for name in pulled}
                found |= pulled
                continue
            makes = (one.names.binds | one.names.sets) & live
            changes = not names.is_pure(one.node) and one.names.reads & live - BUILTINS
            if not (makes or (changes and not _only_shows(one)) or _sets_seed(one)):
                continue
            cell.kept[i] = True
            found |= makes
            if one.problem:
                origin |= dict.fromkeys(makes, f"cell {cell.execution.number} has no translation ({one.problem})")
            if _draws_unseeded(one, before):
                origin |= dict.fromkeys(makes & needed, f"cell {cell.execution.number} may draw it without a seed")
            live = (live - names.certain_binds(one.node)) | one.names.reads
            deferred |= one.names.deferred - BUILTINS
        if deferred == former:
            break
    lost = needed - found
    return origin | {name: f"no cell of the notebook assigns {name} by name" for name in lost}


def _only_shows(statement: Statement) -> bool:
    return statement.text.lstrip().startswith(("print(", "display(", "plt.", "assert "))


def _sets_seed(statement: Statement) -> bool:
    return "seed(" in statement.text and statement.node is not None and not names.certain_binds(statement.node)


def _draws_unseeded(statement: Statement, before: Sequence[tuple[_Cell, int, Statement]]) -> bool:
    """Return True if the statement seems to draw random numbers, and no statement seems to set a seed."""
    draws = any(word in statement.text for word in RANDOM) and not names.is_pure(statement.node)
    return (
        draws
        and not any(word in one.text for _, _, one in before for word in SEEDED)
        and not any(word in statement.text for word in SEEDED)
    )


def _pulled_names(statement: Statement) -> set[str]:
    """Return the notebook's variables that a ``%dipull`` assigns."""
    assert statement.transfer is not None
    pulled, renamed, _ = translation.parse_transfer(statement.transfer)
    return {renamed.get(name, name) for name in pulled} | set(names.certain_binds(statement.node))


def _follow_pulls(notebook: Sequence[_Cell], session: Session, plan: Plan) -> None:
    """Keep the notebook's cells that use pulled values, for rank 0."""
    statements = _list_statements(notebook)
    pulled: set[str] = set()
    for cell in notebook:
        used = any(one.names.all_reads & pulled for one in cell.statements if one.transfer is None)
        for one in cell.statements:
            if one.transfer is not None and one.transfer.magic == "dipull":
                pulled |= _pulled_names(one)
                used = used or any(other.names.all_reads & _pulled_names(one) for other in cell.statements)
        if used:
            cell.on_rank_0 = True
            position = next(at for at, (owner, _, _) in enumerate(statements) if owner is cell)
            reads = {name for one in cell.statements for name in one.names.all_reads}
            _keep_makers(statements[:position], reads - pulled - BUILTINS)
            cell.kept = [one.transfer is None for one in cell.statements]
            pulled |= {name for one in cell.statements for name in one.names.binds}
    needed: set[str] = set()
    for cell, i, one in reversed(statements):
        if one.transfer is not None and one.transfer.magic == "dipull" and _pulled_names(one) & needed:
            cell.inserted[i] = _pull_steps(one, cell.execution.number, session, plan)
        elif cell.kept[i] and cell.on_rank_0:
            needed |= one.names.all_reads


def _pull_steps(statement: Statement, number: int, session: Session, plan: Plan) -> list[Step]:
    assert statement.transfer is not None
    pulled, renamed, ranks = translation.parse_transfer(statement.transfer)
    comment = Statement(f"# %dipull {statement.transfer.line}", None, Names())
    try:
        sources = _ranks_typed(ranks, session.size) or range(session.size) if ranks else (0,)
    except ValueError:
        plan.problems.append(f"cell {number}: %dipull {statement.transfer.line}")
        return []
    targets = {name: [renamed.get(name, name)] for name in pulled}
    if len(pulled) == 1:
        targets[pulled[0]] += names.certain_binds(statement.node)
    same = frozenset(name for name in pulled if targets[name] == [name] and sources == (0,) and ranks != "all")
    found = [Step(comment, number, pulls=same, shares=same)]
    needs = () if sources == (0,) else (FROM_RANKS,)
    for name, assigned in targets.items():
        if name in same:
            continue
        value = name if sources == (0,) else f"from_ranks({name})"
        if len(sources) == 1 and sources != (0,):
            value += f"[{sources[0]}]"
        elif len(sources) not in (1, session.size):
            value = f"[{value}[i] for i in {sources}]"
        text = " = ".join([*(one for one in dict.fromkeys(assigned) if one != value), value])
        found.append(Step(_added_statement(text, *needs), number, pulls=frozenset({name})))
    return found


def _ranks_typed(typed: str, size: int) -> tuple[int, ...] | None:
    """Return the ranks of ``-r`` as typed, None for all."""
    ranks: set[int] = set()
    for word in filter(None, typed.split(",")):
        first, _, last = word.partition("-")
        ranks |= set(range(size)) if word == "all" else set(range(int(first), int(last or first) + 1))
    return None if not ranks or len(ranks) == size else tuple(sorted(ranks))


# -- the ranks' side


def _find_idle(cells: Sequence[_Cell], results: Iterable[str]) -> dict[int, str]:
    """Find cells on ranks whose results nothing later reads; return reasons by the identity of the cell."""
    deferred = {name for cell in cells for one in cell.statements for name in one.names.deferred}
    live, reasons = set(results), dict[int, str]()
    later: dict[str, int] = {}
    for cell in reversed(cells):
        if cell.execution.failure:
            if not cell.is_local:
                live = _keep_begun(cell, live, deferred)
            continue
        chosen = [one for i, one in enumerate(cell.statements) if not cell.is_local or (cell.kept and cell.kept[i])]
        inner = set(live)
        acts = False
        for one in reversed(chosen):
            has_effect = bool(one.problem) or not names.is_pure(one.node) or bool(one.names.binds & inner)
            acts = acts or has_effect
            if has_effect:
                inner = _live_before(one, inner, deferred)
        if not acts and not cell.is_local:
            reasons[id(cell)] = _idle_reason(chosen, later, cell.execution.number)
            continue
        everyone = cell.is_local or len(cell.execution.ranks or ()) > 0
        for one in reversed(chosen):
            live = _live_before(one, live, deferred) if everyone else live | one.names.all_reads
        for steps in cell.inserted.values():
            live |= {name for step in steps for name in step.pulls}
        later |= {name: cell.execution.number for one in chosen for name in names.certain_binds(one.node)}
    return reasons


def _keep_begun(cell: _Cell, live: set[str], deferred: set[str]) -> set[str]:
    """Keep the definitions with which a failed cell began if later cells read them.

    Returns the names that are read after its beginning. The definitions have no other effect, and precede all code
    that can have failed.
    """
    plain = (*names.SHARED, *names.DEFINITIONS)
    begun = list(
        itertools.takewhile(lambda one: names.is_pure(one.node) or isinstance(one.node, plain), cell.statements)
    )
    cell.kept = [False] * len(cell.statements)
    for i, one in reversed(list(enumerate(begun))):
        cell.kept[i] = one.node is not None and bool(one.names.binds & live)
        if cell.kept[i]:
            live = _live_before(one, live, deferred)
    return live


def _live_before(statement: Statement, live: set[str], deferred: set[str]) -> set[str]:
    """Return the names read after the beginning of the statement.

    A call may read all `deferred` names.
    """
    calls = set() if names.is_pure(statement.node) else deferred
    return (live - names.certain_binds(statement.node)) | statement.names.reads | calls


def _idle_reason(statements: Sequence[Statement], later: dict[str, int], number: int) -> str:
    bound = sorted({name for one in statements for name in names.certain_binds(one.node)})
    if not bound:
        return "it only shows values"
    replaced = {later[name] for name in bound if name in later}
    if replaced and all(name in later for name in bound):
        return f"cell {min(replaced)} assigns {', '.join(bound)} again before anything reads it"
    return f"nothing later reads {', '.join(bound)}"


def _parts_of(cell: _Cell, session: Session, idle: str) -> Iterator[Step | LeftOut]:
    execution = cell.execution
    reason = execution.failure or idle
    if reason:
        if not cell.is_local:
            yield LeftOut(execution.number, reason, execution.code)
            kept = [one for one, is_kept in zip(cell.statements, cell.kept, strict=False) if is_kept]
            yield from (Step(one, execution.number, execution.ranks) for one in kept)
        return
    ranks = execution.ranks if not cell.is_local else ((0,) if cell.on_rank_0 else EVERYWHERE)
    ranks = EVERYWHERE if ranks is not None and len(ranks) == session.size else ranks
    for i, statement in enumerate(cell.statements):
        yield from cell.inserted.get(i, ())
        if not cell.is_local or cell.kept[i]:
            yield Step(statement, execution.number, ranks, cell.is_local)


# -- checks


def _check_names(plan: Plan, cells: Sequence[_Cell]) -> None:
    """Add a problem for each name that a statement reads and no earlier one binds."""
    if any("import *" in step.statement.text or step.statement.problem for step in plan.steps):
        return
    known = {*BUILTINS, *PROVIDED, "display"}
    everything = {name for step in plan.steps for name in step.statement.names.binds | step.statement.names.sets}
    failed = {
        name: f"cell {cell.execution.number}, which is left out ({cell.execution.failure})"
        for cell in cells
        if cell.execution.failure
        for one in cell.statements
        for name in one.names.binds
    }
    reported: set[str] = set()
    for step in plan.steps:
        found = step.statement.names
        known |= step.statement.needs
        unknown = sorted(((found.needs | step.pulls) - known) | (found.deferred - known - everything))
        for name in unknown:
            if name not in reported:
                origin = failed.get(name, "no exported cell")
                plan.problems.append(f"cell {step.number} reads {name}, which {origin} assigns")
                reported.add(name)
        known |= found.binds | found.sets | step.shares


def _check_sides(plan: Plan) -> None:
    """Add a problem for each variable of the notebook whose name is also one of the ranks' variables.

    The script has one namespace for both.
    """
    owner: dict[str, set[bool]] = {}
    """By name, the sides that have its current value: True for the notebook."""
    for step in plan.steps:
        one = step.statement
        for name in sorted(one.names.needs):
            if step.in_notebook not in owner.get(name, {step.in_notebook}):
                sides = (
                    ("the ranks have", "the notebook has")
                    if step.in_notebook
                    else ("the notebook has", "the ranks have")
                )
                plan.problems.append(
                    f"cell {step.number} reads {name}, which {sides[0]} assigned since {sides[1]}: give one of the two "
                    "variables another name"
                )
        shared = isinstance(one.node, names.SHARED)
        owner |= {name: {True, False} if shared else {step.in_notebook} for name in one.names.binds}
        if step.pulls:
            owner |= {name: {True} for name in one.names.binds}
        owner |= {name: {True, False} for name in step.shares}
