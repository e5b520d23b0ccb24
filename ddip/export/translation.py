"""Translate the source of a cell from IPython's syntax to statements of plain Python."""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace

from IPython.core.inputtransformer2 import TransformerManager

from ddip.export import code_names as names
from ddip.export.code_names import Names

INLINED = ("time", "capture")
"""Magics that run their code once: the code stays."""
DROPPED = (
    *(
        "matplotlib",
        "config",
        "load_ext",
        "reload_ext",
        "autoreload",
        "aimport",
        "pdb",
        "who",
        "whos",
        "pinfo",
        "pinfo2",
    ),
    *("precision", "xmode", "colors", "history", "lsmagic", "pip", "conda", "pwd", "psearch", "alias", "logstart"),
)
"""Magics without effect on the numbers of a script."""
OF_DDIP = ("makedip", "autodip", "dip", "unload_ext")
"""Beginnings of ddip's magics in cells of the notebook."""
CELL_MAGIC = re.compile(r"(?:\s*(?:#.*)?\n)*[ \t]*%%(\w+)([^\n]*)\n?")


@dataclass(frozen=True)
class Transfer:
    """A ``%dipush`` or ``%dipull`` line of the notebook."""

    magic: str
    line: str


@dataclass(frozen=True)
class Statement:
    """One statement at the top level of a cell, in plain Python."""

    text: str
    """Source with the comments above it; only a comment if the statement has no effect in a script."""
    node: ast.stmt | None
    names: Names
    problem: str = ""
    """The code that has no translation, as typed; empty if there is none."""
    needs: frozenset[str] = frozenset()
    """Modules that the translation uses."""
    transfer: Transfer | None = None


class Untranslatable(Exception):
    """A magic or shell command has no equivalent in a script."""


def translate_cell(code: str, in_notebook: bool = False) -> list[Statement]:
    """Return the statements of a cell; those without a translation have a `problem`."""
    found = CELL_MAGIC.match(code)
    if found:
        if found[1] not in INLINED:
            typed = f"%%{found[1]}{found[2].rstrip()}"
            return [Statement(_comment_out(code), None, Names(), typed)]
        return [_comment_only(f"%%{found[1]}{found[2].rstrip()}"), *translate_cell(code[found.end() :], in_notebook)]
    source = TransformerManager().transform_cell(code)
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except SyntaxError as error:
        return [Statement(_comment_out(code), None, Names(), (error.text or code).strip())]
    return [_translate_statement(text, node, in_notebook) for text, node in _split_source(source, tree)]


def _split_source(source: str, tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Yield the text of each statement, with the comment lines above it."""
    lines = source.splitlines(keepends=True)
    former = 0
    for node in tree.body:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
        assert node.end_lineno is not None and node.end_col_offset is not None
        above = "".join(lines[former : first - 1])
        above = ("\n" if former and above.startswith("\n") else "") + above.lstrip("\n")
        begin = 0 if decorators else node.col_offset
        inner = lines[first - 1 : node.end_lineno]
        after = inner[-1].encode()[node.end_col_offset :].decode().rstrip("\n")
        inner[-1] = inner[-1].encode()[: node.end_col_offset].decode()
        inner[0] = inner[0].encode()[begin:].decode()
        comment = re.fullmatch(r"\s*;?(\s*#.*)", after)
        yield above + "".join(inner) + (f"  {comment[1].strip()}" if comment else ""), node
        former = node.end_lineno


def _translate_statement(text: str, node: ast.stmt, in_notebook: bool) -> Statement:
    needs: set[str] = set()
    begin = text.index(text.lstrip())  # comments above stay where they are
    tree = ast.parse(text)
    edits: list[tuple[int, int, str]] = []
    try:
        for call in ast.walk(tree):
            magic = _shell_call(call)
            if magic is None:
                continue
            assert isinstance(call, ast.Call)
            name, arguments = magic
            transfer = _find_transfer(name, arguments) if in_notebook else None
            if transfer is not None:
                if not _is_alone(tree, call):
                    raise Untranslatable(f"%{transfer.magic} {transfer.line}")
                return Statement(text, node, _bound_by(tree), transfer=transfer)
            plain, modules = _plain_code(name, arguments, in_notebook)
            if plain is None and _is_whole(tree, call):
                above = text[:begin]
                return replace(
                    _comment_only(_typed_text(name, arguments)),
                    text=above + _comment_only(_typed_text(name, arguments)).text,
                )
            needs |= modules
            edits.append((*_find_span(text, call), plain or "None"))
        for wait in names.top_level_awaits(tree):
            if not isinstance(wait.value, ast.Call):
                raise Untranslatable(ast.unparse(wait))
            begin_at, end_at = _find_span(text, wait)
            inner = _find_span(text, wait.value)
            edits.append((begin_at, end_at, f"asyncio.run({text[slice(*inner)]})"))
            needs.add("asyncio")
    except Untranslatable as error:
        return Statement(_comment_out(text), None, _bound_by(tree), str(error))
    for begin_at, end_at, plain in sorted(edits, reverse=True):
        text = text[:begin_at] + plain + text[end_at:]
    if problem := names.find_waits(text):
        return Statement(_comment_out(text), None, _bound_by(tree), problem)
    found = names.names_of(text)
    if "get_ipython" in found.reads | found.deferred:
        return Statement(_comment_out(text), None, found, text.strip().partition("\n")[0])
    return Statement(text, ast.parse(text).body[0], found, needs=frozenset(needs))


def _bound_by(tree: ast.Module) -> Names:
    targets = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    return Names(binds=frozenset(targets))


def _shell_call(node: ast.AST) -> tuple[str, list[str]] | None:
    """Return the magic or shell method that a call uses, and its arguments; None for other nodes."""
    match node:
        case ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=method), args=arguments):
            texts = [one.value for one in arguments if isinstance(one, ast.Constant)]
            if len(texts) == len(arguments) and all(isinstance(one, str) for one in texts):
                if method in ("run_line_magic", "run_cell_magic") and texts:
                    return str(texts[0]), [str(one) for one in texts[1:]]
                if method in ("system", "getoutput"):
                    return f"!{method}", [str(one) for one in texts]
    return None


def _typed_text(name: str, arguments: list[str]) -> str:
    return f"!{arguments[0]}" if name.startswith("!") else f"%{name} {' '.join(arguments)}".rstrip()


def _find_transfer(name: str, arguments: list[str]) -> Transfer | None:
    return Transfer(name, arguments[0] if arguments else "") if name in ("dipush", "dipull") else None


def _plain_code(name: str, arguments: list[str], in_notebook: bool) -> tuple[str | None, set[str]]:
    """Return the Python code of a magic, None if a script needs none, and the modules that it uses."""
    line = arguments[0].strip() if arguments else ""
    if name.startswith("!"):
        return _plain_command(name, line)
    if name in DROPPED or (in_notebook and name.startswith(OF_DDIP)):
        return None, set()
    if name == "cd" and line and not line.startswith("-"):
        path = line.strip("'\"")
        folder = f"os.path.expanduser({path!r})" if path.startswith("~") else repr(path)
        return f"os.chdir({folder})", {"os"}
    if name in ("env", "set_env"):
        variable, equals, value = line.partition("=" if "=" in line else " ")
        if not equals:
            return None, set()
        if "$" not in value and "{" not in value:
            return f"os.environ[{variable.strip()!r}] = {value.strip()!r}", {"os"}
    if name == "time" and line:
        return line, set()
    repeated = re.fullmatch(r"(?=.*-n ?(\d+))(?=.*-r ?(\d+))(?:-[nr] ?\d+\s+){2}(?:-q\s+)?(.+)", line)
    if name == "timeit" and repeated:
        return f"[({repeated[3]}) for _ in range({int(repeated[1]) * int(repeated[2])})]", set()
    raise Untranslatable(_typed_text(name, arguments))


def _plain_command(name: str, line: str) -> tuple[str | None, set[str]]:
    if re.match(r"(pip|conda|mamba|uv|nvidia-smi|ls|pwd|head|tail|cat|which|free|df)\b[^>|;&]*$", line):
        return (None, set()) if name == "!system" else (_capture_command(repr(line)), {"subprocess"})
    if "$" in line:
        raise Untranslatable(f"!{line}")
    command = f"f{line!r}" if "{" in line else repr(line)
    if name == "!getoutput":
        return _capture_command(command), {"subprocess"}
    return f"subprocess.run({command}, shell=True)", {"subprocess"}


def _capture_command(command: str) -> str:
    return f"subprocess.run({command}, shell=True, capture_output=True, text=True).stdout.splitlines()"


def _is_whole(tree: ast.Module, call: ast.Call) -> bool:
    """Return True if the call is the whole statement."""
    match tree.body:
        case [ast.Expr(value=value)]:
            return value is call
    return False


def _is_alone(tree: ast.Module, call: ast.Call) -> bool:
    """Return True if the call is the whole statement, or the value of an assignment to one name."""
    match tree.body:
        case [ast.Assign(targets=[ast.Name()], value=value)]:
            return value is call
    return _is_whole(tree, call)


def _find_span(text: str, node: ast.expr) -> tuple[int, int]:
    """Return the positions in `text` at which a node begins and ends."""
    lines = text.splitlines(keepends=True)

    def position_of(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None and node.end_col_offset is not None
    return position_of(node.lineno, node.col_offset), position_of(node.end_lineno, node.end_col_offset)


def _comment_only(text: str) -> Statement:
    return Statement(_comment_out(text), None, Names())


def _comment_out(text: str) -> str:
    return "\n".join(f"# {line}".rstrip() for line in text.strip("\n").splitlines())


def parse_transfer(transfer: Transfer) -> tuple[list[str], dict[str, str], str]:
    """Return the names of a push or pull, the new names of a pull, and the ranks after ``-r`` as typed.

    >>> parse_transfer(Transfer("dipull", "-r 1 weights as second"))
    (['weights'], {'weights': 'second'}, '1')
    """
    words = [word for part in shlex.split(transfer.line, comments=True) for word in part.split(",") if word]
    typed: list[str] = []
    renamed: dict[str, str] = {}
    ranks = ""
    pending = iter(words)
    for word in pending:
        if word in ("-r", "--rank", "--ranks"):
            ranks = next(pending, "")
        elif ranks and re.fullmatch(r"\d+(-\d+)?|all", word):
            ranks += f",{word}"
        elif word == "as" and typed:
            renamed[typed[-1]] = next(pending, "")
        elif word.isidentifier():
            typed.append(word)
        elif word == "--modules":
            next(pending, "")  # the script imports them from its folder
        elif word in ("-t", "--timeout"):
            next(pending, "")
    return typed, renamed, ranks
