"""Framework adapters: modules that prepare a framework on every rank.

Others can add theirs: an entry point in the group ``ddip.apps`` whose value is a module that the ranks can import. What
it imports at its top is imported once for all ranks, before they are forked: no threads and no CUDA there. All of these
are optional:

    prepare()             when the rank has joined the group
    rejoined()            on all ranks at once, when these are in a new group
    begin_cell()          before each cell
    end_cell(error)       after each, with what it raised or None
    command(text)         for ``%%dip -a text``; text that this returns on rank 0 is shown
    release()             before the rank leaves the group for another one
"""

from __future__ import annotations

from importlib.metadata import entry_points
from importlib.util import find_spec

from ddip.errors import BadInput

GROUP = "ddip.apps"
NEEDED = {"deepspeed": ("deepspeed",), "fastai": ("fastai", "accelerate")}
"""What ddip's own apps need, which its core does not."""
ANY_OF = {"hf": ("accelerate", "transformers"), "lightning": ("lightning", "pytorch_lightning")}
"""Apps that need one of these at least."""


def find(name: str | None) -> str:
    """The module of the app `name` (empty for None); raises BadInput that lists what there is."""
    if name is None:
        return ""
    found = {entry.name: entry.value for entry in entry_points(group=GROUP)}
    if name not in found:
        there = f"there is {', '.join(sorted(found))}" if found else "no app is installed yet"
        raise BadInput(f"-a {name}: there is no app {name!r}; {there}")
    missing = [module for module in NEEDED.get(name, ()) if find_spec(module) is None]
    any_of = ANY_OF.get(name, ())
    if any_of and all(find_spec(module) is None for module in any_of):
        missing = list(any_of)
    if missing:
        raise BadInput(f"-a {name}: {' and '.join(missing)} cannot be found; type %pip install {' '.join(missing)}")
    return found[name]
