"""Write the text of the script: imports, then functions and classes, then ``main()``."""

from __future__ import annotations

import ast
import io
import itertools
import sys
import textwrap
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ddip.errors import ranks_text
from ddip.export import code_names as names
from ddip.export import parameters
from ddip.export.record import Choice, Session
from ddip.export.selection import FROM_RANKS, LeftOut, Plan, Step

ENVIRONMENT = (
    "environ",
    "putenv",
    "sys.path",
    "chdir",
    "sys.modules",
    "set_start_method",
    "subprocess.run",
    "write_text",
)
"""Code after which an import may find another module or behave differently."""
HEADER = '''\
"""The distributed cells of a notebook session, exported by ddip: {size} ranks, {backend}.

{launch}
"""
'''
LAUNCH = """\
Run it in the notebook's folder:
    torchrun --nproc-per-node {size} {name}
    srun --nodes 1 --ntasks 1 torchrun --nproc-per-node {size} {name}    (Slurm)
    accelerate launch --num_processes {size} {name}
All ranks print; --local-ranks-filter 0 after torchrun shows only rank 0."""
START = '''\
SEEDS = {seeds}
"""The random state with which each rank of the session started."""


def start_rank() -> None:
    """Join the process group, and start with the random states of the session's ranks."""
    import random

    {use_device}torch.set_num_threads({threads})
    torch.distributed.init_process_group({backend!r})
    random.seed(SEEDS[rank])
    torch.manual_seed(SEEDS[rank])
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(SEEDS[rank])
'''
DISPLAY = '''\
class display:
    """Print objects, as a script has no page to show them on."""

    def __init__(self, *objects: object, **options: object) -> None:
        print(*objects)

    update = __init__
'''
COLLECT = '''\
def from_ranks(value: object) -> list:
    """Return the value of each rank; all ranks call this together."""
    values = [None] * world_size
    torch.distributed.all_gather_object(values, value)
    return values
'''
STORED = '''\
def stored_value(name: str) -> object:
    """Return a value that the notebook pushed; {file} has it."""
    with Path(__file__).with_name({file!r}).open("rb") as file:
        return pickle.load(file)[name]
'''
NOTEBOOK = '''\
class NotebookRandom:
    """Run code of the notebook with random states of its own, as if in another process."""

    states = None

    def __enter__(self) -> None:
        self.of_rank, former = self.read_states(), NotebookRandom.states
        if former is not None:
            self.set_states(former)

    def __exit__(self, *error: object) -> None:
        NotebookRandom.states = self.read_states()
        self.set_states(self.of_rank)

    def read_states(self) -> tuple:
        numpy = sys.modules.get("numpy.random")
        return random_states.getstate(), torch.get_rng_state(), numpy and numpy.get_state()

    def set_states(self, states: tuple) -> None:
        python, of_torch, of_numpy = states
        random_states.setstate(python)
        torch.set_rng_state(of_torch)
        if of_numpy is not None:
            sys.modules["numpy.random"].set_state(of_numpy)
'''
INIT = """\
    # cells may call init_process_group again: the group exists, and the call does nothing
    torch.distributed.init_process_group = lambda *arguments, **options: None
"""
APP = """\
    # the app {app} of ddip prepared its framework on each rank of the session; this does the same
    import ddip.apps.{app}

    ddip.apps.{app}.prepare()
"""
RUN = """\
if __name__ == "__main__":
    start_rank()
    {main}()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
"""


@dataclass
class _Layout:
    """The place of each statement."""

    imports: list[str] = field(default_factory=list)
    definitions: list[str] = field(default_factory=list)
    hoisted: set[int] = field(default_factory=set)
    """Identities of the steps that are not in ``main``."""
    names: set[str] = field(default_factory=set)
    """Names that the module binds."""
    deferred: set[str] = field(default_factory=set)
    """Names that the functions of the module read."""


def write_script(plan: Plan, session: Session, choice: Choice, name: str, last_lines: str = "", data: str = "") -> str:
    """Return the text of the script `name`.

    `last_lines`: code for the end of ``main``; `data`: name of the file with pushed values.
    """
    layout = _arrange_steps(plan.steps)
    bound = {one for step in plan.steps for one in step.statement.names.binds}
    main = next(one for one in ("main", "run_cells", "run_session") if one not in bound)
    options = parameters.Options(session)
    body = _main_lines(plan, layout, options, choice)
    text = "\n".join(step.statement.text for step in plan.steps)
    used = {one for step in plan.steps for one in step.statement.names.all_reads}
    needs = {one for step in plan.steps for one in step.statement.needs}
    has_notebook = any(step.in_notebook and id(step) not in layout.hoisted for step in plan.steps)
    helpers = [_start_text(session, "init_process_group" in text)]
    extra = {"contextlib", "os", "torch", "torch.distributed"} | (needs - {FROM_RANKS})
    imports = [f"import {module}" for module in extra]
    if "display" in used - bound:
        helpers.append(DISPLAY)
    if FROM_RANKS in needs:
        helpers.append(COLLECT)
    if data:
        helpers.append(STORED.format(file=data))
        imports += ["import pickle", "from pathlib import Path"]
    if has_notebook:
        helpers.append(NOTEBOOK)
        imports += ["import random as random_states", "import sys"]
    if options.found:
        helpers.append(options.function_text())
        imports.append("import argparse")
    launch = textwrap.indent(LAUNCH.format(size=session.size, name=name), "").strip()
    header = HEADER.format(size=session.size, backend=session.backend, launch=launch)
    module = [header, "\n".join(_sorted_imports([*layout.imports, *imports])), _rank_text(session)]
    opening = f'def {main}() -> None:\n    """Run the cells in the order of the session."""\n'
    opening += _global_lines(plan, layout)
    if "matplotlib" in text:
        opening += '    import matplotlib\n\n    matplotlib.use("agg")  # plots need no screen\n\n'
    if options.found:
        opening += "    options = parse_options()\n\n"
    closing = textwrap.indent(last_lines, "    ")
    parts = [*module, *layout.definitions, *helpers, opening + body + closing, RUN.format(main=main)]
    return "\n\n".join(part.strip("\n") + "\n" for part in parts if part.strip())


def _rank_text(session: Session) -> str:
    device = 'torch.device("cpu")'
    if session.device != "cpu":
        device = f'torch.device({session.device!r}, int(os.environ["LOCAL_RANK"]))'
    return f'rank = int(os.environ["RANK"])\nworld_size = int(os.environ["WORLD_SIZE"])\ndevice = {device}\n'


def _app_text(app: str | None) -> str:
    if app is None:
        return ""
    if app == "deepspeed":
        return "    # DeepSpeed uses the process group; the app of the session has prepared nothing else\n"
    return APP.format(app=app)


def _start_text(session: Session, calls_init: bool) -> str:
    use_device = "" if session.device == "cpu" else f"torch.{session.device}.set_device(device)\n    "
    text = START.format(seeds=session.seeds, use_device=use_device, threads=session.threads, backend=session.backend)
    return text + (INIT if calls_init else "") + _app_text(session.app)


def _sorted_imports(lines: Iterable[str]) -> list[str]:
    def section_of(line: str) -> int:
        package = line.split()[1].partition(".")[0]
        return 0 if package == "__future__" else 1 if package in sys.stdlib_module_names else 2

    found: list[str] = []
    for line in sorted({*lines}, key=lambda line: (section_of(line), line.startswith("from "), line.lower())):
        if found and section_of(line) != section_of(found[-1]):
            found.append("")
        found.append(line)
    return found


# -- imports and definitions


def _arrange_steps(steps: Sequence[Step]) -> _Layout:
    """Choose the imports, functions and classes that can be above ``main`` without another meaning."""
    layout = _Layout()
    nodes: dict[str, list[ast.stmt | None]] = {}
    for step in steps:
        for one in step.statement.names.binds | step.statement.names.sets:
            nodes.setdefault(one, []).append(step.statement.node)
    stored = {
        one.value.id
        for step in steps
        if step.statement.node is not None
        for one in ast.walk(step.statement.node)
        if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store) and isinstance(one.value, ast.Name)
    }
    read: set[str] = set()
    changed = False
    for step in steps:
        node, found = step.statement.node, step.statement.names
        same = node is not None and all(
            other is node or (other is not None and _is_same(node, other))
            for one in found.binds
            for other in nodes[one]
        )
        early = found.binds & (read | (names.BUILTINS - {"__name__"}))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
            if star or (same and not early - layout.names and not changed):
                layout.imports += _import_lines(node)
                _hoist_step(step, layout)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            repeated = any(other is not node for other in nodes[node.name])
            first = node.name not in layout.names
            if (
                same
                and not (first and early)
                and not names.calls_when_defined(node)
                and found.reads <= layout.names | names.BUILTINS | names.PROVIDED
                and not (repeated and (node.decorator_list or not names.is_repeatable(node)))
                and node.name not in stored
                and node.name not in names.PROVIDED
            ):
                if first:
                    layout.definitions.append(step.statement.text)
                _hoist_step(step, layout)
                layout.deferred |= found.deferred
        elif node is not None:
            changed = changed or any(word in step.statement.text for word in ENVIRONMENT)
            read |= found.reads
        if id(step) not in layout.hoisted:
            read |= found.all_reads
    return layout


def _hoist_step(step: Step, layout: _Layout) -> None:
    layout.hoisted.add(id(step))
    layout.names |= step.statement.names.binds


def _is_same(node: ast.stmt, other: ast.stmt) -> bool:
    """Return True if two imports or definitions bind their common names to the same objects."""
    if isinstance(node, names.SHARED):
        if not isinstance(other, names.SHARED):
            return False
        first, second = _import_origins(node), _import_origins(other)
        return all(first[name] == second[name] for name in first.keys() & second.keys())
    return ast.dump(node) == ast.dump(other)


def _import_origins(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Return the origin of each name that an import binds."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
            for alias in node.names
        }
    return {alias.asname or alias.name: f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names}


def _import_lines(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        yield ast.unparse(node)
        return
    for alias in node.names:
        yield f"import {alias.name}" + (f" as {alias.asname}" if alias.asname else "")


# -- main


def _global_lines(plan: Plan, layout: _Layout) -> str:
    """Return the declaration of the variables of ``main`` that functions of the module also use."""
    rest = [step.statement for step in plan.steps if id(step) not in layout.hoisted]
    bound = {name for one in rest for name in one.names.binds}
    everything = {name for step in plan.steps for name in step.statement.names.all_reads}
    set_by_functions = {name for step in plan.steps for name in step.statement.names.sets}
    at_module = layout.deferred | layout.names | names.BUILTINS | names.PROVIDED | set_by_functions
    defined = {
        one.node.name for one in rest if isinstance(one.node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    }
    shared = bound if everything & names.DYNAMIC else bound & (at_module | defined)
    wrapped = textwrap.wrap(", ".join(sorted(shared)), 100)
    return "".join(f"    global {line.rstrip(',')}\n" for line in wrapped)


def _main_lines(plan: Plan, layout: _Layout, options: parameters.Options, choice: Choice) -> str:
    lines: list[str] = []
    former = None
    rest = [part for part in plan.parts if id(part) not in layout.hoisted]
    for _, parts in itertools.groupby(rest, key=_block_of):
        first, *others = parts
        if isinstance(first, LeftOut):
            lines += ["", f"# cell {first.number} is left out: {first.reason}"]
            lines += [f"#     {line}".rstrip() for line in first.code.strip("\n").splitlines()]
            continue
        steps = [first, *(part for part in others if isinstance(part, Step))]
        number, ranks, in_notebook = first.number, first.ranks, first.in_notebook
        if not any(step.statement.node is not None or step.statement.problem for step in steps):
            lines += ["", *(line for step in steps for line in step.statement.text.splitlines())]
            continue
        where = " of the notebook" if in_notebook else "" if ranks is None else f" on {ranks_text(ranks)}"
        lines += [""] if former == number else ["", f"# cell {number}{where}"]
        former = number
        body = "\n".join(_step_text(step, step is steps[-1], options, choice) for step in steps).strip("\n")
        if in_notebook and any(not names.is_pure(step.statement.node) for step in steps):
            body = "with NotebookRandom():\n" + _indent_code(body)
        if ranks is not None:
            test = f"rank == {ranks[0]}" if len(ranks) == 1 else f"rank in {ranks}"
            body = f"if {test}:\n" + _indent_code(body)
        lines.append(body)
    return _indent_code("\n".join(lines).strip("\n") or "pass") + "\n"


def _block_of(part: Step | LeftOut) -> tuple[object, ...]:
    """Return a key that consecutive statements of one block have in common."""
    return (id(part),) if isinstance(part, LeftOut) else (part.number, part.ranks, part.in_notebook)


def _step_text(step: Step, is_last: bool, options: parameters.Options, choice: Choice) -> str:
    statement = step.statement
    if statement.problem:
        text = f"cell {step.number}: {statement.problem}"
        return f"{statement.text}\nraise NotImplementedError({text!r})"
    if step.number in options.numbers and (text := options.replace_constant(statement)):
        return text
    node = statement.node
    if is_last and isinstance(node, ast.Expr) and not isinstance(node.value, (ast.Call, ast.Constant, ast.ListComp)):
        shown = ast.get_source_segment(statement.text, node) or ast.unparse(node)
        return f"{statement.text.rpartition(shown)[0]}print({shown})"
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
        return f"{node.target.id} = {ast.unparse(node.value)}"  # a global variable has no annotation
    return statement.text


def _indent_code(text: str) -> str:
    """Indent all lines but those that continue a string."""
    inside: set[int] = set()
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.STRING or tokenize.tok_name[token.type] == "FSTRING_MIDDLE":
                inside |= set(range(token.start[0] + 1, token.end[0] + 1))
    except (tokenize.TokenError, IndentationError):
        pass
    lines = text.splitlines()
    return "\n".join(
        f"    {line}" if line.strip() and number not in inside else line for number, line in enumerate(lines, 1)
    )
