"""The notebook on several hosts runs from start to end, and the quickstart runs on hosts as on one machine."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

from ..cluster.notebook import Notebook
from ..cluster.test_notebooks import HOSTS, run_notebook

EPOCHS = "range(8)"
DIGEST = """
%%dip
import hashlib
digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
"""


@pytest.mark.timeout(600)
def test_the_notebook_runs_over_two_hosts(tmp_path: Path) -> None:
    notebook = run_notebook(HOSTS, tmp_path)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    shown = "".join(out.get("text", "") + out.get("data", {}).get("text/plain", "") for out in outputs)
    assert "parameters identical on both hosts: True" in shown
    assert "new False" in shown, "the new rank has none of the variables"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_hosts_train_to_the_same_bits_as_one(tmp_path: Path) -> None:
    stored = nbformat.read(HOSTS.with_name("01_quickstart.ipynb"), 4)
    cells = [cell.source for cell in stored.cells if cell.cell_type == "code"]
    trained = next(number for number, source in enumerate(cells) if EPOCHS in source)
    digests = []
    for place in ("-n 4", "--hosts h1:2,h2:2"):
        notebook = Notebook(tmp_path)
        try:
            for source in cells[: trained + 1]:
                notebook.ok(source.replace("%makedip -n 4", f"%makedip {place}").replace(EPOCHS, "range(2)"))
            notebook.ok(DIGEST)
            notebook.ok("%dipull -r all digest")
            digests.append(notebook.ok("%%dip local\nprint(*digest)").stdout.split())
        finally:
            notebook.shut_down()
    assert digests[0] == digests[1] and len(set(digests[0])) == 1 and len(digests[0]) == 4
