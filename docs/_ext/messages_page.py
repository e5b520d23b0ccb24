"""The page of messages: every error and notice in ddip's source, found by parsing it.

A placeholder such as ``{name}`` stands for a value, and ``{...}`` for a computed part. Texts that a function computes
completely are missing, such as those of CellError and CellTimeout.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive

from ddip import errors

SOURCE = Path(errors.__file__).parent
KINDS = {
    "BadInput": "Refused input: nothing has run or changed",
    "TransferError": "Objects that were not transferred",
    "GroupError": "The group cannot do it",
    "PartitionError": "Hosts cannot reach each other",
    "SlurmUnavailable": "Slurm does not answer",
    "RequestFailed": "A request failed on some ranks",
    "RequestInterrupted": "The user stopped a request",
    "CellInterrupted": "The user stopped a cell",
    "LocalCellFailed": "A local cell failed",
    "notify": "Notices, which come without an exception",
}
"""Section title of each error class, in order; ``notify`` and ``inform`` print a notice."""


@dataclass(frozen=True, order=True)
class Message:
    """One message: its error class, its text with placeholders, and the source file."""

    kind: str
    text: str
    file: str


def find_messages(source: Path = SOURCE) -> list[Message]:
    """Return all messages of the package in the folder `source`, sorted."""
    return sorted({message for file in source.rglob("*.py") for message in _messages_of(file, source)})


def _messages_of(file: Path, source: Path) -> Iterator[Message]:
    for node, constants in _walk_scopes(ast.parse(file.read_text()), {}):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", getattr(node.func, "attr", ""))
            kind = "notify" if name == "inform" else name
            if kind in KINDS and (text := _text_of(node.args[0], constants)) and any(map(str.isalpha, text)):
                yield Message(kind, " ".join(text.split()), str(file.relative_to(source)))


def _walk_scopes(scope: ast.AST, outer: dict[str, str]) -> Iterator[tuple[ast.AST, dict[str, str]]]:
    """Yield each node with the string constants that are visible in its function."""
    nodes, inner = [], []
    pending = list(ast.iter_child_nodes(scope))
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner.append(node)
        else:
            nodes.append(node)
            pending += ast.iter_child_nodes(node)
    constants = outer | {
        target.id: text
        for node in nodes
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name) and (text := _text_of(node.value, {}))
    }
    yield from ((node, constants) for node in nodes)
    for function in inner:
        yield from _walk_scopes(function, constants)


def _text_of(node: ast.expr, constants: dict[str, str]) -> str:
    """Return the text of a string expression with placeholders; empty if it is not one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values):
            return "".join(_text_of(value, constants) for value in values)
        case ast.FormattedValue(value=ast.Name(name)):
            return constants.get(name, f"{{{name}}}")
        case ast.FormattedValue(value=ast.Attribute(attr=name)):
            return f"{{{name}}}"
        case ast.FormattedValue():
            return "{...}"
        case ast.BinOp(left, ast.Add(), right):
            return _text_of(left, constants) + _text_of(right, constants)
        case ast.Name(name):
            return constants.get(name, "")
        case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join")):
            return "{...}"
        case ast.Call(func=ast.Attribute(value=text_node, attr="format" | "rstrip")):
            return _text_of(text_node, constants)
    return ""


class Messages(Directive):
    """Directive ``dip-messages``: a section with the messages of each kind."""

    def run(self) -> list[nodes.Node]:
        """Return the sections."""
        found = find_messages()
        return [_section_of(kind, [message for message in found if message.kind == kind]) for kind in KINDS]


def _section_of(kind: str, messages: list[Message]) -> nodes.section:
    section = nodes.section(ids=[f"messages-{kind.lower()}"])
    title = f"{KINDS[kind]} (ddip.{kind})" if hasattr(errors, kind) else KINDS[kind]
    section += nodes.title("", title)
    items = nodes.bullet_list()
    for message in messages:
        paragraph = nodes.paragraph("", "", nodes.literal("", message.text), nodes.Text(f" ({message.file})"))
        items += nodes.list_item("", paragraph)
    section += items
    return section
