"""Tell the user once that a cell under ``%autodip`` runs its shell commands and writes its files once per rank."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

from IPython.core.inputtransformer2 import TransformerManager

from ddip.output.area import inform

SHELL = ("system", "sx", "!")
"""Magics that run a shell command, without their ``%``."""
WRAPPERS = ("time", "capture")
"""Magics whose line or cell is searched, too."""
MODE_TO_WRITE = re.compile(r"[wax][bt+]{0,2}|r[bt]?\+[bt]?")
"""Modes in which ``open`` creates or changes a file."""
POSSIBLE = re.compile(r"(?:^|=)\s*[!%]|\bopen\(|\bget_ipython\(", re.MULTILINE)
"""Matches text that every cell with an effect contains: parsing takes 4 ms for 100 lines."""
RANK = re.compile(r"rank|main_process|is_master", re.IGNORECASE)
"""Names by which code gives each rank another command or file on purpose."""
CONDITIONAL = (
    *(ast.If, ast.IfExp, ast.BoolOp, ast.Match, ast.ExceptHandler),
    *(ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef),
)
"""Code that may not run, or only on some ranks, as with ``if rank == 0``."""
ONCE = "ran once per rank: {found}; %%dip local runs a cell once, in the notebook"


class OncePerRank:
    """Tells the user below the first cell with a shell command, and below the first that writes a file."""

    def __init__(self) -> None:
        self._reported: set[str] = set()
        """The kinds that the user has been told about: ``shell``, ``file``."""

    def after_cell(self, cell: str) -> None:
        """Tell the user about the effects of `cell`, which has run on several ranks, unless told before."""
        if len(self._reported) == 2 or not POSSIBLE.search(cell):
            return
        found = {text: kind for kind, text in find_effects(cell) if kind not in self._reported}
        if found:
            self._reported.update(found.values())
            inform(ONCE.format(found=", ".join(found)))


def find_effects(cell: str) -> Iterator[tuple[str, str]]:
    """Yield kind and text of each unconditional shell command and ``open`` for writing in a cell.

    >>> list(find_effects("!echo >> f"))
    [('shell', '!echo')]
    >>> list(find_effects("with open('a.txt', 'a') as f: f.write('x')"))
    [('file', "open('a.txt', 'a')")]
    >>> list(find_effects("if rank == 0: open('a.txt', 'w')"))
    []
    >>> list(find_effects("get_ipython().system(command)"))
    []
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # the ranks show them
            tree = ast.parse(TransformerManager().transform_cell(cell))
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # no Python, or too much of it for the parser
        return
    for call in _find_calls(tree):
        match call:
            case ast.Call(
                func=ast.Attribute(value=ast.Call(func=ast.Name("get_ipython")), attr=method), args=arguments
            ):
                texts = [str(node.value) for node in arguments if isinstance(node, ast.Constant)]
                if texts and len(texts) == len(arguments):  # else the user calls the method, with a computed command
                    yield from _find_in_magic(method, texts)
            case (
                ast.Call(func=ast.Name("open"), args=[_, *modes])
                | ast.Call(func=ast.Attribute(attr="open"), args=modes)
            ):
                modes = [*modes, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
                text = ast.unparse(call)
                if any(map(_is_mode_to_write, modes)) and not RANK.search(text):
                    yield "file", text


def _find_in_magic(method: str, arguments: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the effects of a line or cell that IPython has made into a call of its shell's `method`."""
    name, *texts = ["!", *arguments] if method in ("system", "getoutput") else arguments
    text = "\n".join(texts).strip()
    if name in SHELL and text and not RANK.search(text):
        yield "shell", f"!{text.split()[0]}"
    elif name in WRAPPERS:
        yield from find_effects(text)


def _find_calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in `tree`, in order, that run whenever it does."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Call):
            yield node
        pending += reversed([child for child in ast.iter_child_nodes(node) if not isinstance(child, CONDITIONAL)])


def _is_mode_to_write(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str) and bool(MODE_TO_WRITE.fullmatch(node.value))
