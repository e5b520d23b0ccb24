"""Third-party apps for the tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from .environment import environment


@contextlib.contextmanager
def installed_app(folder: Path, code: str, module: str = "toy_app", name: str = "toy") -> Iterator[None]:
    """Install an app `name` whose `module` has this code, with a preload process that has not imported it."""
    (folder / f"{module}.py").write_text(code)
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[ddip.apps]\n{name} = {module}\n")
    with pytest.MonkeyPatch.context() as patch, environment(TOY_APP=str(folder)):
        patch.syspath_prepend(folder)
        yield
