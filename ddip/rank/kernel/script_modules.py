"""Let a script import its own modules as a new process does, beside those of cells and of other scripts.

    before   modules in ``sys.modules`` that an import would not find, or whose files have changed, are taken out;
             those that an earlier script in the same folder has used are put in
    script   imports the others
    after    the script's modules stay, so that pickle finds its classes, unless a cell's import finds other ones

Only modules of the user are exchanged, always a whole top-level package, and those of libraries stay. Modules that have
not changed are the same objects in each run, because code may register itself when it is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from ddip.rank.runtime import stacks
from ddip.rank.runtime.libraries import is_librarys

CLOCK_NS = 20_000_000
"""Nanoseconds by which the time of a file may be behind the clock."""

Package = Mapping[str, Any]
"""The loaded modules of a top-level module or package, by full name."""
FileState = tuple[int, int]
"""Time of change in ns, and size."""


class _Used(NamedTuple):
    """A module that a script could use."""

    module: Any
    state: FileState | None
    """State of its file at the import; None if that is unknown."""


_used: dict[str, dict[str, _Used]] = {}
"""Modules that the last script could use, by the folder of the script and the name of the module."""
_added_folders: list[Any] = []
"""Entries that the last script has added to ``sys.path``."""
_loaded_ns = time.time_ns()
"""Unix time before which files of modules that cells have imported cannot have changed since."""


@contextlib.contextmanager
@stacks.never_interrupted
def exchange_modules(folder: str) -> Iterator[None]:
    """Give a script in `folder` the modules and the import path of a new process."""
    for entry in _added_folders:
        if entry in sys.path:
            sys.path.remove(entry)
    former_path, began = list(sys.path), time.time_ns()
    sys.path.insert(0, folder)
    importlib.invalidate_caches()
    of_cells = _loaded_packages()
    _replace_packages(of_cells, _packages_for(folder, of_cells))
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)
        _added_folders[:] = [entry for entry in sys.path if entry not in former_path]
        of_script = _loaded_packages()
        packages = _packages_after(of_script, of_cells)
        _note_used(folder, of_script, began)
        _replace_packages(of_script, packages)


def _packages_for(folder: str, loaded: Mapping[str, Package]) -> dict[str, Package]:
    """Return the packages that a script in `folder` need not import.

    They are among the `loaded` ones, or those of an earlier script in that folder.
    If a file has changed, none of those packages is returned that an earlier script could use, or none of the others,
    because modules that have not changed may hold functions and classes of those that have.
    """
    used = _used.get(folder, {})
    own, shared = dict[str, Package](), dict[str, Package]()
    for top, package in _by_package({name: each.module for name, each in used.items()}).items():
        if _find_place(top) in (None, _place_of(top, package)):
            same = loaded[top] if top in loaded and loaded[top].get(top) is package.get(top) else {}
            own[top] = {**same, **package}
    for top, package in loaded.items():
        if top not in own and _find_place(top) == _place_of(top, package):
            shared[top] = package
    groups = [group for group in (own, shared) if not any(_has_changed(package, used) for package in group.values())]
    return {top: package for group in groups for top, package in group.items()}


def _packages_after(of_script: Mapping[str, Package], of_cells: Mapping[str, Package]) -> dict[str, Package]:
    """Return the packages for cells after a script: its own ones unless they hide those of cells."""
    modules = {id(each.module) for used in _used.values() for each in used.values()}
    packages = dict(of_cells)
    for top, package in of_script.items():
        place, former = _place_of(top, package), of_cells.get(top, {})
        is_of_cells = former and not any(id(module) in modules for module in former.values())
        if _find_place(top) in (None, place) and not (is_of_cells and _place_of(top, former) != place):
            packages[top] = package
    return packages


def _replace_packages(former: Mapping[str, Package], packages: Mapping[str, Package]) -> None:
    """Replace the `former` packages in ``sys.modules``; modules in both stay."""
    modules = {name: module for package in packages.values() for name, module in package.items()}
    for name in [name for package in former.values() for name in package]:
        if name not in modules:
            sys.modules.pop(name, None)
    sys.modules.update(modules)


# -- packages


def _loaded_packages() -> dict[str, Package]:
    """Return the user's packages in ``sys.modules``, by top-level name."""
    packages = _by_package(sys.modules.copy())
    return {top: package for top, package in packages.items() if _is_users(top, package)}


def _by_package(modules: Mapping[str, Any]) -> dict[str, Package]:
    packages: dict[str, dict[str, Any]] = {}
    for name, module in modules.items():
        packages.setdefault(name.partition(".")[0], {})[name] = module
    return dict(packages)


def _is_users(top: str, package: Package) -> bool:
    """Return whether the user wrote the package `top`; False for a namespace with parts of libraries."""
    if top in ("__main__", "__mp_main__"):
        return False
    files = [_file_of(package.get(top))]
    if not files[0]:
        files = [file for file in map(_file_of, package.values()) if file]
    return bool(files) and not any(map(is_librarys, files))


def _file_of(module: Any) -> str:
    """Return the file of a module; "" for a namespace package, or an object that replaces a module."""
    file = vars(module).get("__file__") if isinstance(module, ModuleType) else None
    return file if isinstance(file, str) else ""


def _place_of(top: str, package: Package) -> str:
    """Return the file of the package `top`, or a namespace's folder; "" if that has several."""
    if file := _file_of(package.get(top)):
        return os.path.realpath(file)
    places: Collection[str] = {_folder_above(_file_of(module), name) for name, module in package.items()} - {""}
    return next(iter(places)) if len(places) == 1 else ""


def _folder_above(file: str, name: str) -> str:
    """Return the folder of the namespace in which the module `name` has this `file`."""
    is_package = os.path.basename(file).startswith("__init__.")
    for _ in range(name.count(".") + is_package):
        file = os.path.dirname(file)
    return os.path.realpath(file) if file else ""


def _find_place(top: str) -> str | None:
    """Return the file, or a namespace's folder, that an import of `top` finds; None without one."""
    spec = None
    for finder in sys.meta_path:
        with contextlib.suppress(Exception):  # it is any code
            spec = spec or finder.find_spec(top, None)
    if spec is None:
        return None
    return os.path.realpath(spec.origin if spec.origin else next(iter(spec.submodule_search_locations or ()), ""))


# -- changed files


def _file_state(file: str) -> FileState | None:
    try:
        now = os.stat(file)
    except OSError:
        return None
    return now.st_mtime_ns, now.st_size


def _has_changed(package: Package, used: Mapping[str, _Used]) -> bool:
    """Return whether a file of the package may have changed since its import; `used`: known states."""
    for name, module in package.items():
        file, known = _file_of(module), used.get(name)
        now = _file_state(file) if file else None
        if file and known is not None and known.module is module:
            if now is None or now != known.state:
                return True
        elif file and (now is None or now[0] > _loaded_ns - CLOCK_NS):
            return True
    return False


def _note_used(folder: str, packages: Mapping[str, Package], began: int) -> None:
    """Note the modules that a script in `folder` could use; `began`: its start, in Unix ns."""
    former, used = _used.get(folder, {}), dict[str, _Used]()
    for name, module in [item for package in packages.values() for item in package.items()]:
        known = former.get(name)
        if known is None or known.module is not module:
            now = _file_state(file) if (file := _file_of(module)) else None
            known = _Used(module, now if now is not None and now[0] < began - CLOCK_NS else None)
        used[name] = known
    _used[folder] = used
