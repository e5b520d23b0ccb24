"""Content of the pages besides their text: notebooks, help of the magics, and links that also work on disk.

A build copies ``notebooks/``, which are stored executed, to ``docs/tutorials/``. It runs nothing.
"""

from __future__ import annotations

import ast
import re
import textwrap
from argparse import Action
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive
from IPython.lib.lexers import IPython3Lexer
from markdown_directive import MarkdownDirective, markdown_table
from messages_page import Messages
from pygments.lexer import bygroups, this, using
from pygments.token import Keyword, Operator, Text
from results_page import PeersAhead, Results, WholeTables
from sphinx.application import Sphinx

import ddip
from ddip.notebook import for_programs
from ddip.notebook.loading import GROUP_MAGICS
from ddip.notebook.magics import DipMagics
from ddip.protocol import status_types
from ddip.protocol.switches import LOST

DOCS = Path(__file__).parents[1]
NOTEBOOKS, TUTORIALS = DOCS.parent / "notebooks", DOCS / "tutorials"

# -- notebooks


def write_tutorials(app: Sphinx) -> None:
    """Copy the notebooks to ``docs/tutorials``.

    Unchanged files are left alone, so that Sphinx need not read them again.
    """
    TUTORIALS.mkdir(exist_ok=True)
    wanted = {path.name: path.read_text() for path in NOTEBOOKS.glob("*.ipynb")}
    for page in TUTORIALS.glob("*.ipynb"):
        if page.name not in wanted:
            page.unlink()
    for name, text in wanted.items():
        page = TUTORIALS / name
        if not page.exists() or page.read_text() != text:
            page.write_text(text)


# -- the magics' help


class Magic(Directive):
    """Directive ``dip-magic``: the help of a magic, from the parser of its arguments."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Return one section: the usage, the description, and the arguments."""
        name = self.arguments[0]
        homes = (DipMagics, *GROUP_MAGICS)
        function = next(getattr(home, name) for home in homes if hasattr(home, name))
        typed = ("%%" if name == "dip" else "%") + name
        section = nodes.section(ids=[name])
        section += nodes.title("", "", nodes.literal("", typed))
        parser = getattr(function, "parser", None)
        if parser is None:
            text = function.__doc__
        else:
            text = parser.description
            usage = textwrap.dedent(parser.format_usage().replace("::", "")).strip()
            section += nodes.literal_block("", usage.replace(f"%{name}", typed), language="text")
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            section += nodes.paragraph("", " ".join(paragraph.split()))
        if parser is not None and parser._actions:
            section += _definition_list(
                (_argument_names(action), action.help.replace("%%", "%")) for action in parser._actions
            )
        return [section]


def _argument_names(action: Action) -> str:
    metavar = action.metavar if action.metavar is not None else action.dest.upper()
    value = " ".join(metavar) if isinstance(metavar, tuple) else metavar
    if not action.option_strings:
        return str(action.metavar or action.dest)
    return ", ".join(action.option_strings) + ("" if action.nargs == 0 else f" {value}")


def _definition_list(rows: Any) -> nodes.definition_list:
    found = nodes.definition_list()
    for name, text in rows:
        item = nodes.definition_list_item("", nodes.term("", "", nodes.literal("", name)))
        item += nodes.definition("", nodes.paragraph("", text))
        found += item
    return found


class Settings(Directive):
    """Directive ``dip-settings``: the traits of the magics, their defaults, and their effects."""

    def run(self) -> list[nodes.Node]:
        """Return a list of definitions."""
        traits = DipMagics.class_traits(config=True).items()
        rows = [
            (
                f"DipMagics.{name} = {trait.default_value!r}" if name != "warm_apps" else f"DipMagics.{name} = []",
                trait.help,
            )
            for name, trait in traits
        ]
        return [_definition_list(rows)]


class Switches(MarkdownDirective):
    """Directive ``dip-switches``: the environment variables that turn off a mechanism, and the consequences."""

    def lines(self) -> list[str]:
        """Return the table."""
        rows = ([f"`DDIP_NATIVE_{name}`", text] for name, text in LOST.items())
        return markdown_table(["variable", "if `0`"], rows)


class Tools(MarkdownDirective):
    """Directive ``dip-tools``: the tools for MCP servers, and their results."""

    def lines(self) -> list[str]:
        """Return the table. It parses the source of the tools, since their requirements need not be installed."""
        source = ast.parse((Path(ddip.__file__).parent / "server" / "tools.py").read_text())
        tools = [node for node in source.body if isinstance(node, ast.AsyncFunctionDef) and node.name[0] != "_"]
        return markdown_table(["tool", "action", "result"], map(self._row, tools))

    def _row(self, tool: ast.AsyncFunctionDef) -> list[str]:
        summary, text, *_ = [" ".join(part.split()) for part in (ast.get_docstring(tool) or "").split("\n\n")]
        function = for_programs.FUNCTIONS.get(tool.name.removeprefix("ddip_"))
        kind = function.__annotations__["return"] if function else ""
        if hasattr(status_types, kind):
            text = f"{{py:class}}`{kind} <ddip.protocol.status_types.{kind}>`"
        elif tool.returns and ast.unparse(tool.returns) == "str":
            text = "a text"
        return [f"`{tool.name}`", summary, text]


class CellLexer(IPython3Lexer):  # type: ignore[misc]
    """Python with magics; the body of a ``%%dip`` cell is also such a cell."""

    tokens = {
        **IPython3Lexer.tokens,
        "root": [
            (r"(?s)(\A\s*)(%%)(dip)([^\n]*\n)(.*)", bygroups(Text, Operator, Keyword, Text, using(this))),
            *IPython3Lexer.tokens["root"],
        ],
    }


# -- Python signatures


def readable_signature(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Show a default that is a function by its name.

    Sphinx cannot parse other forms, and would show the full signature with all types.
    """
    return signature and re.sub(r"<function (\w+)>", r"\1", signature), returns


# -- links

PAGES = {
    "README.md": "index.md",
    "Issues.md": "limits.md",
    "CHANGELOG.md": "changes.md",
    "SECURITY.md": "security.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files of the repository -> the pages that include them."""


def rewrite_links(text: str) -> str:
    """Rewrite links for the site: in the repository, a page links to files beside and above it."""

    def rewrite_link(match: re.Match[str]) -> str:
        target = match[2].removeprefix("../").removeprefix("docs/")
        target = re.sub(r"^notebooks/(\w+\.ipynb)", r"tutorials/\1", target)
        name, hash, anchor = target.partition("#")
        return f"{match[1]}({PAGES.get(name, name)}{hash}{anchor})"

    return re.sub(r"(?<!!)(\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(((?!\w+:|#)[^)\s]+)\)", rewrite_link, text)


def read_page(app: Sphinx, name: str, content: list[str]) -> None:
    """Rewrite the links of a page of ``docs/``."""
    if not name.startswith("tutorials/"):
        content[0] = rewrite_links(content[0])


def read_included(app: Sphinx, path: Path, parent: str, content: list[str]) -> None:
    """Rewrite the links of an included file."""
    content[0] = rewrite_links(content[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the extension with Sphinx."""
    app.add_directive("dip-magic", Magic)
    app.add_directive("dip-settings", Settings)
    app.add_directive("dip-switches", Switches)
    app.add_directive("dip-tools", Tools)
    app.add_directive("dip-messages", Messages)
    app.add_directive("dip-results", Results)
    app.add_directive("dip-peers-ahead", PeersAhead)
    app.add_directive("dip-tables", WholeTables)
    app.add_lexer("python", CellLexer)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("builder-inited", write_tutorials)
    app.connect("source-read", read_page)
    app.connect("include-read", read_included)
    return {"parallel_read_safe": True}
