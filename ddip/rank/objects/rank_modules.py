"""Modules of the notebook on a host that does not have its folder."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from IPython.extensions import autoreload

from ddip.protocol.on_rank import IMPORTED
from ddip.protocol.text import readable
from ddip.rank.runtime import process_settings

_old_objects: dict[tuple[str, str], list[Any]] = {}
"""Functions and classes of modules that were loaded again, which are kept up to date: autoreload's own."""


def write(folder: str, name: str, files: dict[str, bytes]) -> None:
    """Put the `files` of the module `name`, by their paths, into `folder`, in place of what was there of it.

    Raises ValueError if a path is not one of such a module, and OSError; what was there stays then.
    """
    for path in files:
        _check(path, name)
    root = Path(folder)
    root.mkdir(mode=0o700, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
    try:
        for path, data in files.items():
            file = new / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(data)
        shutil.rmtree(root / name, ignore_errors=True)
        root.joinpath(f"{name}.py").unlink(missing_ok=True)
        shutil.rmtree(root / "__pycache__", ignore_errors=True)  # of a file of the same size and second it would count
        for made in new.iterdir():
            made.replace(root / made.name)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def _check(path: str, name: str) -> None:
    """Raise ValueError unless `path` is one of the module `name`."""
    parts = PurePosixPath(path).parts
    plain = "/".join(parts) == path and not {"..", "/", "//"}.intersection(parts) and "\0" not in path
    inside = parts == (f"{name}.py",) or (len(parts) > 1 and parts[0] == name)
    if not name.isidentifier() or not plain or not inside:
        raise ValueError(f"{path!r} is no path of a file of the module {name!r}")


def take(folder: str, names: list[str], reload: bool) -> dict[str, str]:
    """Look into `folder` for modules from now on, and first.

    Returns what is to be said of those of the modules `names` that are imported here already, and cannot be loaded
    again, or are not to.
    """
    if folder in sys.path:
        sys.path.remove(folder)
    sys.path.insert(0, folder)
    process_settings.own_folders.add(folder)
    importlib.invalidate_caches()
    told = {}
    for name in names:
        loaded = [module for module in sys.modules if module == name or module.startswith(f"{name}.")]
        if loaded:
            told[name] = _load_again(loaded) if reload else IMPORTED
    return {name: text for name, text in told.items() if text}


def _load_again(loaded: list[str]) -> str:
    """Returns why that was not possible; empty if it was. What a module has imported is loaded before it."""
    for name in reversed(loaded):
        try:
            autoreload.superreload(sys.modules[name], old_objects=_old_objects)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a script may exit
            return readable(f"{type(error).__name__}: {error}")
    return ""
