"""The magics for programs: plain data in, plain data out. ``ddip/server`` calls this in the kernel of a notebook.

    answer = call("run", '{"code": "train()"}', before)     JSON in `answer` ->  {"ok": {"number": 7, ...}}

Each function is one magic, or what a magic shows: a program can do what a person can, and no more. The cells that it
runs are in the notebook's history, with a number of their own, and ``%dipcell 7`` shows them to a person.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

from ddip.errors import BadInput, NoGroup
from ddip.protocol.status_types import (
    ANSWER_MIME,
    SCHEMA,
    TEXT_CHARACTERS,
    TOO_LATE,
    CellData,
    CellStatus,
    GroupStatus,
    Status,
)
from ddip.protocol.text import readable

if TYPE_CHECKING:
    from ddip.group.cells.cell import Cell
    from ddip.group.group import Group
    from ddip.notebook.magics import DipMagics

VALUE_CHARACTERS = 10_000
"""Of the text of a value that is pulled."""
ITEMS = 1_000
"""A tensor, or an array, with more is told as text."""


class Answer:
    """What the kernel puts into its reply, for a program to read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {ANSWER_MIME: self._text, "text/plain": self._text}


def call(name: str, arguments: str = "{}", before: float | None = None) -> Answer:
    """Call the function `name` of this module with these `arguments`, a JSON object; never raises. Nothing is done if
    it is later than `before` (seconds since 1970): the kernel was busy, and nobody waits any more."""
    if before is not None and time.time() > before:
        return _answer({"error": TOO_LATE, "message": "the kernel was busy; nothing was done"})
    try:
        if name not in FUNCTIONS:
            raise BadInput(f"{name}: no such function; there are {', '.join(FUNCTIONS)}")
        return _answer({"ok": FUNCTIONS[name](**json.loads(arguments))})
    except BaseException as error:  # the stop button's, too: a program has to know
        return _answer({"error": type(error).__name__, "message": readable(str(error))})


def _answer(data: dict[str, Any]) -> Answer:
    return Answer(json.dumps(data))


# -- what a program can ask for


def status() -> Status:
    """``%dipstatus --json``."""
    magics = _magics_that_are_there()
    if magics is None:
        return {"schema": SCHEMA, "group": None, "ranks": [], "devices": [], "cells": [], "errors": {}}
    from ddip.notebook.cell_magics import status_now

    return status_now(_group(magics), magics.history)


def start(arguments: str = "") -> Status:
    """``%makedip``, with what a person types after it."""
    _magics().makedip(arguments)
    return status()


def run(
    code: str,
    ranks: Sequence[int] | None = None,
    timeout: float | None = None,
    queue: bool = False,
) -> CellStatus:
    """``%%dip --bg -S all``; returns at once."""
    from ddip.group.cells.cell_status import status_of

    magics = _magics()
    group = _group(magics)
    if group is None:
        raise NoGroup("run")
    if not code.strip():
        raise BadInput("run: there is no code to run")
    options = ["--bg", "-S all"]
    options += ["--queue"] if queue else []
    options += [] if ranks is None else [f"-r {','.join(map(str, ranks))}"]
    options += [] if timeout is None else [f"--timeout {timeout:g}"]
    before = list(magics.history)
    shell: Any = magics.shell
    shell.run_cell(f"%%dip {' '.join(options)}\n{code}", store_history=True).raise_error()
    return status_of([cell for cell in magics.history if cell not in before][-1])


def poll(number: int | None = None) -> CellStatus:
    """One cell of the list; without a number the last."""
    from ddip.group.cells.cell_status import status_of

    return status_of(_cell(number))


def output(
    number: int | None = None, ranks: Sequence[int] | None = None, characters: int = TEXT_CHARACTERS
) -> CellData:
    """What each rank has shown so far, and the errors; of each rank's text the last `characters`."""
    from ddip.group.cells.cell_status import data_of

    cell = _cell(number)
    lacking = [rank for rank in ranks or () if rank not in cell.ranks]
    if lacking:
        raise BadInput(f"ranks={list(ranks or ())}: {cell.text} ran on ranks {', '.join(map(str, cell.ranks))}")
    if characters < 1:
        raise BadInput(f"characters={characters}: give 1 or more")
    return data_of(cell, most=characters, only=ranks)


def pull(names: Sequence[str], rank: int = 0) -> dict[str, dict[str, Any]]:
    """``%dipull``, but into the answer, and not into the notebook: of each name its type, and its value as JSON, or as
    text where JSON has nothing for it or it is large."""
    from ddip.group.objects.transfer import check_names

    group = _group(_magics())
    if group is None:
        raise NoGroup("pull")
    check_names(list(names), "pull")
    return {name: value_data(value) for name, value in group.pull(list(names), rank).items()}


def stop(number: int | None = None) -> CellStatus:
    """``%dipstop``: ends a cell that runs in the background."""
    magics, typed = _magics(), "" if number is None else str(number)
    known = [cell for cell in magics.history.background if not cell.done.done()]
    _cell_magics().dipstop(typed)
    return poll(next(cell.number for cell in known if cell.done.done()) if number is None else number)


def repair(names: Sequence[str] = (), source: int = 0) -> Status:
    """``%makedip --repair``; `names` are copied to the new ranks from the rank `source`."""
    _magics().makedip(" ".join(["--repair", *([f"--from {source}", *names] if names else [])]))
    return status()


def shutdown() -> GroupStatus | None:
    """``%makedip -k``; returns the group that there is then: none."""
    magics = _magics_that_are_there()
    if magics is not None:
        magics.makedip("-k")
    return status()["group"]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (status, start, run, poll, output, pull, stop, repair, shutdown)
}

# -- pure


def value_data(value: Any) -> dict[str, Any]:
    """A value as plain data: ``json`` if JSON holds it and it is small, else ``text``, whose end may be left out."""
    kind = type(value)
    data: dict[str, Any] = {"type": f"{kind.__module__}.{kind.__qualname__}".removeprefix("builtins.")}
    plain = value
    count = getattr(value, "numel", None) or getattr(value, "size", None)
    if hasattr(value, "tolist"):
        number = count() if callable(count) else count
        plain = value.tolist() if isinstance(number, int) and number <= ITEMS else None
        data |= {"shape": list(getattr(value, "shape", ())), "dtype": str(getattr(value, "dtype", ""))}
    if plain is not None or value is None:
        try:
            text = json.dumps(plain, allow_nan=False)
        except (TypeError, ValueError, RecursionError):
            text = ""
        if text and len(text) <= VALUE_CHARACTERS and json.loads(text) == plain:
            return {**data, "json": plain}
    text = readable(repr(value))
    return {**data, "text": text[:VALUE_CHARACTERS], "truncated": len(text) > VALUE_CHARACTERS}


# -- the notebook's


def _magics_that_are_there() -> DipMagics | None:
    shell: Any = get_ipython()
    found: DipMagics | None = None if shell is None else shell.magics_manager.registry.get("DipMagics")
    return found


def _magics() -> DipMagics:
    """Those of the notebook; loads ddip if nobody has."""
    found = _magics_that_are_there()
    if found is None:
        shell: Any = get_ipython()
        if shell is None:
            raise BadInput("ddip.notebook.for_programs: this is no IPython")
        shell.extension_manager.load_extension("ddip")
        found = _magics_that_are_there()
        assert found is not None
    return found


def _cell_magics() -> Any:
    shell: Any = get_ipython()
    return shell.magics_manager.registry["CellMagics"]


def _group(magics: DipMagics) -> Group | None:
    group = magics.group
    return group if group is not None and group.alive else None


def _cell(number: int | None) -> Cell:
    cells = list(_magics().history)
    found = [cell for cell in cells if number is None or cell.number == number]
    if not found:
        known = ", ".join(str(cell.number) for cell in cells[-5:])
        what = (
            "no cell was given to ranks yet" if not cells else f"no cell has the number {number}; the last are {known}"
        )
        raise BadInput(what)
    return found[-1]
