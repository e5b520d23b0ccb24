"""Store what the notebooks show, for the documentation: ``python -m tests.system.outputs FOLDER [NAME ...]``.

The notebooks themselves are stored without outputs. What their cells showed is in ``FOLDER/NAME.json``, with a checksum
of each cell: a page of the documentation is made of both, and only as long as they belong together.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nbformat import NotebookNode

from tests.cluster.test_notebooks import FOLDER, NOTEBOOKS, run

ROOT = FOLDER.parent
KEPT = ("text/html", "image/png", "image/jpeg", "image/svg+xml", "text/markdown", "text/latex", "text/plain")
"""Of what a cell displays, what a page without widgets and scripts can show."""


def stored(notebook: NotebookNode, folder: Path) -> list[dict[str, Any]]:
    """What each code cell of `notebook`, which ran in `folder`, has shown, without what is of this machine only."""
    cells = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [_of_any_machine(output, folder) for output in _joined(cell.outputs)]
            cells.append({"source": hashlib.sha256(cell.source.encode()).hexdigest(), "outputs": outputs})
    return cells


def _joined(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Pieces of one stream that follow each other as one; of other outputs, what a page can show."""
    joined: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and joined and joined[-1].get("name") == output.name:
            joined[-1].text += output.text
        elif output.output_type in ("stream", "error"):
            joined.append(output)
        else:
            data = {kind: text for kind, text in output.data.items() if kind in KEPT}
            if data:
                joined.append(NotebookNode(output_type="display_data", data=data, metadata={}))
    return joined


def _of_any_machine(output: Any, folder: Path) -> Any:
    if isinstance(output, str):
        for path, name in ((folder, "notebooks"), (FOLDER, "notebooks"), (Path(sys.prefix), "python"), (ROOT, "ddip")):
            output = output.replace(str(path), name)
        output = output.replace(tempfile.gettempdir(), "tmp").replace(str(Path.home()) + "/", "~/")
        return re.sub(rf"\b{re.escape(platform.node())}\b", "host", output)
    if isinstance(output, dict):
        return {
            name: value if name.startswith(("image/png", "image/jpeg")) else _of_any_machine(value, folder)
            for name, value in output.items()
        }
    if isinstance(output, list):
        return [_of_any_machine(value, folder) for value in output]
    return output


def main(to: Path, names: list[str]) -> None:
    """Run the notebooks, or those of these `names`, and store what they show."""
    to.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as made:
        data = Path(made) / "data"
        os.environ.update(FASTAI_HOME=str(data), TORCH_HOME=str(data / "torch"))
        chosen = [path for path in NOTEBOOKS if not names or path.stem in names]
        if any(path.stem.startswith("fastai_") for path in chosen):
            subprocess.run([sys.executable, FOLDER / "fastai_data.py", data], check=True)
        for path in chosen:
            print(path.stem, flush=True)
            folder = Path(made) / path.stem
            folder.mkdir()
            cells = stored(run(path, folder), folder)
            (to / f"{path.stem}.json").write_text(json.dumps(cells, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
