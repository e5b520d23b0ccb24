"""Run a notebook from start to end without a browser, and print its output: ``run.py NOTEBOOK``."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


class Narrator(NotebookClient):
    """A notebook client that prints each message as it arrives."""

    def process_message(self, msg, cell, cell_index):
        kind, content = msg["header"]["msg_type"], msg["content"]
        if kind == "stream":
            sys.stdout.write(content["text"])
        elif kind in ("display_data", "execute_result", "update_display_data"):
            image = "" if "image/png" not in content["data"] else "   (a picture, in the notebook)"
            print(content["data"].get("text/plain", "") + image)
        sys.stdout.flush()
        return super().process_message(msg, cell, cell_index)


def main(path: Path) -> int:
    """Run the notebook at `path` in its folder; return the exit status."""
    notebook = nbformat.read(path, as_version=4)
    client = Narrator(notebook, timeout=600, resources={"metadata": {"path": str(path.parent)}})
    began = time.monotonic()

    def print_cell_start(cell, cell_index):
        if cell.cell_type == "code":
            first = next((line for line in cell.source.splitlines() if line.strip()), "")
            print(f"\n--- cell {cell_index + 1} of {len(notebook.cells)}, {time.monotonic() - began:.0f} s: {first}")

    client.on_cell_start = print_cell_start
    print(f"{path}: {len(notebook.cells)} cells")
    try:
        client.execute()
    except CellExecutionError as error:
        print(re.sub(r"\x1b\[[0-9;]*m", "", str(error)))
        return 1
    print(f"\n{path}: done in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
