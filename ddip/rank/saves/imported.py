"""Variables that are objects of installed packages, such as fastai's ``defaults`` and ``dispatch``.

A save has the names of their module and attribute, as a pickle has those of functions and classes: a copy would no
longer be the object that the package uses, and some cannot be copied.
"""

from __future__ import annotations

import importlib
import site
import sys
import sysconfig
from collections.abc import Mapping
from types import ModuleType
from typing import Any, TypeAlias

import torch

Origin: TypeAlias = tuple[tuple[str, ...], str]
"""Modules that have an object, one of each package, and the name of the object there."""
LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
"""Names of sysconfig for the folders of the standard library and of installed packages."""


def find_imported(variables: Mapping[str, Any]) -> dict[int, Origin]:
    """Return the origin of each variable that has the name of an object of an installed package, and is it, by its id.

    Functions, classes and modules are pickled by name anyway, and data may change in a training; both are left out.
    """
    wanted = {name: value for name, value in variables.items() if not _is_data(value)}
    homes: dict[str, dict[str, str]] = {}
    for home, attributes in _installed_modules() if wanted else ():
        for name in attributes.keys() & wanted.keys():
            if attributes[name] is wanted[name]:
                homes.setdefault(name, {}).setdefault(home.partition(".")[0], home)
    return {id(wanted[name]): (tuple(found.values()), name) for name, found in homes.items()}


def _is_data(value: Any) -> bool:
    kind = type(value)
    return (
        kind.__module__ in ("builtins", "__main__")
        or isinstance(value, (type, torch.nn.Module, torch.optim.Optimizer))
        or hasattr(kind, "__array__")  # tensors too
    )


def _installed_modules() -> list[tuple[str, dict[str, Any]]]:
    """Return name and attributes of each installed module that is imported, short names first."""
    folders = {sysconfig.get_path(name) for name in LIBRARIES} | {*site.getsitepackages(), site.getusersitepackages()}
    inside = tuple(f"{folder}/" for folder in folders)
    modules = [(home, module) for home, module in sys.modules.copy().items() if isinstance(module, ModuleType)]
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
