"""Files in the notebook's folder that shadow modules which ddip or its dependencies import."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path

CODE = """import os, traceback
with open({folder!r} + f"/{{__name__}}.{{os.getpid()}}", "a") as file: file.write("".join(traceback.format_stack()))
raise ImportError("this is no module of ddip's")
"""
NEEDED = {"os", "traceback"}
"""Modules that a shadowing file imports itself."""


class Foreign:
    """Shadowing files in `folder`, which record that they ran, and raise."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._record = folder / "ran"
        self._record.mkdir()

    def add(self, *names: str) -> None:
        """Create files with these names, or packages for names that end with a slash."""
        code = CODE.format(folder=str(self._record))
        for name in set(names) - NEEDED:
            if name.endswith("/"):
                (self._folder / name).mkdir()
                (self._folder / name / "__init__.py").write_text(code)
            else:
                (self._folder / f"{name}.py").write_text(code)

    def import_stacks(self) -> list[str]:
        """Return one stack trace per executed file, which shows who imported it."""
        return [path.read_text() for path in self._record.iterdir()]


def importable_modules() -> set[str]:
    """Return all top-level modules: the standard library's and the installed ones."""
    installed = {module.name for module in pkgutil.iter_modules(p for p in sys.path if p.endswith("site-packages"))}
    return set(sys.stdlib_module_names) | {name for name in installed if name.isidentifier()}
