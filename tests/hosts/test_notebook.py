"""The notebook on several hosts runs from start to end."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..cluster.test_notebooks import HOSTS, run


@pytest.mark.timeout(300)
def test_the_notebook_runs_over_two_hosts(tmp_path: Path) -> None:
    notebook = run(HOSTS, tmp_path)
    outputs = [out for cell in notebook.cells for out in cell.get("outputs", [])]
    shown = "".join(out.get("text", "") + out.get("data", {}).get("text/plain", "") for out in outputs)
    assert "parameters identical on both hosts: True" in shown
    assert "new False" in shown, "the new rank has none of the variables"
