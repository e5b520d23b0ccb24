"""Environment variables for one test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from ddip.cluster.processes import preload_client


@contextlib.contextmanager
def environment(python_path: object = None, **variables: str) -> Iterator[None]:
    """Set variables and prepend a folder to PYTHONPATH, for this process and its children.

    A separate preload process starts with them. The former one, with everything it has imported, is used again
    afterwards.
    """
    former, preload_client._current = preload_client._current, None
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            if python_path is not None:
                patch.setenv("PYTHONPATH", str(python_path), prepend=os.pathsep)
            yield
    finally:
        preload_client.end_process()
        preload_client._current = former
