"""The magics as functions for programs, with plain data as arguments and results.

``ddip/server`` calls them in the kernel of a notebook:

    answer = call("run", '{"code": "train()"}', before)     JSON in `answer` ->  {"ok": {"number": 7, ...}}

Each function corresponds to a magic or to its output, so a program can do what a user can, and no more. The cells that
it runs are numbered in the notebook's history, and ``%dipcell 7`` shows them to the user.
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
from ddip.protocol.text import escape_surrogates

if TYPE_CHECKING:
    from ddip.group.cells.cell import Cell
    from ddip.notebook.magics import DipMagics

VALUE_CHARACTERS = 10_000
"""Maximum characters of the text of a pulled value."""
ITEMS = 1_000
"""Maximum number of elements of a tensor or array that is returned as JSON; a larger one is returned as text."""


class Answer:
    """A displayable object that carries JSON text into the kernel's reply."""

    def __init__(self, text: str) -> None:
        self._text = text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {ANSWER_MIME: self._text, "text/plain": self._text}


def call(name: str, arguments: str = "{}", before: float | None = None) -> Answer:
    """Call the function `name` of this module with `arguments`, a JSON object; never raises.

    The answer has ``ok``, the result, or else ``error``, the class of the exception, and ``message``. If the time is
    after `before`, in seconds since 1970, nothing is called: the kernel was busy, and the caller has given up.
    """
    if before is not None and time.time() > before:
        return _make_answer({"error": TOO_LATE, "message": "the kernel was busy; nothing was done"})
    try:
        if name not in FUNCTIONS:
            raise BadInput(f"{name}: no such function; the functions are {', '.join(FUNCTIONS)}")
        return _make_answer({"ok": FUNCTIONS[name](**json.loads(arguments))})
    except BaseException as error:  # including the stop button, which the program must learn of
        return _make_answer({"error": type(error).__name__, "message": escape_surrogates(str(error))})


def _make_answer(data: dict[str, Any]) -> Answer:
    return Answer(json.dumps(data))


# -- functions for programs


def status() -> Status:
    """Return the status of the group and its cells, as ``%dipstatus --json`` does."""
    magics = _find_magics()
    if magics is None:
        return {"schema": SCHEMA, "group": None, "ranks": [], "devices": [], "cells": [], "errors": {}}
    from ddip.notebook.cell_magics import status_now

    return status_now(magics.running_group, magics.history)


def start(arguments: str = "") -> Status:
    """Run ``%makedip`` with `arguments`, as a user would type them, and return the status.

    Waits for the group. Loads ddip if necessary. Raises the errors of ``%makedip``: BadInput, GroupError or
    RequestInterrupted.
    """
    _load_magics().makedip(arguments)
    return status()


def run(
    code: str,
    ranks: Sequence[int] | None = None,
    timeout: float | None = None,
    queue: bool = False,
) -> CellStatus:
    """Start a cell in the background, as ``%%dip --bg -S all`` does, and return its status at once.

    `ranks`: default all; `timeout` in seconds, default none; `queue`: wait for other cells of these ranks instead of
    raising GroupError. Raises NoGroup if there is no group, and BadInput.
    """
    from ddip.group.cells.cell_status import status_of

    magics = _load_magics()
    group = magics.running_group
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
    """Return the status of the cell `number`, or of the last cell for None.

    Raises BadInput if there is none.
    """
    from ddip.group.cells.cell_status import status_of

    return status_of(_find_cell(number))


def output(
    number: int | None = None, ranks: Sequence[int] | None = None, characters: int = TEXT_CHARACTERS
) -> CellData:
    """Return the output of each rank so far, cut to the last `characters` per rank, and the errors.

    `number` as in `poll`; `ranks`: only these, default all that ran the cell. Raises BadInput for other ranks and
    cells.
    """
    from ddip.group.cells.cell_status import data_of

    cell = _find_cell(number)
    lacking = [rank for rank in ranks or () if rank not in cell.ranks]
    if lacking:
        raise BadInput(f"ranks={list(ranks or ())}: {cell.text} ran only on ranks {', '.join(map(str, cell.ranks))}")
    if characters < 1:
        raise BadInput(f"characters={characters}: pass 1 or more")
    return data_of(cell, most=characters, only=ranks)


def pull(names: Sequence[str], rank: int = 0) -> dict[str, dict[str, Any]]:
    """Return the values of the variables `names` on `rank` as plain data, by name; assign nothing in the notebook.

    Each entry has ``type``, the name of the class, and either ``json``, the value, or ``text``, its ``repr`` if the
    value is large or JSON cannot represent it; ``truncated`` is then True if the text is incomplete. Tensors and arrays
    also have ``shape`` and ``dtype``. Raises NoGroup, BadInput, GroupError, TransferError or RequestInterrupted.
    """
    from ddip.group.objects.transfer import check_names

    group = _load_magics().running_group
    if group is None:
        raise NoGroup("pull")
    check_names(list(names), "pull")
    return {name: value_data(value) for name, value in group.pull(list(names), rank).items()}


def stop(number: int | None = None) -> CellStatus:
    """Stop the background cell `number`, as ``%dipstop`` does, and return its status.

    Waits until it has ended. None means the only one that runs. Raises BadInput if there is none or several, and
    GroupError if a rank does not stop.
    """
    magics, typed = _load_magics(), "" if number is None else str(number)
    known = [cell for cell in magics.history.background if not cell.done.done()]
    _cell_magics().dipstop(typed)
    return poll(next(cell.number for cell in known if cell.done.done()) if number is None else number)


def repair(names: Sequence[str] = (), source: int = 0) -> Status:
    """Replace ended ranks, as ``%makedip --repair`` does, and return the status.

    Copies `names` to them from rank `source`. Raises the errors of ``Group.repair``.
    """
    _load_magics().makedip(" ".join(["--repair", *([f"--from {source}", *names] if names else [])]))
    return status()


def shutdown() -> GroupStatus | None:
    """End the group, as ``%makedip -k`` does; return the remaining group: None."""
    magics = _find_magics()
    if magics is not None:
        magics.makedip("-k")
    return status()["group"]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    function.__name__: function for function in (status, start, run, poll, output, pull, stop, repair, shutdown)
}

# -- pure functions


def value_data(value: Any) -> dict[str, Any]:
    """Convert a value to plain data: ``json`` if it is small and JSON can represent it, else ``text``.

    The text may be truncated.
    """
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
    text = escape_surrogates(repr(value))
    return {**data, "text": text[:VALUE_CHARACTERS], "truncated": len(text) > VALUE_CHARACTERS}


# -- access to the notebook


def _find_magics() -> DipMagics | None:
    shell: Any = get_ipython()
    found: DipMagics | None = None if shell is None else shell.magics_manager.registry.get("DipMagics")
    return found


def _load_magics() -> DipMagics:
    """Return the notebook's magics; load ddip if necessary. Raises BadInput outside IPython."""
    found = _find_magics()
    if found is None:
        shell: Any = get_ipython()
        if shell is None:
            raise BadInput("ddip.notebook.for_programs: this process does not run IPython")
        shell.extension_manager.load_extension("ddip")
        found = _find_magics()
        assert found is not None
    return found


def _cell_magics() -> Any:
    shell: Any = get_ipython()
    return shell.magics_manager.registry["CellMagics"]


def _find_cell(number: int | None) -> Cell:
    """Return the last cell with `number`, or the last of all; raises BadInput if there is none."""
    cells = list(_load_magics().history)
    found = [cell for cell in cells if number is None or cell.number == number]
    if not found:
        known = ", ".join(str(cell.number) for cell in cells[-5:])
        what = "no cell has run on ranks yet" if not cells else f"no cell has the number {number}; the last are {known}"
        raise BadInput(what)
    return found[-1]
