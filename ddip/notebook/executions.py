"""List the executions of a session, from IPython's history of the notebook and ddip's history of cells on ranks."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from ddip.errors import BadInput
from ddip.export.record import Execution
from ddip.notebook.first_lines import DIP, skip_comments
from ddip.protocol.objects import calls

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group.cells.cell import Cell
    from ddip.group.cells.history import History

LOCAL = re.compile(r"%%dip\s+(local|everywhere)\b[^\n]*\n")
DIP_LINE = re.compile(r"%%dip\b([^\n]*)\n?")


class Executions:
    """Notes the notebook's executions that IPython's history does not describe: failed and tagged ones."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._failed: set[int] = set()
        self._cells: dict[int, str] = {}
        self._tagged: set[int] = set()
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
        kernel = getattr(self._shell, "kernel", None)
        about = {} if kernel is None else kernel.get_parent("shell").get("metadata", {})
        self._cells[self._number] = str(about.get("cellId", ""))
        if "parameters" in about.get("tags", ()):
            self._tagged.add(self._number)

    def _note_result(self, result: Any) -> None:
        if result.info is not None and result.info.store_history and not result.success:
            self._failed.add(self._number)

    def list_executions(self, history: History, since: float) -> tuple[Execution, ...]:
        """Return the executions of the notebook so far, and those on ranks `since` a Unix time, in order."""
        sources: list[str] = list(self._shell.history_manager.input_hist_raw)  # type: ignore[union-attr]
        found: list[tuple[int, float, Execution]] = []
        on_ranks: dict[int, set[str]] = {}
        for cell in history:
            on_ranks.setdefault(cell.number, set()).add(cell.code.strip())
            if cell.submitted >= since:
                found.append((cell.number, cell.began or cell.submitted, self._rank_execution(cell, sources, history)))
        for number, source in enumerate(sources[: self._number]):
            local = _local_code(source, on_ranks.get(number, set()))
            if local.strip():
                failure = "it failed" if number in self._failed and number not in on_ranks else ""
                found.append((number, 0.0, Execution(number, local, failure=failure)))
        found.sort(key=lambda one: one[:2])
        return tuple(execution for _, _, execution in found)

    def has_pushed(self, number: int) -> bool:
        """Return True if the cell with this number has typed ``%dipush``, which a script translates."""
        sources: list[str] = list(self._shell.history_manager.input_hist_raw)  # type: ignore[union-attr]
        return number < len(sources) and "%dipush" in sources[number]

    def _rank_execution(self, cell: Cell, sources: list[str], history: History) -> Execution:
        source = skip_comments(sources[cell.number]) if cell.number < len(sources) else ""
        line = DIP_LINE.match(source)
        is_param = cell.number in self._tagged or (line is not None and "--param" in line[1].split())
        failure = ""
        if cell.outcome is None:
            failure = "it still runs"
        elif cell.outcome != "ok":
            failure = f"it {cell.outcome_text}: {cell.message.partition(chr(10))[0]}"
        code = cell.code
        if code.startswith(f"{calls.NAME}("):
            code = "get_ipython().run_line_magic('in_torchddp', '')"
        resized = next((one.text for one in history.changes if one.resizes and one.at > cell.submitted), "")
        identifier = self._cells.get(cell.number, "")
        return Execution(cell.number, code, tuple(cell.ranks), failure, is_param, resized, identifier)


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
