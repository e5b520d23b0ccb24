"""Find the global names of a statement, whether it has any other effect, and what a script cannot repeat in it."""

from __future__ import annotations

import ast
import builtins
import re
import symtable
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass

OF_IPYTHON = {"display", "get_ipython", "__IPYTHON__"}
"""Names that IPython adds to those of Python in the notebook's process."""
BUILTINS = frozenset(dir(builtins)) - OF_IPYTHON | {"__name__", "__doc__"}
PROVIDED = frozenset({"rank", "world_size", "device"})
"""Variables that ddip, and the script, define on each rank."""
TRUSTED = sys.stdlib_module_names | {"torch", "numpy"}
"""Packages that each rank imports before its first cell, or whose import changes nothing that numbers depend on."""
COMPOUND = (ast.For, ast.While, ast.If, ast.With, ast.Try, ast.Match)
IMPORTS = (ast.Import, ast.ImportFrom)
COMPREHENSIONS = ("listcomp", "setcomp", "dictcomp")
"""Scopes that run at once, other than those of generators and functions."""


@dataclass(frozen=True)
class Names:
    """The global names of one statement."""

    binds: frozenset[str] = frozenset()
    """Names that the statement assigns, deletes, imports or defines."""
    reads: frozenset[str] = frozenset()
    """Names that it reads while it runs."""
    deferred: frozenset[str] = frozenset()
    """Names that its functions read when they are called, and identifiers in strings, such as annotations."""
    sets: frozenset[str] = frozenset()
    """Names that its functions assign with ``global``."""
    needs: frozenset[str] = frozenset()
    """Names that it certainly reads and does not assign itself, without those of Python."""
    mentioned: frozenset[str] = frozenset()
    """Words in its strings, which other code may run, such as ``cProfile.run("train()")``."""

    @property
    def everything(self) -> frozenset[str]:
        """All names that the statement or its functions use."""
        return self.binds | self.reads | self.deferred | self.sets


def names_of(text: str) -> Names:
    """Return the names of the statement in `text`.

    >>> found = names_of("def f(x=a): return x + b")
    >>> sorted(found.binds), sorted(found.reads), sorted(found.deferred)
    (['f'], ['a'], ['b'])
    """
    table = symtable.symtable(text, "<cell>", "exec")
    binds = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    reads = {symbol.get_name() for symbol in table.get_symbols() if symbol.is_referenced()}
    deferred: set[str] = set()
    assigned: set[str] = set()

    def visit_table(child: symtable.SymbolTable, later: bool) -> None:
        later = later or (child.get_type() == "function" and child.get_name() not in COMPREHENSIONS)
        for symbol in child.get_symbols():
            if symbol.is_global() and symbol.is_referenced():
                (deferred if later else reads).add(symbol.get_name())
            if symbol.is_declared_global() and symbol.is_assigned():
                assigned.add(symbol.get_name())
        for inner in child.get_children():
            visit_table(inner, later)

    for child in table.get_children():
        visit_table(child, False)
    tree = ast.parse(text)
    for node in _walk_own_scope(tree):
        match node:
            case ast.AugAssign(target=ast.Name(name)) | ast.Name(name, ast.Del()):
                reads.add(name)
            case ast.NamedExpr(target=ast.Name(name)):
                binds.add(name)  # also within a comprehension
    mentioned: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            mentioned.update(re.findall(r"[^\W\d]\w*", node.value))
            if node.value.isidentifier():
                deferred.add(node.value)
    internal = _comprehension_variables(tree) | {"__conditional_annotations__"}
    binds, reads = binds - internal, reads - internal
    needed = reads - binds if isinstance(tree.body[0], COMPOUND) else reads  # a loop reads what it has assigned
    for node, later in _classes_in(tree):
        (deferred if later else reads).update(_reads_before_binding(node))
    return Names(*map(frozenset, (binds, reads, deferred, assigned, needed - BUILTINS, mentioned)))


def _classes_in(node: ast.AST, later: bool = False) -> Iterator[tuple[ast.ClassDef, bool]]:
    """Yield all classes below `node`, and whether a function creates them when it is called."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.ClassDef):
            yield inner, later
        yield from _classes_in(inner, later or isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)))


def _reads_before_binding(node: ast.ClassDef) -> set[str]:
    """Return the names that a class body binds, but may read before.

    Python then reads the global variable, although symtable calls such a name local.
    """
    found: set[str] = set()
    bound: set[str] = set()
    binds = {name for inner in ast.walk(node) for name in certain_binds(inner)} | stored_names(node)
    for statement in node.body:
        found |= set(_loaded_names(statement)) - bound
        bound |= certain_binds(statement)
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            bound |= stored_names(statement.target)
    return found & binds


def _loaded_names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement of a class body reads in the scope of the class."""
    inner: list[ast.AST] = [*ast.iter_child_nodes(node)]
    match node:
        case ast.Name(id=name, ctx=ast.Load()) | ast.AugAssign(target=ast.Name(id=name)):
            yield name
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            arguments = [argument.annotation for argument in ast.walk(node.args) if isinstance(argument, ast.arg)]
            parts = [*node.decorator_list, *default_values(node), node.returns, *arguments]
            inner = [part for part in parts if part is not None]
        case ast.Lambda():
            inner = [*default_values(node)]
        case ast.ClassDef():
            inner = [*node.decorator_list, *node.bases, *node.keywords]
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            inner = [node.generators[0].iter]  # the rest has a scope of its own
    for child in inner:
        yield from _loaded_names(child)


def _walk_own_scope(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes below `node` that are not in functions and classes: those that bind global names."""
    for inner in ast.iter_child_nodes(node):
        if not isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)):
            yield inner
            yield from _walk_own_scope(inner)


def _comprehension_variables(tree: ast.Module) -> set[str]:
    """Return names that only comprehensions bind.

    Python 3.12 and later list them as names of the statement.
    """
    variables: set[str] = set()

    def visit_outside(node: ast.AST, inner: frozenset[str]) -> Iterator[str]:
        if isinstance(node, ast.Name) and node.id not in inner:
            yield node.id
        if isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)):
            first = node.generators[0].iter  # belongs to the scope around it
            yield from visit_outside(first, inner)
            targets = [name for loop in node.generators for name in ast.walk(loop.target) if isinstance(name, ast.Name)]
            variables.update(name.id for name in targets)
            inner |= {name.id for name in targets}
        for child in ast.iter_child_nodes(node):
            yield from visit_outside(child, inner)

    outside = set(visit_outside(tree, frozenset()))
    return variables - outside


def certain_binds(node: ast.AST | None) -> frozenset[str]:
    """Return the names that a statement binds whenever it succeeds, without a look at their former values."""
    match node:
        case ast.Assign(targets=targets):
            return frozenset(name for target in targets for name in stored_names(target))
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return frozenset({name})
        case ast.Import() | ast.ImportFrom():
            return frozenset(import_origins(node))
    return frozenset()


def stored_names(node: ast.AST) -> set[str]:
    """Return the names that assignments in `node` bind, including variables of comprehensions."""
    return {inner.id for inner in ast.walk(node) if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)}


def import_origins(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Return the origin of each name that an import binds."""
    if isinstance(node, ast.Import):
        return {
            alias.asname or alias.name.partition(".")[0]: alias.name if alias.asname else alias.name.partition(".")[0]
            for alias in node.names
        }
    return {alias.asname or alias.name: f"{'.' * node.level}{node.module}.{alias.name}" for alias in node.names}


def untrusted_import(node: ast.stmt | None) -> str:
    """Return the first package that an import needs and that is not `TRUSTED`; empty if there is none."""
    if not isinstance(node, IMPORTS):
        return ""
    roots = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [f"{node.module}"]
    relative = isinstance(node, ast.ImportFrom) and node.level
    return next((root for module in roots if (root := module.partition(".")[0]) not in TRUSTED or relative), "")


def is_pure(node: ast.stmt | None) -> bool:
    """Return True if a statement certainly does nothing but bind its names; None is a comment.

    Attributes, items and most operators may run code of a class, which could draw random numbers.
    """
    match node:
        case None | ast.Pass():
            return True
        case ast.Expr(value=value):
            return is_plain(value)
        case ast.Assign(targets=targets, value=value):
            return all(isinstance(target, ast.Name) for target in targets) and is_plain(value)
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            return not node.decorator_list and all(map(is_plain, default_values(node)))
    return False


def default_values(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> list[ast.expr]:
    """Return the expressions of a function's defaults."""
    return [*node.args.defaults, *(default for default in node.args.kw_defaults if default is not None)]


def is_plain(node: ast.AST | None) -> bool:
    """Return True if an expression only reads variables, or computes with constants and the rank."""
    match node:
        case None | ast.Constant() | ast.Name():
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts):
            return all(map(is_plain, parts))
        case ast.Dict(keys=keys, values=values):
            return all(isinstance(key, ast.Constant) for key in keys) and all(map(is_plain, values))
        case ast.Lambda():
            return all(map(is_plain, default_values(node)))
        case ast.UnaryOp(operand=value):
            return _is_number(value)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
    return False


def _is_number(node: ast.expr) -> bool:
    match node:
        case ast.Constant() | ast.Name("rank" | "world_size"):
            return True
        case ast.UnaryOp(operand=value):
            return _is_number(value)
        case ast.BinOp(left=left, right=right):
            return _is_number(left) and _is_number(right)
    return False


# -- what a script cannot repeat

HAS_NAMESPACE = ("globals", "locals", "exec", "eval")
ASKS_USER = ("input", "getpass", "breakpoint", "set_trace")
ENDS = ("exit", "quit", "_exit")
ENTROPY = ("SystemRandom", "urandom", "uuid1", "uuid4", "token_hex", "token_bytes", "randbits", "randbelow")
"""Functions that use entropy of the system."""
UNSEEDED = (
    *("default_rng", "Random", "RandomState", "SeedSequence", "seed"),
    *("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"),
)
"""Functions that do so without arguments, or with None."""
OWN_GENERATORS = ("albumentations", "cupy", "imgaug", "jax", "keras", "tensorflow")
"""Packages with global random states that ddip does not set."""
CLOCKS = ("time", "time_ns", "now", "getpid", "monotonic", "perf_counter")
UNORDERED_OK = ("sorted", "len", "min", "max", "set", "frozenset", "isinstance")
"""Functions whose result, without a key, does not depend on the order of a set."""
TYPE_TESTS = ("isinstance", "issubclass")
SET_ORDER = "the order of a set may differ between processes: sort it"
REFUSED_IMPORTS = {
    "ddip": "ddip's functions work only in cells",
    "ipywidgets": "a script has no widgets",
    "__main__": "the script has another __main__",
    "pdb": "a script does not repeat what was typed in the debugger",
}


def find_problem(node: ast.AST) -> str:
    """Return the reason why a script cannot repeat a statement; empty if none is known."""
    bases = {id(inner.value) for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
    for inner in ast.walk(node):
        match inner:
            case ast.Name("get_ipython"):
                return "a script has no shell of IPython"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)) if name in ASKS_USER:
                return f"a script does not repeat what was typed at {name}()"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(value=ast.Name("sys" | "os"), attr=name)) if (
                name in ENDS
            ):
                return f"{name}() ends a script"
            case ast.Import(names=[ast.alias("ddip", None)]) if inner is node:
                pass  # `translation` replaces it
            case ast.Name("ddip", ast.Load()) if id(inner) not in bases:
                return REFUSED_IMPORTS["ddip"]
            case ast.Attribute(value=ast.Name("ddip"), attr=name) if name != "save_point":
                return REFUSED_IMPORTS["ddip"]
            case ast.Import(names=aliases):
                for root in (alias.name.partition(".")[0] for alias in aliases):
                    if root in REFUSED_IMPORTS:
                        return REFUSED_IMPORTS[root]
            case ast.ImportFrom(module=str(module), names=aliases):
                if (root := module.partition(".")[0]) in REFUSED_IMPORTS:
                    return REFUSED_IMPORTS[root]
                if aliases[0].name == "*":
                    return f"import the names that you use, not * from {module}"
    return ""


def find_doubt(node: ast.AST, nones: Set[str] = frozenset()) -> str:
    """Return the reason why a statement may give other values in a script; empty if none is known.

    `nones`: names that may be None, besides those of the statement.
    """
    ordered = {id(argument) for inner in ast.walk(node) for argument in _uses_without_order(inner)}
    nones = nones | none_names(node)
    for inner in ast.walk(node):
        match inner:
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args, keywords=words) if (
                name in ENTROPY
                or (name in UNSEEDED and all(_may_be_none(value, nones) for value in _argument_values(args, words)))
            ):
                return f"{name}() draws from the system's entropy"
            case ast.alias(name="secrets"):
                return "secrets draws from the system's entropy"
            case ast.alias(name=name, asname=str(other)) if name in (*ENTROPY, *UNSEEDED):
                return f"{other} is {name}, which may draw from the system's entropy; import it by its own name"
            case ast.Call(func=ast.Name("hash")):
                return "hash() of text differs in each process"
            case ast.BinOp(left=left, right=right) if id(inner) not in ordered and any(
                isinstance(side, ast.Call)
                and isinstance(side.func, ast.Attribute)
                and side.func.attr in ("keys", "items")
                for side in (left, right)
            ):
                return "the order of a set of keys may differ between processes: sort it"
            case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args) if "seed" in name:
                calls = [inner.func for value in args for inner in ast.walk(value) if isinstance(inner, ast.Call)]
                if any(ast.unparse(call).rpartition(".")[2] in CLOCKS for call in calls):
                    return f"{name}() gets a number that differs in each run"
            case ast.alias(name=name) if name.partition(".")[0] in OWN_GENERATORS:
                return f"{name} draws random numbers of its own"
            case ast.Name(id=name) if name in HAS_NAMESPACE:
                return f"{name} finds other variables in a script"
            case ast.Call(func=ast.Name("vars" | "dir" as name), args=[]):
                return f"{name}() finds other variables in a script"
            case ast.Call(func=function, args=args, keywords=words) if (
                passed := next(filter(None, map(_factory_doubt, _argument_values(args, words))), "")
            ) and not (isinstance(function, ast.Name) and function.id in TYPE_TESTS):
                return passed
            case (
                ast.Set()
                | ast.SetComp()
                | ast.Call(func=ast.Name("set" | "frozenset") | ast.Attribute(value=ast.Name("set" | "frozenset")))
            ) if id(inner) not in ordered:
                items = inner.elts if isinstance(inner, ast.Set) else [inner]
                if not all(isinstance(item, ast.Constant) and isinstance(item.value, (int, float)) for item in items):
                    return SET_ORDER
    return ""


def _argument_values(args: list[ast.expr], words: list[ast.keyword]) -> list[ast.expr]:
    return [*args, *(word.value for word in words)]


def _factory_doubt(node: ast.expr) -> str:
    """Return the reason against an argument such as that of ``defaultdict(set)``; empty if none is known."""
    match node:
        case ast.Name("set" | "frozenset") | ast.Attribute(value=ast.Name("set" | "frozenset")):
            return SET_ORDER
        case ast.Name(id=name) | ast.Attribute(attr=name) if name in (*ENTROPY, *UNSEEDED) and name != "seed":
            return f"{name}() draws from the system's entropy"
    return ""


def none_names(node: ast.AST) -> frozenset[str]:
    """Return the variables, attributes and parameters that a statement may set to None."""
    found: set[str] = set()
    for inner in ast.walk(node):
        match inner:
            case ast.arguments(posonlyargs=first, args=second, kwonlyargs=words, defaults=defaults, kw_defaults=others):
                positional = [*first, *second]
                pairs = [*zip(positional[len(positional) - len(defaults) :], defaults, strict=True)]
                pairs += [(word, default) for word, default in zip(words, others, strict=True) if default is not None]
                found |= {argument.arg for argument, default in pairs if _may_be_none(default)}
            case ast.keyword(arg=str(name), value=value) if _may_be_none(value):
                found.add(name)
            case ast.Assign(targets=targets, value=value) if _may_be_none(value):
                found |= {_last_name(target) for target in targets}
            case ast.AnnAssign(target=target, value=ast.expr() as value) if _may_be_none(value):
                found.add(_last_name(target))
    return frozenset(found - {""})


def _may_be_none(node: ast.expr, nones: Set[str] = frozenset()) -> bool:
    match node:
        case ast.Constant(value=value):
            return value is None
        case ast.IfExp(body=first, orelse=second):
            return _may_be_none(first, nones) or _may_be_none(second, nones)
    return _last_name(node) in nones


def _last_name(node: ast.AST) -> str:
    """Return the name of a variable, or of an attribute without its object; empty for other nodes."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _uses_without_order(node: ast.AST) -> Iterator[ast.AST]:
    """Yield operands whose order has no influence on the value of `node`."""
    match node:
        case ast.Call(func=ast.Name(id=name), args=args, keywords=words) if name in UNORDERED_OK and not any(
            word.arg in ("key", None) for word in words
        ):  # items of an equal key keep the order of the set
            for argument in args:
                yield argument
                match argument:
                    case ast.Call(func=ast.Name("list" | "tuple"), args=inner):
                        yield from inner
                    case ast.BinOp(left=left, right=right):  # such as the union of two sets
                        yield left
                        yield right
        case ast.Compare(left=left, comparators=others):
            yield left
            yield from others
