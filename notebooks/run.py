"""Run a notebook in a terminal, show each cell with its output, and store it: ``run.py NOTEBOOK [FOLDER]``.

FOLDER is ``build`` by default. Colours appear if stdout is a terminal that has them and ``NO_COLOR`` is not set.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from pygments.token import Comment, Keyword, Number, String
from rich.console import Console
from rich.markdown import Markdown
from rich.rule import Rule
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.text import Text
from rich.theme import Theme

RANKS = re.compile("^── rank.*──$", re.MULTILINE)
"""Heading of the output of some ranks in the text form of tabs."""
COLOURS = {Keyword: "magenta", String: "green", Number: "cyan", Comment: "dim"}
"""Colours of code that can be read on dark and on light terminals."""
CODE = ANSISyntaxTheme({token: Style.parse(colour) for token, colour in COLOURS.items()})
console = Console(highlight=False, theme=Theme({"markdown.code": "cyan"}), width=None if sys.stdout.isatty() else 100)

NEXT = {
    "a rank fails, and the others continue": "{python} notebooks/run.py notebooks/06_failures.ipynb",
    "tabs, bars and plots, in JupyterLab": "{python} -m pip install jupyterlab && {python} -m jupyterlab {notebook}",
    "your own cells, after %load_ext ddip and %makedip -n 2": "{python} -m IPython",
    "what this machine can do": "{python} -m ddip doctor",
}
"""Commands to try next, by what they show."""


def text_of(output: nbformat.NotebookNode) -> Text:
    """Return the text of an output as it finally looks in a terminal; empty if there is none."""
    if output.output_type == "stream":
        text = re.sub(r"[^\n]*\r(?!\n)", "", output.text)  # a carriage return starts the line again
        return Text.from_ansi(text, style="yellow" if output.name == "stderr" else "")
    if output.output_type == "error":
        return Text.from_ansi("\n".join(output.traceback))
    text = Text.from_ansi(output.data.get("text/plain", ""))
    if "image/png" in output.data:
        return Text.assemble(text, "  (a picture, in the stored notebook)")
    return text


def show_outputs(cell: nbformat.NotebookNode) -> None:
    """Show the final outputs of a cell, which nbclient has updated until the cell ended."""
    for text in map(text_of, cell.outputs):
        text.rstrip()
        text.highlight_regex(RANKS, "bold cyan")
        for line in text.split("\n") if text else ():
            console.print(Text.assemble(("│ ", "green"), line), soft_wrap=True)


def relative(path: str | Path) -> str:
    """Return the path from the working directory if that is shorter."""
    return min(os.path.relpath(path), str(path), key=len)


def suggest_next(path: Path, stored: str) -> None:
    """Print commands to try after the notebook at `path`, whose executed copy is `stored`."""
    console.print("\n[bold]Try next[/]")
    for shows, command in NEXT.items():
        if path.name not in command:
            console.print(f"  {shows}:", style="dim")
            console.print(f"    {command.format(python=relative(sys.executable), notebook=stored)}", soft_wrap=True)


def main(path: Path, folder: Path) -> int:
    """Run the notebook at `path` in its folder, store it in `folder`, and return the exit status."""
    notebook = nbformat.read(path, as_version=4)
    notebook.cells = [cell for cell in notebook.cells if cell.source.strip()]
    client = NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}})
    client.extra_arguments = ["--Application.log_level=ERROR"]  # the kernel's warnings are not the notebook's
    is_code = [cell.cell_type == "code" for cell in notebook.cells]
    began = time.monotonic()

    def show_cell(cell: nbformat.NotebookNode, cell_index: int) -> None:
        console.print()
        if not is_code[cell_index]:
            return console.print(Markdown(cell.source))
        title = f"[dim]cell {sum(is_code[: cell_index + 1])} of {sum(is_code)}[/]"
        console.print(Rule(title, align="left", style="dim"))
        text = Syntax("", "python", theme=CODE).highlight(cell.source)
        return console.print(text, soft_wrap=True, end="")

    client.on_cell_start = show_cell
    client.on_cell_executed = lambda cell, cell_index, execute_reply: show_outputs(cell)
    failed = False
    try:
        client.execute()
    except CellExecutionError:
        failed = True
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / path.name
    nbformat.write(notebook, stored)
    state = "[red]failed[/]" if failed else "[green]done[/]"
    console.print(f"\n{path.name}: {state}, {time.monotonic() - began:.0f} s")
    console.print(f"Executed notebook: {relative(stored)}", soft_wrap=True)
    if not failed:
        suggest_next(path, relative(stored))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(*sys.argv[2:3] or ["build"])))
