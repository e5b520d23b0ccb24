"""Files in the notebook's folder that have the names of modules which ddip, or what it needs, imports."""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path

CODE = """import os, traceback
with open({folder!r} + f"/{{__name__}}.{{os.getpid()}}", "a") as file: file.write("".join(traceback.format_stack()))
raise ImportError("this is no module of ddip's")
"""
OWN = {"os", "traceback"}
"""What such a file needs itself."""


class Foreign:
    """Such files in `folder`, which tell that they ran, and raise."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._told = folder / "ran"
        self._told.mkdir()

    def add(self, *names: str) -> None:
        """Files of these names, or folders with an ``__init__.py`` in them."""
        code = CODE.format(folder=str(self._told))
        for name in set(names) - OWN:
            if name.endswith("/"):
                (self._folder / name).mkdir()
                (self._folder / name / "__init__.py").write_text(code)
            else:
                (self._folder / f"{name}.py").write_text(code)

    def ran(self) -> list[str]:
        """Those that ran, by whom they were imported."""
        return [path.read_text() for path in self._told.iterdir()]


def importable() -> set[str]:
    """All top-level modules: the standard library's, and all that is installed."""
    installed = {module.name for module in pkgutil.iter_modules(p for p in sys.path if p.endswith("site-packages"))}
    return set(sys.stdlib_module_names) | {name for name in installed if name.isidentifier()}
