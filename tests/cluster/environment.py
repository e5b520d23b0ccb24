"""Another environment for a test."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from ddip.cluster.processes import preload_client


@contextlib.contextmanager
def environment(python_path: object = None, **variables: str) -> Iterator[None]:
    """These variables, and this folder before the others of PYTHONPATH, for this process and what it starts.

    They take a preload process of their own. The former one, and all that it has imported, is there again afterwards.
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
        preload_client.end()
        preload_client._current = former
