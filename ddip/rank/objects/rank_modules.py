"""Receive modules of the notebook on a host that does not share its folder, and reload them."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from ddip.protocol.on_rank import IMPORTED
from ddip.protocol.text import escape_surrogates
from ddip.rank.runtime import process_settings

_old_objects: dict[tuple[str, str], list[Any]] = {}
"""State of `autoreload.superreload`: functions and classes of reloaded modules, which it keeps up to date."""


def write_module(folder: str, name: str, files: dict[str, bytes]) -> None:
    """Write the module `name` into `folder` and replace its former files.

    `files` has the contents by path relative to `folder`. Raises ValueError if a path does not belong to the
    module, and OSError if a file cannot be written; the former files stay until all new ones are written.
    """
    for path in files:
        _check_path(path, name)
    root = Path(folder)
    root.mkdir(mode=0o700, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    try:
        for path, data in files.items():
            file = staging / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        shutil.rmtree(root / name, ignore_errors=True)
        root.joinpath(f"{name}.py").unlink(missing_ok=True)
        shutil.rmtree(
            root / "__pycache__", ignore_errors=True
        )  # Python would take it for a new file of equal size and second
        for entry in staging.iterdir():
            entry.replace(root / entry.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _check_path(path: str, name: str) -> None:
    """Raise ValueError unless the relative `path` is a file of the module or package `name`."""
    parts = PurePosixPath(path).parts
    is_plain = "/".join(parts) == path and not {"..", "/", "//"}.intersection(parts) and "\0" not in path
    is_inside = parts == (f"{name}.py",) or (len(parts) > 1 and parts[0] == name)
    if not name.isidentifier() or not is_plain or not is_inside:
        raise ValueError(f"{path!r} is not the path of a file of the module {name!r}")


def take_modules(folder: str, names: list[str], reload: bool) -> dict[str, str]:
    """Put `folder` first on the import path, and reload those of `names` that are imported already.

    Returns a message by name for each module that could not be reloaded, or that is imported while `reload` is False;
    empty if there is none.
    """
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    process_settings.own_folders.add(folder)
    importlib.invalidate_caches()
    messages = {}
    for name in names:
        imported = [module for module in sys.modules if module == name or module.startswith(f"{name}.")]
        if imported:
            messages[name] = _reload_modules(imported) if reload else IMPORTED
    return {name: message for name, message in messages.items() if message}


def _reload_modules(loaded: list[str]) -> str:
    """Reload modules, last imported first; return the error of the first that fails, or "".

    Submodules and dependencies were imported later than their parents, so they are reloaded before them.
    """
    for name in reversed(loaded):
        try:
            autoreload = importlib.import_module("IPython.extensions.autoreload")
            autoreload.superreload(sys.modules[name], old_objects=_old_objects)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a script may exit
            return escape_surrogates(f"{type(error).__name__}: {error}")
    return ""
