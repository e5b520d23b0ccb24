"""Readable text of an executed notebook or a terminal, without the parts that vary."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

from ddip.output.terminal_text import Screen, strip_escapes

CHANGES = [
    (r"\d+\.\d+ s\b", "# s"),
    (r" · slowest: rank \d", ""),
    (r"\[\d\d:\d\d<\d\d:\d\d, +[^\]]*\]", "[time]"),
    (r"In\[\d+\]", "In[#]"),
    (r"Out\[(\d):\d+\]", r"Out[\1:#]"),
    (r"Out\[\d+\]", "Out[#]"),
    (r"-{20,}", "---"),
    (r"  +", "  "),
    (r" +$", ""),
]


def stable_text(text: str) -> str:
    """Return `text` without times, cell numbers, colours, and overwritten text."""
    screen = Screen(1_000_000)
    screen.write(text)
    text = strip_escapes(screen.text)
    for pattern, instead in CHANGES:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    return text


def _join_streams(outputs: Any) -> list[Any]:
    """Join consecutive texts of a stream, as a page shows them."""
    found: list[Any] = []
    for output in outputs:
        if found and output.output_type == found[-1].output_type == "stream" and output.name == found[-1].name:
            found[-1].text += output.text
        else:
            found.append(output)
    return found


def notebook_text(notebook: Any) -> str:
    """Return the cells of an executed notebook, each with its output."""
    lines: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type != "code" or "injected-parameters" in cell.metadata.get("tags", []):
            continue
        lines += [f">>> {line}" for line in cell.source.splitlines()]
        for output in _join_streams(cell.outputs):
            if output.output_type == "stream":
                lines.append(output.text.rstrip("\n"))
            elif output.output_type == "error":
                lines.append("\n".join(output.traceback))
            else:
                kinds = ", ".join(sorted(kind for kind in output.data if kind != "text/plain"))
                lines.append(f"({kinds or 'text'}) {output.data.get('text/plain', '')}".rstrip())
    return stable_text("\n".join(lines)) + "\n"


def assert_golden(text: str, path: Path, write: bool) -> None:
    """Compare with the golden file, or write it."""
    if write:
        path.write_text(text)
    changes = "\n".join(difflib.unified_diff(path.read_text().splitlines(), text.splitlines(), lineterm="", n=1))
    assert not changes, f"{path.name}; --golden writes it anew:\n{changes}"
