"""Translate the source of a cell from IPython's syntax to statements of plain Python."""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, field, replace

from IPython.core.inputtransformer2 import TransformerManager

from ddip.export import code_names
from ddip.export.code_names import Names

DROPPED = ("matplotlib", "config", "pinfo", "pinfo2", "who", "whos", "pwd", "history", "lsmagic", "pip", "conda")
"""Magics without effect on the numbers of a script."""
OF_NOTEBOOK = (*DROPPED, "makedip", "autodip", "load_ext", "reload_ext", "dipcells", "dipwait", "dipush")
SAVE_POINT = "ddip = type('ddip', (), {'save_point': lambda: False})  # a script takes no saves"
"""Replacement for ``import ddip`` in cells that only call ``ddip.save_point()``."""
TIMED = re.compile(r"(?:\s*(?:#.*)?\n)*[ \t]*%%time[ \t]*\n")
SCRIPT = re.compile(r"\s*%diprun[ \t]+([^\n]*)\s*")


@dataclass(frozen=True)
class Statement:
    """One statement at the top level of a cell, in plain Python."""

    text: str
    """Source with the comments above it; only a comment if the statement has no effect in a script."""
    node: ast.stmt | None = None
    names: Names = field(default_factory=Names)
    problem: str = ""
    """The code that has no translation and the reason; empty if there is none."""
    doubt: str = ""
    """The reason why its values may differ in a script."""
    pull: str | None = None
    """The arguments of its ``%dipull``, in a cell of the notebook, or of the ``%dipull`` for which it copies values."""
    script: tuple[str, ...] = ()
    """Path and arguments of the script that ``%diprun`` ran."""
    star: str = ""
    """The module of ``from module import *``; it has a `problem` until `import_used` replaces it."""


class Untranslatable(Exception):
    """A magic or shell command has no equivalent in a script."""


def translate_cell(code: str, in_notebook: bool = False) -> list[Statement]:
    """Return the statements of a cell; those without a translation have a `problem`."""
    if timed := TIMED.match(code):
        return translate_cell(code[timed.end() :], in_notebook)
    if script := SCRIPT.fullmatch(code):
        try:
            words = shlex.split(script[1])
        except ValueError as error:  # such as a quote that is not closed
            return [_refuse_code(code, f"{code.strip()}: {error}")]
        if not words:
            return [_refuse_code(code, code.strip())]
        if words[0] == "-m" or "/" in words[0]:
            return [_refuse_code(code, f"{code.strip()}: only a script in the notebook's folder can be exported")]
        return [Statement(f"run_script{tuple(words)!r}".replace(",)", ")"), ast.Pass(), script=tuple(words))]
    if code.lstrip().startswith("%%"):
        return [_refuse_code(code, code.strip().partition("\n")[0])]
    source = TransformerManager().transform_cell(code)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except SyntaxError as error:
        return [_refuse_code(code, (error.text or code).strip())]
    return [_translate_statement(text, in_notebook) for text in _split_source(source, tree)]


def has_syntax_error(code: str) -> bool:
    """Return True if IPython refused to run the cell, before any of its statements."""
    try:
        with warnings.catch_warnings(action="ignore"):
            ast.parse(TransformerManager().transform_cell(code))
    except SyntaxError:
        return True
    return False


def comment_out(text: str) -> str:
    """Return `text` as comment lines."""
    return "\n".join(f"# {line}".rstrip() for line in text.strip("\n").splitlines())


def first_line(text: str) -> str:
    """Return the first line of code, without comments above it."""
    return next((line.strip() for line in text.splitlines() if not re.match(r"\s*(#|$)", line)), "")


def _refuse_code(code: str, problem: str, names: Names | None = None) -> Statement:
    return Statement(comment_out(code), None, names or Names(), problem)


def _split_source(source: str, tree: ast.Module) -> Iterator[str]:
    """Yield the text of each statement, with the comment lines above it."""
    lines = [f"{line}\n" for line in source.split("\n")]  # a form feed ends no line of Python
    former = 0
    for node in tree.body:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        assert node.end_lineno is not None
        above = "".join(lines[former : first - 1])
        above = ("\n" if former and above.startswith("\n") else "") + above.lstrip("\n")
        text = "".join(lines[first - 1 : node.lineno - 1]) + (ast.get_source_segment(source, node) or "")
        _, _, after = lines[node.end_lineno - 1].rstrip("\n").rpartition(text.split("\n")[-1])
        comment = re.fullmatch(r"\s*;?(\s*#.*)", after)
        yield above + text + (f"  {comment[1].strip()}" if comment else "")
        former = node.end_lineno


def _translate_statement(text: str, in_notebook: bool) -> Statement:
    tree = ast.parse(text)
    whole = tree.body[0].value if isinstance(tree.body[0], ast.Expr) else None
    try:
        for call in ast.walk(tree):
            magic = _shell_call(call)
            if magic is None:
                continue
            if in_notebook and magic[0] == "dipull" and call is whole:
                return Statement(text, pull=magic[1])
            plain = _plain_code(*magic, in_notebook)
            above = text[: text.index(text.lstrip())]
            if plain is None and call is whole:
                return Statement(above + comment_out(_typed_text(*magic)))
            if plain is None:
                raise Untranslatable(_typed_text(*magic))
            if call is whole:
                text = above + plain
            else:
                _replace_node(tree, call, ast.parse(plain, mode="eval").body)
                text = ast.unparse(tree)
    except (Untranslatable, SyntaxError) as error:
        return _refuse_code(text, str(error), Names(frozenset(code_names.stored_names(tree))))
    if ast.unparse(tree) == "import ddip":
        text = SAVE_POINT
    node = ast.parse(text).body[0]
    problem = code_names.find_problem(node)
    if not problem:
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(text, "<cell>", "exec")
        except SyntaxError as error:
            problem = str(error.msg)  # such as an await at the top level
    if problem:
        refused = _refuse_code(text, f"{first_line(text)}: {problem}", Names(frozenset(code_names.stored_names(tree))))
        match node:
            case ast.ImportFrom(module=str(module), names=[ast.alias(name="*")], level=0):
                return replace(refused, star=module)
        return refused
    return _plain_statement(text)


def _plain_statement(text: str) -> Statement:
    node = ast.parse(text).body[0]
    return Statement(text, node, code_names.names_of(text), doubt=code_names.find_doubt(node))


def import_used(star: Statement, exports: Mapping[str, str], used: Set[str]) -> list[Statement]:
    """Return imports of those names that ``from module import *`` has bound and that the cells use.

    `exports`: the names that the module exports, each with the path of the module that it is, or an empty string;
    `used`: all names in the cells.
    """
    names = [name for name in sorted(exports.keys() & used) if not exports[name]]
    modules = {name: exports[name] for name in sorted(exports.keys() & used) if exports[name]}
    lines = [f"import {path}" if path == name else f"import {path} as {name}" for name, path in modules.items()]
    lines += [f"from {star.star} import {', '.join(names)}" if names else f"__import__({star.star!r})"]
    return [_plain_statement(line) for line in lines]


def _replace_node(tree: ast.AST, former: ast.AST, node: ast.AST) -> None:
    for parent in ast.walk(tree):
        for name, value in ast.iter_fields(parent):
            if value is former:
                setattr(parent, name, node)
            elif isinstance(value, list):
                value[:] = [node if item is former else item for item in value]


def _shell_call(node: ast.AST) -> tuple[str, str] | None:
    """Return the magic or shell method that a call uses, and its line; None for other nodes."""
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr="run_line_magic"),
            args=[ast.Constant(str(name)), ast.Constant(str(line))],
        ):
            return name, line
        case ast.Call(
            func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr="system" | "getoutput" as method),
            args=[ast.Constant(str(line))],
        ):
            return f"!{method}", line
    return None


def _typed_text(name: str, line: str) -> str:
    return f"!{line}" if name.startswith("!") else f"%{name} {line}".rstrip()


def _plain_code(name: str, line: str, in_notebook: bool) -> str | None:
    """Return the Python code of a magic; None if a script needs none."""
    line = line.strip()
    if name in (OF_NOTEBOOK if in_notebook else DROPPED):
        return None
    if name.startswith("!") and not re.search(r"[${]", line):
        joined = ", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors='replace'"
        captured = joined if name == "!getoutput" else ""
        return f"subprocess.run({line!r}, shell=True{captured})" + (".stdout.splitlines()" if captured else "")
    if name == "cd" and line and not line.startswith("-") and not re.search(r"[${~]", line):
        return f"os.chdir({line.strip(chr(39) + chr(34))!r})"
    if name in ("env", "set_env"):
        variable, equals, value = line.partition("=" if "=" in line else " ")
        if not equals:
            return None
        if not re.search(r"[${]", value):
            return f"os.environ[{variable.strip()!r}] = {value.strip()!r}"
    if name == "time" and line and len(ast.parse(line).body) == 1:
        return line
    raise Untranslatable(_typed_text(name, line))
