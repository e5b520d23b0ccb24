"""Process-wide patches of foreign modules: the table in docs/design.md lists all of them."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

import ddip

from .notebook import Notebook

SPLIT = "torch.distributed.distributed_c10d.ProcessGroup.split_group"
"""Name of a patch of a method that older versions of torch lack."""

FIND = """
import functools, os, re, sys, types, warnings
import ddip
HOME = os.path.dirname(ddip.__file__) + os.sep

def is_ours(value):
    if type(value) is functools.partial:
        value = value.func
    value = value.__func__ if type(value) is types.MethodType else value
    if type(value) is types.FunctionType:
        return value.__code__.co_filename.startswith(HOME)
    return str((value if issubclass(type(value), type) else type(value)).__module__).split(".")[0] == "ddip"

def find_patches():
    found, seen = set(), set()
    left = [(name, module) for name, module in sys.modules.items() if isinstance(module, types.ModuleType)]
    left = [one for one in left if one[0].split(".")[0] not in ("ddip", "__main__", "__mp_main__", "tests")]
    while left:
        path, owner = left.pop()
        for name, value in list(vars(owner).items()):
            if issubclass(type(value), types.ModuleType) or re.fullmatch("__(?!init|iter).*__|_instance", name):
                continue  # a singleton of ours is not a patch
            if is_ours(value):
                found.add(f"{path}.{name}")
            elif issubclass(type(value), type) and value not in seen:
                seen.add(value)
                left.append((f"{value.__module__}.{value.__qualname__}", value))
    return sorted(found)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # deprecated attributes
    patches = find_patches()
"""


@pytest.mark.slow
def test_the_table_lists_every_patch_and_notebooks_have_none(cells: ddip.Group, bare_notebook: Notebook) -> None:
    cells.run(FIND)
    found = cells.pull(["patches"])["patches"]
    text = (Path(__file__).parents[2] / "docs/design.md").read_text().partition("**Patches.**")[2]
    known = re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| ([^|]+) \|", text, re.M)))
    assert [name for name in found if not any(fnmatch.fnmatchcase(name, one) for one in known)] == []
    lacking = set() if hasattr(ProcessGroup, "split_group") else {SPLIT}
    assert {one for one in known if not fnmatch.filter(found, one)} == lacking
    assert bare_notebook.ok(f"{FIND}\nprint(patches)").stdout == "[]\n"
