"""Shared by the system tests: a JupyterLab with a notebook, and the proof that nothing is left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .lab import Lab, open_lab, wait_for


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Start one server and one browser for all tests."""
    folder = tmp_path_factory.mktemp("lab")
    with open_lab(folder) as lab:
        yield lab
    wait_for(lambda: not _ddip_processes(folder), "the ranks to end with the server's kernels")


def _ddip_processes(folder: Path) -> list[psutil.Process]:
    """Return ddip's processes of the lab in `folder`, found by the environment that they inherit."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            mine = process.environ().get("IPYTHONDIR") == str(folder / "ipython")
            ddips = " ".join(process.cmdline()).startswith("ddip ")
            if mine and ddips and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found
