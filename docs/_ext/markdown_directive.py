"""Directives that generate Markdown."""

from __future__ import annotations

from collections.abc import Iterable

from docutils import nodes
from docutils.parsers.rst import Directive
from docutils.statemachine import StringList


class MarkdownDirective(Directive):
    """A directive whose content is made as Markdown."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Return the content as nodes."""
        found = nodes.Element()
        self.state.nested_parse(StringList(self.lines()), self.content_offset, found)
        return found.children

    def lines(self) -> list[str]:
        """Return the lines of Markdown."""
        raise NotImplementedError


def markdown_table(heads: Iterable[str], rows: Iterable[Iterable[str | None]]) -> list[str]:
    """Return the lines of a table."""
    lines = [f"| {' | '.join(heads)} |"]
    lines += ["|---" * (lines[0].count("|") - 1) + "|"]
    return lines + [f"| {' | '.join(cell or '' for cell in row)} |" for row in rows]
