"""What the system tests share: a JupyterLab with a notebook, and the proof that nothing is left behind."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from .lab import Lab, open_lab, wait_for


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One server and one browser for all tests."""
    before = _ranks()
    with open_lab(tmp_path_factory.mktemp("lab")) as lab:
        yield lab
    wait_for(lambda: _ranks() == before, "the ranks to end with the server's kernels")


def _ranks() -> set[int]:
    """Processes of ddip that are there."""
    found = set()
    for process in psutil.process_iter(["cmdline"]):
        line = " ".join(process.info["cmdline"] or [])
        if line.startswith("ddip ") and process.status() != psutil.STATUS_ZOMBIE:
            found.add(process.pid)
    return found
