"""Framework adapters (apps): modules that prepare a framework on every rank.

A package adds an app with an entry point in the group ``ddip.apps`` whose value is a module that the ranks can import.
The module's top-level imports run once for all ranks, before the ranks are forked, so they must not start threads or
use CUDA. All of these functions are optional:

    prepare()             when the rank has joined the group
    rejoined()            on all ranks at once, when they have joined a rebuilt group
    begin_cell()          before each cell
    end_cell(error)       after each cell, with the exception that it raised, or None
    command(text)         for ``%%dip -a text``; ddip shows the text that rank 0 returns
    release()             before the rank leaves the group for another one
"""

from __future__ import annotations

import difflib
from importlib.metadata import entry_points
from importlib.util import find_spec

from ddip.errors import BadInput

GROUP = "ddip.apps"
NEEDED = {"deepspeed": ("deepspeed",), "fastai": ("fastai", "accelerate")}
"""Modules that each of these apps needs and ddip itself does not."""
ANY_OF = {"hf": ("accelerate", "transformers"), "lightning": ("lightning", "pytorch_lightning")}
"""Modules of which each of these apps needs at least one."""


def app_names() -> list[str]:
    """Return the names of all apps of installed packages."""
    return sorted(entry.name for entry in entry_points(group=GROUP))


def find_module(name: str | None) -> str:
    """Return the module of the app `name`, or an empty string for None.

    Raises BadInput if there is no such app, with a list of all apps, or if its framework is not installed.
    """
    if name is None:
        return ""
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    if name not in found:
        if named := [part for part in name.replace(",", " ").split() if part in found and part != name]:
            raise BadInput(f"-a {name}: a group takes one app; type -a {named[0]}")
        like = difflib.get_close_matches(name, found, 1)
        available = f"there is {', '.join(sorted(found))}" if found else "no app is installed yet"
        if like:
            available = f"type -a {like[0]}"
        raise BadInput(f"-a {name}: there is no app {name!r}; {available}")
    missing = [module for module in NEEDED.get(name, ()) if find_spec(module) is None]
    any_of = ANY_OF.get(name, ())
    if any_of and all(find_spec(module) is None for module in any_of):
        missing = list(any_of)
    if missing:
        raise BadInput(f"-a {name}: {' and '.join(missing)} cannot be found; type %pip install {' '.join(missing)}")
    return found[name]
