"""List the executions of a session, from IPython's history of the notebook and ddip's history of cells on ranks."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddip.errors import BadInput
from ddip.notebook.first_lines import DIP, skip_comments
from ddip.output.area import current_request

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.export.record import Execution, Push
    from ddip.group.cells.cell import Cell
    from ddip.group.cells.history import History
    from ddip.protocol.objects.pickling import Pickled

LOCAL = re.compile(r"%%dip\s+(local|everywhere)\b[^\n]*\n")
DIP_LINE = re.compile(r"%%dip\b([^\n]*)\n?")


class Executions:
    """Notes the notebook's executions that IPython's history does not describe: failed and tagged ones."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._failed: set[int] = set()
        self._cells: dict[int, str] = {}
        self._tagged: set[int] = set()
        self._began: dict[int, float] = {}
        """Unix time at which each execution began, in seconds."""
        self._number = 0
        shell.events.register("pre_run_cell", self._note_cell)
        shell.events.register("post_run_cell", self._note_result)

    def close(self) -> None:
        """Remove the event handlers from IPython."""
        self._shell.events.unregister("pre_run_cell", self._note_cell)
        self._shell.events.unregister("post_run_cell", self._note_result)

    def _note_cell(self, info: Any) -> None:
        if not info.store_history:
            return
        self._number = self._shell.execution_count
        self._began[self._number] = time.time()
        about = (current_request() or {}).get("metadata", {})
        self._cells[self._number] = str(about.get("cellId", ""))
        if "parameters" in about.get("tags", ()):
            self._tagged.add(self._number)

    def _note_result(self, result: Any) -> None:
        if result.info is not None and result.info.store_history and not result.success:
            self._failed.add(self._number)

    def list_events(self, history: History, folder: str) -> tuple[Execution | Push, ...]:
        """Return executions of cells and pushes in order; those on ranks since all ranks started.

        `folder`: the ranks' working directory at their start.
        """
        from ddip.export.record import Execution, Push

        sources: list[str] = list(self._shell.history_manager.input_hist_raw)  # type: ignore[union-attr]
        cells = [cell for cell in history if cell.submitted >= history.started]
        timed: list[tuple[float, Execution | Push]] = [
            (sent.at, Push(sent.number, sent.names, sent.ranks, _pickle_again(sent.pickled))) for sent in history.sent
        ]
        for cell in cells:
            source = skip_comments(sources[cell.number]) if cell.number < len(sources) else ""
            timed.append((cell.began or cell.submitted, self._rank_execution(cell, source, cells, folder)))
            folder = _next_folder(cell, folder)
        found: list[tuple[int, bool, Execution | Push]] = []
        for _, event in sorted(timed, key=lambda pair: pair[0]):  # a queued cell may begin after later ones
            found.append((max(event.number, found[-1][0] if found else 0), False, event))
        on_ranks: dict[int, set[str]] = {}
        for cell in history:
            on_ranks.setdefault(cell.number, set()).add(cell.code.strip())
        for number, source in enumerate(sources[: self._number]):
            local = _local_code(source, on_ranks.get(number, set()))
            if local.strip():
                failure = "it failed" if number in self._failed and number not in on_ranks else ""
                is_former = self._began.get(number, 0) < history.started
                found.append((number, True, Execution(number, local, failure=failure, is_former=is_former)))
        return tuple(event for _, _, event in sorted(found, key=lambda entry: entry[:2]))

    def _rank_execution(self, cell: Cell, source: str, cells: list[Cell], folder: str) -> Execution:
        from ddip.export.record import Execution
        from ddip.protocol.objects import calls

        line = DIP_LINE.match(source)
        is_param = cell.number in self._tagged or (line is not None and "--param" in line[1].split())
        failure = ""
        if cell.outcome is None:
            failure = "it still runs"
        elif cell.outcome != "ok":
            texts = {str(error) for error in cell.errors.values()}
            failure = (
                texts.pop() if len(texts) == 1 and cell.outcome == "user_error" else cell.message.partition("\n")[0]
            )
        code = cell.code
        if code.startswith(f"{calls.NAME}("):
            code = "get_ipython().run_line_magic('in_torchddp', '')"
        if why := _script_problem(cell, folder):
            code = f"get_ipython().run_line_magic({code.strip().removeprefix('%') + why!r}, '')"
        return Execution(
            cell.number,
            code,
            tuple(cell.ranks),
            failure,
            cell.outcome == "not_run",
            next(iter(_find_overlaps(cell, cells)), 0),
            is_param,
            cell=self._cells.get(cell.number, ""),
        )


def _pickle_again(pickled: Mapping[str, Pickled] | None) -> bytes | None:
    """Return pushed values as a dict that ``torch.load`` reads without ddip; None if that fails."""
    if pickled is None:
        return None
    import cloudpickle
    import torch  # takes a second, so only an export imports it here

    from ddip.protocol.objects.pickling import Loader

    loader, data = Loader(pickled), None
    with contextlib.suppress(Exception):  # the classes of the values may raise anything
        file = io.BytesIO()
        torch.save({name: loader.load(name) for name in pickled}, file, pickle_module=cloudpickle)
        data = file.getvalue()
    return data


def _script_problem(cell: Cell, folder: str) -> str:
    """Return why an exported script cannot run the file of a ``%diprun`` cell; empty if it can.

    `folder`: the ranks' working directory before the cell; empty if it is not known.
    """
    if cell.script is None or not cell.script["digest"]:
        return ""
    path = Path(cell.script["folder"], cell.code.split()[1])
    if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != cell.script["digest"]:
        return ", which has changed since"
    if not folder or os.path.realpath(cell.script["folder"]) != os.path.realpath(folder):
        return (
            ": the file is in the notebook's folder, and the ranks ran in another; type %cd in a cell of the ranks too"
        )
    return ""


def _next_folder(cell: Cell, folder: str) -> str:
    """Return the ranks' working directory after a cell; empty if its code may choose any."""
    if cell.outcome != "ok" or not folder:
        return folder
    for line in re.findall(r"^[ \t]*%?cd[ \t]+(\S+)[ \t]*$", cell.code, re.MULTILINE):
        folder = os.path.join(folder, os.path.expanduser(line.strip("'\"")))
    return "" if re.search(r"\bchdir\b", cell.code) else folder


def _find_overlaps(cell: Cell, cells: list[Cell]) -> Iterator[int]:
    """Yield the numbers of other cells that ran on ranks at the same time."""
    for other in cells:
        spans = [moment or float("inf") for moment in (cell.began, cell.ended, other.began, other.ended)]
        if other is not cell and spans[2] < spans[1] and spans[0] < spans[3]:
            yield other.number


def _local_code(source: str, on_ranks: set[str]) -> str:
    """Return the code of a cell that the notebook ran itself; `on_ranks`: the code that ranks ran for it."""
    code = skip_comments(source)
    local = LOCAL.match(code)
    if local:
        return code[local.end() :]
    return "" if DIP.match(code) or source.strip() in on_ranks or code.strip() in on_ranks else source


def parse_numbers(typed: str, last: int) -> frozenset[int]:
    """Return the cells of ``--cells``, such as ``3-9,12`` or ``3-`` up to the `last`; raises BadInput."""
    numbers: set[int] = set()
    for word in filter(None, typed.split(",")):
        found = re.fullmatch(r"(\d+)(?:-(\d*))?", word)
        end = 0 if not found else int(found[1] if found[2] is None else found[2] or max(last, int(found[1])))
        if not found or end < int(found[1]):
            raise BadInput(f"--cells {typed}: type numbers of cells, such as --cells 3-9,12; %dipcells lists them")
        numbers |= set(range(int(found[1]), end + 1))
    return frozenset(numbers)
