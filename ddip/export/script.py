"""Write the text of the script: imports, then functions and classes, then ``main()``.

All variables of the cells are global in ``main``, as they were in the session.
"""

from __future__ import annotations

import ast
import io
import itertools
import math
import re
import shlex
import textwrap
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ddip.errors import ranks_text
from ddip.export import code_names
from ddip.export.code_names import IMPORTS, PROVIDED
from ddip.export.record import Choice, Execution, Session
from ddip.export.selection import EVERYWHERE, LeftOut, Part, Plan, Refusal, Step
from ddip.export.translation import comment_out

DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
MOVABLE = {
    *("torch.no_grad", "torch.inference_mode", "torch.enable_grad", "torch.compile", "functools.wraps"),
    *("functools.lru_cache", "functools.cache", "contextlib.contextmanager", "dataclasses.dataclass", "dataclass"),
    *("staticmethod", "classmethod", "property"),
}
"""Decorators that read no other variables when the definition runs."""
CHANGING = ("setattr", "delattr", "patch", "subprocess", "environ", "putenv", "chdir", "set_start_method", "reload")
"""Names with which code may change the meaning of later imports and definitions."""
FIXED_MODULES = ("torch", "torch.nn", "nn", "torch.nn.functional", "F", "math", "numpy", "np")
"""Modules, by their usual names, whose attributes are the same before the process has joined its group."""
GROUP_FUNCTIONS = ("init_process_group", "destroy_process_group")
"""Functions of torch that the script may replace, so that their imports stay below that."""
PLOTS = re.compile(r"\b(matplotlib|seaborn)\b|\.plot")
KEPT_FIGURES = re.compile(r"\bclose_figures\b|\bioff\(|\b(matplotlib|mpl)\.use\(|switch_backend|%matplotlib (?!inline)")
"""Code after which the notebook does not close the figures that it has shown."""
OURS = ("os", "torch", "torch.distributed", "subprocess")
"""Modules that the script imports itself, at least if its text has their names."""
HEADER = '''\
"""The distributed cells of a notebook session, exported by ddip: {size} ranks, {backend}.

Run it in the notebook's folder; --local-ranks-filter 0 after torchrun shows only rank 0:
    OMP_NUM_THREADS={threads} torchrun --nproc-per-node {size} {name}
    OMP_NUM_THREADS={threads} srun --nodes 1 --ntasks 1 torchrun --nproc-per-node {size} {name}    (Slurm)
    OMP_NUM_THREADS={threads} accelerate launch --num_processes {size} {name}
"""
'''
START = '''\
SEEDS = {seeds}
"""The random state with which each rank of the session started."""


def start_rank() -> None:
    """Join the process group, and start with the random states of the session's ranks."""
    import contextlib
    import os
    import random
    import sys

    sys.path.insert(0, "")  # modules in the working directory, as in a notebook
    {use_device}{for_hf}torch.set_num_threads({threads})
    torch.distributed.init_process_group("{backend}")
{join_cells}{use_app}    random.seed(SEEDS[rank])
    torch.manual_seed(SEEDS[rank])
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(SEEDS[rank])
    os.environ.setdefault("MPLBACKEND", "agg")  # plots need no screen
'''
HF_PATCHED = ("device_map", "notebook_launcher")
"""What ``-a hf`` changes besides the use of the CPU, apart from output and faults."""
USE_APP = '    use_app("{app}", device)  # as in the session: %makedip -a {app}\n'
FOR_HF = 'os.environ.setdefault("ACCELERATE_USE_CPU", "true")  # else accelerate uses one process, for lack of GPUs'
"""The line that replaces ``-a hf`` on CPUs; on GPUs the libraries need none."""
AGAIN = """\
    join = torch.distributed.init_process_group

    def join_once(*arguments, **options) -> None:
        if not torch.distributed.is_initialized():  # as in cells, which may call it although the group exists
            join(*arguments, **options)

    torch.distributed.init_process_group = join_once
"""
STAY = """\
    leave = torch.distributed.destroy_process_group

    def leave_subgroup(group=None) -> None:
        if group not in (None, torch.distributed.group.WORLD):  # as in cells, after which ddip rebuilds that group
            leave(group)

    torch.distributed.destroy_process_group = leave_subgroup
    end_rank.leave = leave
"""
LEAVE = "        torch.distributed.destroy_process_group = end_rank.leave\n"
SHOW_FIGURES = """\
    with contextlib.suppress(ImportError):
        import matplotlib.pyplot

        show_figures = matplotlib.pyplot.show

        def show_and_close(*arguments, **options) -> None:
            show_figures(*arguments, **options)
            close_figures()  # as in the notebook

        matplotlib.pyplot.show = show_and_close
"""
END = '''\
def end_rank() -> None:
    """Leave the process group."""
    import torch.distributed

    if torch.distributed.is_initialized():
{restore}        torch.distributed.destroy_process_group()
{forget}'''
CLOSE_FIGURES = '''\
def close_figures() -> None:
    """Close all figures of matplotlib, as the notebook did at the end of each cell."""
    import sys

    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
'''
JOIN_CELLS = """\
    global cell_group
    import datetime

    cell_group = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(days=1))
"""
"""Forms a group of all ranks that waits for a long cell on one rank, unlike groups with the timeout of torch."""
FORGET_CELLS = """\
    global cell_group
    cell_group = None  # whose threads would otherwise run until Python ends, which may then abort
"""
END_CELL = '''\
def end_cell() -> None:
    """{summary}"""
{lines}
'''
WAIT = "Wait until all ranks have run the cells above, as the session did."
CLOSE = "Close all figures, as the notebook did."
FROM_RANKS = '''\
def from_ranks(value: object) -> list:
    """Return the value of each rank; all ranks call this together."""
    import torch.distributed

    values = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, copied(value))
    return values
'''
PULLS = '''\
pulled: list = []
"""Values that the notebook pulled, in order."""


def copied(value: object) -> object:
    """Return a copy on the CPU, which later cells do not change."""
    import io
    import pickle

    file = io.BytesIO()
    try:
        torch.save(getattr(value, "module", value) if isinstance(value, torch.nn.Module) else value, file)
    except (pickle.PicklingError, AttributeError, TypeError):  # such as a lambda
        return value
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=False)
'''
PUSHES = '''\
def pushed_values(number: int) -> list:
    """Return the values of one %dipush; {file} has them."""
    import io
    import pickle
    from pathlib import Path

    with Path(__file__).with_name({file!r}).open("rb") as file:
        pushes = pickle.load(file)
    return [*torch.load(io.BytesIO(pushes[number]), weights_only=False).values()]
'''
RUN_SCRIPT = '''\
def run_script(path: str, *arguments: str) -> None:
    """Run a script in this process as %diprun does, and add its variables to those of the cells."""
    import sys
    import types
    from pathlib import Path

    destroy, argv, former = torch.distributed.destroy_process_group, sys.argv, sys.modules["__main__"]
    torch.distributed.destroy_process_group = lambda *arguments: None
    sys.argv, sys.modules["__main__"] = [path, *arguments], types.ModuleType("__main__")
    found = vars(sys.modules["__main__"])
    found["__file__"] = path
    try:
        exec(compile(Path(path).read_bytes(), path, "exec"), found)
    except SystemExit as end:
        if end.code:
            raise
    finally:
        torch.distributed.destroy_process_group, sys.argv, sys.modules["__main__"] = destroy, argv, former
    globals().update({name: value for name, value in found.items() if name.strip("_") and name[:2] != "__"})
'''
DISPLAY = '''\
def display(*values: object, **options: object) -> object:
    """Print values, as the notebook showed them; ``update`` of the result prints other ones."""
    import types

    print(*values)
    return types.SimpleNamespace(display=display, update=display)
'''
OPTIONS = '''\
def parse_options() -> argparse.Namespace:
    """Return the options of the command line; their defaults are the values of the session."""
    parser = argparse.ArgumentParser()
{lines}
    return parser.parse_args()
'''
SHOW = '''\
def show_results() -> None:
    """Run the notebook's code for pulled values, on rank 0 after all cells of the ranks."""
{lines}
'''


@dataclass
class _Layout:
    """The imports and definitions that stand above ``main``."""

    imports: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    hoisted: set[int] = field(default_factory=set)
    """Identities of the steps that are not in ``main``."""
    names: set[str] = field(default_factory=set)
    """Names that the module binds."""


def write_script(plan: Plan, session: Session, choice: Choice, name: str, data: str = "", last_line: str = "") -> str:
    """Return the text of the script `name`.

    `data`: name of the file with pushed values; `last_line`: code to run after the cells instead of the notebook's.
    """
    layout = _arrange_steps(plan)
    names = {used for step in plan.steps for used in step.statement.names.everything}
    text = "\n".join(step.statement.text for step in plan.steps)
    main = "run_cells" if "main" in names or any(step.statement.script for step in plan.steps) else "main"
    options: dict[str, object] = {}
    app = _needed_app(session, text)
    local = "" if last_line else "\n".join(line for _, lines in plan.shown for line in lines)
    waits, plots = session.size > 1, bool(PLOTS.search(text + local)) and not KEPT_FIGURES.search(text)
    body = _main_text(plan, layout, session, choice, options, begins_cells=bool(app), ends_cells=waits or plots)
    facts = {
        "size": session.size,
        "backend": session.backend,
        "threads": session.threads,
        "seeds": session.seeds,
        "for_hf": f"{FOR_HF}\n    " if session.app == "hf" and session.device == "cpu" and not app else "",
        "join_cells": JOIN_CELLS if "end_cell()" in body and waits else "",
        "use_app": USE_APP.format(app=app) if app else "",
        "use_device": "" if session.device == "cpu" else f"torch.{session.device}.set_device(device)\n    ",
    }
    joins_again = "init_process_group" in text or "run_script" in text
    leaves = "destroy_process_group" in text
    patches = AGAIN * joins_again + STAY * leaves + SHOW_FIGURES * plots
    end = END.format(restore=LEAVE * leaves, forget=FORGET_CELLS * bool(facts["join_cells"]))
    helpers = [START.format(**facts) + patches, end]
    helpers += [CLOSE_FIGURES] if plots else []
    helpers += [_end_cell_text(waits, plots)] if "end_cell()" in body else []
    helpers += [PULLS] if "pulled." in text else []
    helpers += [FROM_RANKS] if "from_ranks(" in text else []
    helpers += [PUSHES.format(file=data)] if plan.data else []
    helpers += [RUN_SCRIPT] if "run_script(" in text else []
    if options:
        lines = "\n".join(f"    {_option_line(*option)}" for option in options.items())
        helpers.append(OPTIONS.format(lines=lines))
    imports = [f"import {module}" for module in OURS if module != "subprocess" or "subprocess.run(" in text]
    imports += ["import argparse"] if options else []
    assigned = {name for step in plan.steps for name in step.statement.names.binds}
    local_names = code_names.names_of(local).everything if local else frozenset()
    helpers += [DISPLAY] if "display" in (names | local_names) - assigned else []
    imports += ["from ddip.apps.script_app import begin_cell, use_app"] if app else []
    shown = _shown_text(plan, plots) if local else ""
    helpers += [SHOW.format(lines=shown)] if shown else []
    bound = {name for step in plan.steps if id(step) not in layout.hoisted for name in step.statement.names.binds}
    opening = f'def {main}() -> None:\n    """Run the cells in the order of the session."""\n'
    opening += "".join(f"    global {line.rstrip(',')}\n" for line in textwrap.wrap(", ".join(sorted(bound)), 100))
    opening += "    session_options = parse_options()\n" if options else ""
    run = ["start_rank()", f"{main}()", *filter(None, [last_line]), "end_rank()"]
    run += ['if os.environ["RANK"] == "0":', "    show_results()"] if shown else []
    ending = 'if __name__ == "__main__":\n' + "\n".join(f"    {line}" for line in run)
    module = [
        HEADER.format(name=shlex.quote(name), **facts),
        *sorted({*layout.imports, *imports}, key=_import_order),
        "",
        _rank_text(session),
    ]
    parts = ["\n".join(module), *layout.definitions, *helpers, opening + body, ending]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts)


def _needed_app(session: Session, text: str) -> str | None:
    """Return the app that the script imports; None if it needs none, or one line replaces it."""
    if session.app != "hf" or any(word in text for word in HF_PATCHED):
        return session.app
    return None


def _rank_text(session: Session) -> str:
    device = 'torch.device("cpu")'
    if session.device != "cpu":
        device = f'torch.device({session.device!r}, int(os.environ["LOCAL_RANK"]))'
    return f'rank = int(os.environ["RANK"])\nworld_size = int(os.environ["WORLD_SIZE"])\ndevice = {device}\n'


def _import_order(line: str) -> tuple[bool, bool, str]:
    return "__future__" not in line, line.startswith("from "), line


# -- imports and definitions


def _arrange_steps(plan: Plan) -> _Layout:
    """Choose the imports, functions and classes that can be above ``main`` without another meaning.

    Nothing moves over code that may change its meaning: a change of the environment or of an attribute, or an import of
    a package that may do the same.
    """
    layout = _Layout()
    if any(step.statement.script for step in plan.steps):
        return layout  # whose variables may have the same names
    nodes: dict[str, list[ast.stmt | None]] = {module: [*ast.parse(f"import {module}").body] for module in OURS}
    text = "\n".join(step.statement.text for step in plan.steps)
    for step in plan.steps:
        for name in step.statement.names.binds | step.statement.names.sets:
            nodes.setdefault(name, []).append(step.statement.node)
    read: set[str] = set()
    is_changed = any(word in text for word in ("__init_subclass__", "__set_name__", "metaclass"))
    for step in plan.steps:
        node, names = step.statement.node, step.statement.names
        same = node is not None and all(_is_same(node, other) for name in names.binds for other in nodes[name])
        is_early = bool((names.binds - layout.names) & (read | code_names.BUILTINS | PROVIDED))
        if node is not None and same and not is_early and step.ranks is EVERYWHERE:
            if isinstance(node, IMPORTS):
                is_replaced = any(alias.name in GROUP_FUNCTIONS for alias in node.names)
                if not (is_changed or is_replaced or code_names.untrusted_import(node)):
                    layout.imports += _import_lines(node)
                    layout.hoisted.add(id(step))
            elif isinstance(node, DEFINITIONS) and _can_move(node, is_changed):
                fixed = layout.names | code_names.BUILTINS | (PROVIDED - nodes.keys())
                is_again = node.name in layout.names
                if names.reads <= fixed and not (is_again and is_changed):
                    layout.definitions += [] if is_again else [step.statement.text]
                    layout.hoisted.add(id(step))
        if id(step) in layout.hoisted:
            layout.names |= names.binds
        else:
            read |= names.reads | names.deferred
        is_changed = is_changed or (node is not None and _may_change(node))
    return layout


def _can_move(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, is_changed: bool) -> bool:
    """Return True if a definition has the same result at the beginning of the script."""
    if isinstance(node, ast.ClassDef):
        if is_changed:
            return False
        parts: list[ast.AST] = [*node.bases, *node.keywords]
        values: list[ast.AST] = []
        for member in node.body:
            if isinstance(member, DEFINITIONS):
                if not _can_move(member, is_changed):
                    return False
            else:
                parts.append(member)
                values += [member.value or member.target] if isinstance(member, ast.AnnAssign) else [member]
    else:
        parts = values = [*code_names.default_values(node)]
    if any(isinstance(inner_node, ast.Attribute) and not _is_fixed(inner_node) for inner_node in _walk_all(values)):
        return False
    inner = [*_walk_all([*parts, *node.decorator_list])]
    if any(isinstance(inner_node, ast.Call) for inner_node in _walk_all(parts)):
        return False
    decorators = [decorator.func if isinstance(decorator, ast.Call) else decorator for decorator in node.decorator_list]
    return {ast.unparse(decorator) for decorator in decorators} <= MOVABLE and not (
        is_changed and (node.decorator_list or any(isinstance(inner_node, ast.Attribute) for inner_node in inner))
    )


def _walk_all(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    return itertools.chain.from_iterable(map(ast.walk, nodes))


def _is_fixed(node: ast.Attribute) -> bool:
    """Return True if an attribute is no state of the process, such as the default process group."""
    return ast.unparse(node.value) in FIXED_MODULES


def _may_change(node: ast.stmt) -> bool:
    """Return True if a statement may change the meaning of a later import or definition."""
    if code_names.untrusted_import(node):
        return True
    for inner in ast.walk(node):
        match inner:
            case ast.Attribute(value=value, ctx=ast.Store() | ast.Del()):
                if not isinstance(value, ast.Name) or value.id != "self":
                    return True
            case ast.Attribute(value=ast.Name("sys"), attr="path" | "modules"):
                return True
            case ast.Name(id=name) | ast.Attribute(attr=name) if name in CHANGING:
                return True
    return False


def _is_same(node: ast.stmt, other: ast.stmt | None) -> bool:
    """Return True if two imports or functions bind their common names to equal objects."""
    if node is other:
        return True
    if isinstance(node, IMPORTS):
        if not isinstance(other, IMPORTS):
            return False
        first, second = code_names.import_origins(node), code_names.import_origins(other)
        return all(first[name] == second[name] for name in first.keys() & second.keys())
    if not isinstance(node, ast.FunctionDef) or node.decorator_list:
        return False  # a second run makes a new object, with a state of its own
    if not all(
        isinstance(default, (ast.Constant, ast.Name, ast.UnaryOp)) for default in code_names.default_values(node)
    ):
        return False
    return other is not None and ast.dump(node) == ast.dump(other)


def _import_lines(node: ast.Import | ast.ImportFrom) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [ast.unparse(node)]
    return [f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "") for alias in node.names]


# -- main


def _main_text(
    plan: Plan,
    layout: _Layout,
    session: Session,
    choice: Choice,
    options: dict[str, object],
    *,
    begins_cells: bool,
    ends_cells: bool,
) -> str:
    """Return the body of ``main``; adds the options that it needs, with their defaults, to `options`.

    `begins_cells`: notify the session's app of each cell; `ends_cells`: call ``end_cell()`` between cells with an
    effect, except for cells that ran at the same time.
    """
    events = [event for event in session.events if isinstance(event, Execution) and event.overlaps]
    at_once = {number for event in events for number in (event.number, event.overlaps)}
    effective, end = 0, 0  # number of the last cell with an effect, and its end in `lines`
    has_options = {event.number for event in session.events if getattr(event, "is_param", False)}
    is_assigned = any("rank" in step.statement.names.binds | step.statement.names.sets for step in plan.steps)
    own_rank = "torch.distributed.get_rank()" if is_assigned else "rank"
    lines: list[str] = []
    former = 0
    parts_of: Counter[int] = Counter()
    rest = [part for part in plan.parts if id(part) not in layout.hoisted]
    for _, group in itertools.groupby(rest, key=_block_of):
        parts = list(group)
        first = parts[0]
        if isinstance(first, LeftOut):
            lines += [
                "",
                f"# cell {first.number} is left out: {first.reason}",
                comment_out(textwrap.indent(first.code, "    ")),
            ]
            continue
        if isinstance(first, Refusal):
            if choice.partial:
                lines += ["", *filter(None, [first.code]), f"raise NotImplementedError({first.text!r})"]
            continue
        steps = [part for part in parts if isinstance(part, Step) and not part.statement.problem]
        if not steps:
            continue
        ranks = first.ranks
        where = f" on {ranks_text(ranks)}" if ranks is not None else ""
        lines += [""] if former == first.number else ["", f"# cell {first.number}{where}"]
        former = first.number
        texts = [_step_text(step, step is steps[-1], options if step.number in has_options else None) for step in steps]
        body = "\n".join(texts).strip("\n")
        if begins_cells:
            parts_of[first.number] += 1
            more = f", {ranks or ()}" if ranks or parts_of[first.number] > 1 else ""
            more += f", part={parts_of[first.number]}" if parts_of[first.number] > 1 else ""
            body = f"begin_cell({first.number}{more})\n" + body
        if ranks is not None:
            body += "" if any(step.statement.node for step in steps) else "\npass"
            body = f"if {own_rank} {f'== {ranks[0]}' if len(ranks) == 1 else f'in {ranks}'}:\n" + _indent_code(body)
        lines.append(body)
        if any(map(_has_effect, steps)):
            if ends_cells and effective not in (0, first.number) and not at_once >= {effective, first.number}:
                lines.insert(end, "end_cell()")
            effective, end = first.number, len(lines)
    return _indent_code("\n".join(lines).strip("\n") + "\npass" * (not plan.steps)) + "\n"


def _has_effect(step: Step) -> bool:
    """Return True if a step may do something that other ranks notice, such as write a file."""
    statement, node = step.statement, step.statement.node
    is_quiet = code_names.is_pure(node) or (isinstance(node, IMPORTS) and not code_names.untrusted_import(node))
    return bool(statement.script) or not (is_quiet or statement.pull is not None)


def _block_of(part: Part) -> tuple[object, ...]:
    """Return a key that consecutive statements of one block have in common."""
    return (part.number, part.ranks) if isinstance(part, Step) else (id(part),)


def _step_text(step: Step, is_last: bool, options: dict[str, object] | None) -> str:
    statement, node = step.statement, step.statement.node
    match node:
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            text = f"{name} = {ast.unparse(value)}"  # a global variable has no annotation
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            text = statement.text
        case ast.Expr(value=value) if is_last and not isinstance(value, (ast.Call, ast.Constant)):
            shown = ast.get_source_segment(statement.text, ast.parse(statement.text).body[0]) or ""
            is_last = statement.text.endswith(shown)
            return f"{statement.text.removesuffix(shown)}print({shown})" if is_last else statement.text
        case _:
            return statement.text
    if options is not None and isinstance(value, (ast.Constant, ast.UnaryOp)) and name not in (*options, "help", "h"):
        try:
            default = ast.literal_eval(value)
        except ValueError:
            return text
        if isinstance(default, (bool, int, str)) or (isinstance(default, float) and math.isfinite(default)):
            options[name] = default
            return f"{name} = session_options.{name}"
    return text


def _option_line(name: str, default: object) -> str:
    kind = "action=argparse.BooleanOptionalAction" if isinstance(default, bool) else f"type={type(default).__name__}"
    return f"parser.add_argument({'--' + name.replace('_', '-')!r}, dest={name!r}, {kind}, default={default!r})"


def _shown_text(plan: Plan, closes_figures: bool) -> str:
    first = ["close_figures()"] * closes_figures
    lines = [f"# cell {number} of the notebook\n" + "\n".join([*first, *code]) + "\n" for number, code in plan.shown]
    return _indent_code("\n".join(lines).rstrip("\n"))


def _end_cell_text(waits: bool, plots: bool) -> str:
    summary = " ".join([WAIT] * waits + [CLOSE] * plots)
    lines = ["    close_figures()"] * plots + ["    torch.distributed.barrier(cell_group)"] * waits
    return END_CELL.format(summary=summary, lines="\n".join(lines))


def _indent_code(text: str) -> str:
    """Indent all lines but those that continue a string."""
    inside: set[int] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING or tokenize.tok_name[token.type].startswith("FSTRING"):
                inside |= set(range(token.start[0] + 1, token.end[0] + 1))
    except (tokenize.TokenError, IndentationError):
        pass
    lines = text.split("\n")  # a form feed in a string ends no line
    return "\n".join(
        f"    {line}" if line.strip() and number not in inside else line for number, line in enumerate(lines, 1)
    )
