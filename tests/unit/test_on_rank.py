"""The rows of ``protocol/on_rank.py`` are the functions of ``ddip.rank``, with the same types."""

from __future__ import annotations

import importlib
import inspect
import re
import typing
from pathlib import Path

import pytest

import ddip
from ddip.errors import GroupError
from ddip.group.members import engines
from ddip.protocol import on_rank
from ddip.protocol.on_rank import Remote
from ddip.protocol.reports import Hello

ROWS = {name: row for name, row in vars(on_rank).items() if isinstance(row, Remote)}
TARGET = re.compile("|".join({f'"{re.escape(row.target.rpartition(".")[0])}[.]' for row in ROWS.values()}))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_has_the_types_of_its_function(name: str) -> None:
    row = ROWS[name]
    module, _, function = row.target.rpartition(".")
    target = getattr(importlib.import_module(f"ddip.rank.{module}"), function)
    assert list(inspect.signature(row.signature).parameters) == list(inspect.signature(target).parameters)
    assert typing.get_type_hints(row.signature) == typing.get_type_hints(target)


def test_no_function_has_two_rows() -> None:
    targets = [row.target for row in ROWS.values()]
    assert len(targets) == len(set(targets))


def test_only_the_table_names_functions_of_a_rank() -> None:
    folder = Path(ddip.__file__).parent
    sources = [
        path for room in ("notebook", "call", "group", "output", "cluster") for path in folder.glob(f"{room}/**/*.py")
    ]
    assert sources
    assert {path.name: TARGET.findall(path.read_text()) for path in sources if TARGET.search(path.read_text())} == {}


def test_a_call_travels_as_its_target_and_arguments() -> None:
    call = on_rank.pull_part("x", 0, 3)
    assert (call.target, call.args, call.label) == ("objects.rank_transfer.pull_part", ("x", 0, 3), "pulling")


def test_an_engine_with_another_ddip_is_refused() -> None:
    def hello_with_version(version: int) -> Hello:
        torch = {"torch": "2", "cuda": False, "backends": [], "off": {}, "native_off": []}
        return {"version": version, "pid": 7, "host": "b", **torch}  # type: ignore[typeddict-item]

    engines._check_version([hello_with_version(on_rank.VERSION)])
    with pytest.raises(GroupError, match=f"^pid 7 on b .*version 0 .*version {on_rank.VERSION};"):
        engines._check_version([hello_with_version(on_rank.VERSION), hello_with_version(0)])
    old = hello_with_version(0)
    del old["version"]  # type: ignore[misc]
    with pytest.raises(GroupError, match="version 0 "):
        engines._check_version([old])
