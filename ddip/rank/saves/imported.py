"""Variables that are objects of installed packages and cannot be copied, such as fastai's ``dispatch``.

A save has the names of their module and attribute, as a pickle has those of functions and classes. Objects that can be
copied are saved by value, since a program may have changed them, such as a package's settings.
"""

from __future__ import annotations

import importlib
import pickle
import site
import sys
import sysconfig
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

import torch

from ddip.protocol.objects.pickling import pickle_value

Origin: TypeAlias = tuple[tuple[str, ...], str]
"""Modules that have an object, one of each package, and the name of the object there."""
MAIN = ("__main__", "__mp_main__")
"""Modules with the variables of the user."""
LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
"""Names of sysconfig for the folders of the standard library and of installed packages."""


def find_imported(variables: Mapping[str, Any]) -> dict[int, Origin]:
    """Return the origin of each variable that is an object of this name in an installed package, by its id.

    Objects that can be copied are left out, and so are functions, classes and modules, which are pickled by name.
    """
    wanted = {name: value for name, value in variables.items() if not _is_data(value)}
    homes: dict[str, dict[str, str]] = {}
    for home, attributes in _installed_modules() if wanted else ():
        for name in attributes.keys() & wanted.keys():
            if attributes[name] is wanted[name]:
                homes.setdefault(name, {}).setdefault(home.partition(".")[0], home)
    return {
        id(wanted[name]): (tuple(found.values()), name)
        for name, found in homes.items()
        if not _can_be_copied(wanted[name])
    }


def _can_be_copied(value: Any) -> bool:
    try:
        pickled, _ = pickle_value(value)
        pickle.loads(pickled.parts[0], buffers=pickled.parts[1:])
    except Exception:
        return False
    return True


def _is_data(value: Any) -> bool:
    kind = type(value)
    return (
        kind.__module__ in ("builtins", "__main__")
        or issubclass(kind, (type, torch.nn.Module, torch.optim.Optimizer))
        or hasattr(kind, "__array__")  # tensors too
    )


def _installed_modules() -> list[tuple[str, dict[str, Any]]]:
    """Return name and attributes of each installed module that is imported, short names first."""
    folders = {sysconfig.get_path(name) for name in LIBRARIES} | {*site.getsitepackages(), site.getusersitepackages()}
    inside = tuple(f"{folder}/" for folder in folders)
    modules = [
        (home, module)
        for home, module in sys.modules.copy().items()
        if isinstance(module, ModuleType) and home not in MAIN
    ]
    modules.sort(key=lambda item: (len(item[0]), item[0]))
    return [(home, vars(module)) for home, module in modules if str(vars(module).get("__file__")).startswith(inside)]


def import_object(homes: tuple[str, ...], name: str) -> Any:
    """Return the attribute `name` of the first of the modules `homes` that can be imported."""
    for home in homes[:-1]:
        try:
            return getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError):
            continue
    return getattr(importlib.import_module(homes[-1]), name)
