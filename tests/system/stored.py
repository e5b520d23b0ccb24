"""Store the notebooks executed, so that they show output to readers who do not run them: ``make notebooks``.

``python -m tests.system.stored [NAME ...]``. Paths and names of this machine are removed. A checksum of the cells is
stored as well: ``tests/cluster/test_notebooks.py`` fails if a cell has changed since.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

from tests.cluster.test_notebooks import FOLDER, HOSTS, NO_HOSTS, NOTEBOOKS, checksum_of_code, run_notebook

ROOT = FOLDER.parent
KEPT = ("text/html", "image/png", "image/jpeg", "image/svg+xml", "text/markdown", "text/latex", "text/plain")
"""MIME types of displays that a page can show without widgets and scripts."""


def run_and_store(path: Path, folder: Path) -> None:
    """Run the notebook at `path` in `folder`, and store its output."""
    notebook, ran = nbformat.read(path, as_version=4), run_notebook(path, folder)
    for cell, done in zip(notebook.cells, ran.cells, strict=True):
        if cell.cell_type == "code":
            cell.execution_count = done.execution_count
            cell.outputs = [_without_machine_names(output, folder) for output in _join_outputs(done.outputs)]
    notebook.metadata["ddip"] = {"cells": checksum_of_code(notebook)}
    nbformat.write(notebook, path)


def _join_outputs(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Join consecutive texts of a stream, and reduce displays to what a page can show.

    Removed outputs are empty, and are left out.
    """
    found: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and found and found[-1].get("name") == output.name:
            found[-1].text += output.text
        elif output.output_type in ("stream", "error"):
            found.append(output)
        else:
            data = {kind: text for kind, text in output.data.items() if kind in KEPT and text}
            if data:
                found.append(NotebookNode(output_type="display_data", data=data, metadata={}))
    return found


def _without_machine_names(output: Any, folder: Path) -> Any:
    if isinstance(output, str):
        for path, name in ((folder, "notebooks"), (FOLDER, "notebooks"), (Path(sys.prefix), "python"), (ROOT, "ddip")):
            output = output.replace(str(path), name)
            if path.is_relative_to(Path.home()):
                output = output.replace(f"~/{path.relative_to(Path.home())}", name)  # as IPython writes it
        output = re.sub(rf"{re.escape(str(Path.home()))}(?![\w.-])", "~", output.replace(tempfile.gettempdir(), "tmp"))
        return re.sub(rf"\b{re.escape(platform.node())}\b", "host", output)
    if isinstance(output, dict):
        return NotebookNode(
            {
                name: value if name.startswith(("image/png", "image/jpeg")) else _without_machine_names(value, folder)
                for name, value in output.items()
            }
        )
    if isinstance(output, list):
        return [_without_machine_names(value, folder) for value in output]
    return output


def main(names: list[str]) -> None:
    """Run all notebooks, or only `names`."""
    with tempfile.TemporaryDirectory() as made:
        data = Path(made) / "data"
        os.environ.update(FASTAI_HOME=str(data), TORCH_HOME=str(data / "torch"))
        chosen = [path for path in NOTEBOOKS if not names or path.stem in names]
        if any(path.stem.startswith("fastai_") for path in chosen):
            subprocess.run([sys.executable, FOLDER / "fastai_data.py", data], check=True)
        for path in chosen:
            if path == HOSTS and NO_HOSTS is not None:
                again = f"python -m tests.hosts.network run -- python -m tests.system.stored {path.stem}"
                print(f"{path.stem} needs hosts, and is left as it is: {again}")
                continue
            print(path.stem, flush=True)
            folder = Path(made) / path.stem
            folder.mkdir()
            run_and_store(path, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
