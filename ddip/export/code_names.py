"""Find the names that a statement binds and reads, and whether it can have any other effect."""

from __future__ import annotations

import ast
import builtins
import symtable
from collections.abc import Iterator
from dataclasses import dataclass

BUILTINS = frozenset(dir(builtins)) | {"__name__", "__file__", "__doc__"}
PROVIDED = frozenset({"rank", "world_size", "device"})
"""Variables that ddip, and the script, define on each rank."""
DYNAMIC = frozenset({"globals", "locals", "vars", "eval", "exec", "dir"})
"""Functions that may read any variable."""
PURE_CALLS = frozenset(
    {"len", "int", "float", "str", "bool", "type", "isinstance", "abs", "round", "dir", "id", "repr"}
)
"""Functions without an effect; ``list``, for example, may draw random numbers from a DataLoader."""
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp", "genexpr")


@dataclass(frozen=True)
class Names:
    """The global names of one statement."""

    binds: frozenset[str] = frozenset()
    """Names that the statement assigns, deletes, imports or defines."""
    reads: frozenset[str] = frozenset()
    """Names that it reads while it runs."""
    deferred: frozenset[str] = frozenset()
    """Names that its functions read when they are called."""
    sets: frozenset[str] = frozenset()
    """Names that its functions assign with ``global``."""
    needs: frozenset[str] = frozenset()
    """Names that it certainly reads and does not assign itself, without those of Python."""

    @property
    def all_reads(self) -> frozenset[str]:
        """The names that the statement or its functions read."""
        return self.reads | self.deferred


def names_of(text: str) -> Names:
    """Return the names of the statement in `text`.

    >>> found = names_of("def f(x=a): return x + b")
    >>> sorted(found.binds), sorted(found.reads), sorted(found.deferred)
    (['f'], ['a'], ['b'])
    """
    table = symtable.symtable(text, "<cell>", "exec")
    symbols = table.get_symbols()
    binds = {one.get_name() for one in symbols if one.is_assigned() or one.is_imported()}
    reads = {one.get_name() for one in symbols if one.is_referenced()}
    deferred: set[str] = set()
    assigned: set[str] = set()

    def visit_table(child: symtable.SymbolTable, later: bool) -> None:
        later = later or (child.get_type() == "function" and child.get_name() not in COMPREHENSIONS)
        for one in child.get_symbols():
            if one.is_global() and one.is_referenced():
                (deferred if later else reads).add(one.get_name())
            if one.is_declared_global() and one.is_assigned():
                assigned.add(one.get_name())
        for inner in child.get_children():
            visit_table(inner, later)

    for child in table.get_children():
        visit_table(child, False)
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            reads.add(node.target.id)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del):
            reads.add(node.id)
    needed = reads - binds if isinstance(tree.body[0], COMPOUND) else reads  # a loop reads what it has assigned
    return Names(
        frozenset(binds), frozenset(reads), frozenset(deferred), frozenset(assigned), frozenset(needed - BUILTINS)
    )


def certain_binds(node: ast.stmt | None) -> frozenset[str]:
    """Return the names that a statement binds whenever it succeeds, without a look at their former values."""
    match node:
        case ast.Assign(targets=targets):
            return frozenset(one.id for target in targets for one in _flat_targets(target) if isinstance(one, ast.Name))
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            return frozenset({name})
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return frozenset({name})
        case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
            return frozenset((alias.asname or alias.name).partition(".")[0] for alias in aliases)
    return frozenset()


def _flat_targets(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for inner in target.elts:
            yield from _flat_targets(inner)
    else:
        yield target


def is_pure(node: ast.stmt | None) -> bool:
    """Return True if a statement certainly does nothing but bind its names; None is a comment."""
    match node:
        case None | ast.Pass():
            return True
        case ast.Expr(value=value):
            return _is_pure_value(value)
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and _is_pure_value(value)
        case ast.AnnAssign(target=ast.Name()):
            return node.value is None or _is_pure_value(node.value)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return not node.decorator_list and all(map(_is_pure_value, _default_values(node)))
        case ast.ClassDef():
            parts = [*node.bases, *(keyword.value for keyword in node.keywords)]
            return not node.decorator_list and all(map(_is_pure_value, parts)) and all(map(is_pure, node.body))
    return False


def _default_values(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.expr]:
    return [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]


def _is_pure_value(node: ast.AST) -> bool:
    if isinstance(node, ast.Lambda):
        return True
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Name) and node.func.id in PURE_CALLS
        return named and all(map(_is_pure_value, [*node.args, *(keyword.value for keyword in node.keywords)]))
    impure = (ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr, ast.ListComp, ast.SetComp, ast.DictComp)
    if isinstance(node, (*impure, ast.GeneratorExp, ast.Starred)):
        return False
    return all(map(_is_pure_value, ast.iter_child_nodes(node)))


def is_repeatable(node: ast.stmt) -> bool:
    """Return True if a second run of a definition makes an equal object: it holds no state of its own."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        constant = (ast.Constant, ast.Name, ast.Attribute, ast.UnaryOp)
        return all(isinstance(default, constant) for default in _default_values(node))
    if isinstance(node, ast.ClassDef):
        simple = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Pass)
        return all(
            (isinstance(one, simple) and is_repeatable(one))
            or isinstance(one, ast.Pass)
            or (isinstance(one, (ast.Expr, ast.Assign, ast.AnnAssign)) and isinstance(one.value, ast.Constant))
            or (isinstance(one, ast.AnnAssign) and one.value is None)
            for one in node.body
        )
    return False


def calls_when_defined(node: ast.stmt) -> bool:
    """Return True if a definition calls anything but decorators when it runs."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return not all(map(_is_pure_value, _default_values(node)))
    assert isinstance(node, ast.ClassDef)
    parts = [*node.bases, *(keyword.value for keyword in node.keywords)]
    inner = (
        calls_when_defined(one) if isinstance(one, (*SCOPES, ast.ClassDef)) else not is_pure(one) for one in node.body
    )
    return not all(map(_is_pure_value, parts)) or any(inner)


def top_level_awaits(tree: ast.Module) -> Iterator[ast.Await]:
    """Yield each ``await`` in a simple statement outside of functions."""
    if tree.body and isinstance(tree.body[0], (ast.Expr, ast.Assign)):
        pending: list[ast.AST] = [tree.body[0]]
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Await):
                yield node
            elif not isinstance(node, SCOPES):
                pending += ast.iter_child_nodes(node)


def find_waits(text: str) -> str:
    """Return the first line of a statement that still waits outside of functions, such as ``async for``."""
    try:
        compile(text, "<cell>", "exec")
    except SyntaxError:
        return next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), text)
    return ""


SHARED = (ast.Import, ast.ImportFrom)
"""Statements after which a name means the same in the notebook and on the ranks."""
