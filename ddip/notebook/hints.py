"""Help while the user types, and hints after errors.

In a cell for the ranks, rank 0 answers Tab and ``?`` if it is idle and quick; otherwise the notebook does. Tab on the
line of a ddip magic offers what its parser accepts. Hints explain names that exist only on the other side. A warning
appears if autoreload is on only in the notebook, because ranks would silently run old modules.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import TYPE_CHECKING, Any

from IPython.core.completer import Completion

from ddip.errors import CellError, DdipError, LocalCellFailed, RankError, ranks_text
from ddip.notebook.completion import ANSWER_SECONDS, MagicCompleter
from ddip.notebook.first_lines import skip_comments
from ddip.output.area import notify, print_late_output
from ddip.output.terminal_text import strip_escapes
from ddip.protocol.start_methods import NOT_FORKED

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group.group import Group
    from ddip.notebook.autodip import Autodip
    from ddip.protocol.on_rank import RemoteCall

MAGIC = re.compile(r"%%dip(?:[ \t]([^\n]*))?\n")
WORKER_ENDED = re.compile(r"DataLoader worker .*exited unexpectedly")
UNKNOWN = re.compile(r"name '(\w+)' is not defined")
COMMANDS = "pip|conda|mamba|uv|ls|pwd|cd|cat|mkdir|rm|cp|mv"
"""Magics that people type without the % where IPython adds it."""
COMMAND = re.compile(rf"name '({COMMANDS})' is not defined|^[ \d>-]*\b({COMMANDS}) [\w.~/-]", re.MULTILINE)
"""Matches a NameError's message, or a line of a SyntaxError's traceback, in a cell with such a magic."""
UNPICKLED = re.compile(r"popen_(forkserver|spawn_posix)\.py")
"""Files of Python that pickle the work of a process that is not forked, as they appear in tracebacks."""


class Hints:
    """Tab completion and ``?`` on rank 0, and hints about names, as long as the extension is loaded."""

    def __init__(self, shell: InteractiveShell, group: Callable[[], Group | None], autodipper: Autodip) -> None:
        self._shell = shell
        self._group = group
        self._autodipper = autodipper
        self.kept_call: Callable[[RemoteCall[dict[str, Any]], float], dict[str, Any] | None] | None = None
        """``Group.try_call`` of a kept group, while the notebook is attached to one."""
        self.autoreload = Autoreload(shell)
        self._magic_completer = MagicCompleter(shell, group)
        self._completions = shell.Completer.completions
        shell.Completer.completions = self._complete  # type: ignore[method-assign]
        self._debugger = shell.debugger
        shell.debugger = self._debug_notebook  # type: ignore[method-assign]
        shell.events.register("post_run_cell", self._after_cell)
        shell.events.register("pre_run_cell", self._before_cell)
        self._kernel = getattr(shell, "kernel", None)
        if self._kernel is not None:
            self._inspect = self._kernel.do_inspect
            self._kernel.do_inspect = self._inspect_on_rank_0

    def close(self) -> None:
        """Remove all hooks from IPython."""
        del self._shell.Completer.completions, self._shell.debugger
        self._shell.events.unregister("post_run_cell", self._after_cell)
        self._shell.events.unregister("pre_run_cell", self._before_cell)
        if self._kernel is not None:
            del self._kernel.do_inspect

    # -- while a person types

    def _code_start(self, text: str) -> int | None:
        """Return the index at which a cell's code for ranks begins; None if it will run in the notebook."""
        cell = skip_comments(text)
        found = MAGIC.match(cell)
        if found is not None:
            return None if "local" in (found[1] or "").split() else len(text) - len(cell) + found.end()
        return 0 if self._autodipper.takes(text) else None

    def _ask_rank_0(
        self, ask: Callable[[str, int], RemoteCall[dict[str, Any]]], text: str, cursor: int
    ) -> tuple[int, dict[str, Any]] | None:
        """Return the index at which the code for ranks begins, and rank 0's answer; None without an answer."""
        begin = self._code_start(text)
        group = self._group()
        try_call = self.kept_call or (group.try_call if group is not None else None)
        if begin is None or cursor < begin or try_call is None:
            return None
        answer = try_call(ask(text[begin:], cursor - begin), ANSWER_SECONDS)
        return None if answer is None else (begin, answer)

    def _complete(self, text: str, offset: int) -> Iterator[Completion]:
        """Return the completions of `text` at `offset`, on rank 0 or in the notebook.

        Replaces IPython's ``Completer.completions``, which all front ends call.
        """
        found = self._magic_completer.complete(text[:offset])
        if found is None:
            found = self._complete_on_rank_0(text, offset)
        return iter(found) if found is not None else self._completions(text, offset)

    def _complete_on_rank_0(self, text: str, cursor: int) -> list[Completion] | None:
        from ddip.protocol import on_rank  # not needed by %load_ext, which must be fast

        asked = self._ask_rank_0(on_rank.complete_code, text, cursor)
        if asked is None or not asked[1]["matches"]:
            return None
        begin, answer = asked
        items = answer.get("metadata", {}).get("_jupyter_types_experimental", ())
        kinds = {item["text"]: item.get("type") for item in items}
        span = begin + answer["cursor_start"], begin + answer["cursor_end"]
        return [Completion(*span, match, type=kinds.get(match)) for match in answer["matches"]]

    def _inspect_on_rank_0(self, code: str, cursor: int, detail_level: int = 0, *args: Any, **kwargs: Any) -> Any:
        """Have rank 0 answer ``?`` if possible; replaces the kernel's ``do_inspect``."""
        from ddip.protocol import on_rank  # not needed by %load_ext, which must be fast

        asked = self._ask_rank_0(lambda text, at: on_rank.inspect_code(text, at, detail_level), code, cursor)
        if asked is not None and asked[1].get("found"):
            return asked[1]
        return self._inspect(code, cursor, detail_level, *args, **kwargs)

    # -- after a cell

    def _before_cell(self, info: Any) -> None:
        print_late_output()

    def _after_cell(self, result: Any) -> None:
        error = result.error_in_exec or result.error_before_exec
        if isinstance(error, LocalCellFailed) and error.__cause__ is not None:
            _set_last_error(error.__cause__)
        group = self._group()
        if group is None:
            return
        self.autoreload.after_cell(group)
        group.report_faults()
        if not isinstance(error, NameError):
            return
        found = UNKNOWN.search(str(error))
        if found is not None and group.has_name(found[1]):
            notify(f"{found[1]} is a variable of the ranks; %dipull {found[1]} copies rank 0's to the notebook")

    def _debug_notebook(self, force: bool = False) -> None:
        """Start IPython's debugger, but not in ddip's code; replaces ``debugger``, which %debug and %pdb call."""
        error = getattr(sys, "last_value", None)
        if not isinstance(error, DdipError) or not _is_of_a_magic(error):
            self._debugger(force)
        elif isinstance(error, CellError):
            failed = [rank for rank, problem in error.by_rank.items() if not problem.waited] or [*error.by_rank]
            notify(
                f"the error is on {ranks_text(failed)}: %dipdebug opens the debugger there, if its "
                "frames were kept (%config DipMagics.keep_frames = True, and run the cell again)"
            )
        elif not isinstance(error, LocalCellFailed):  # then the debugger has been at its cause
            notify("the last error is a message of ddip, so there is nothing to debug; %tb shows it again")

    def explain(self, error: CellError) -> None:
        """Add hints to `error`: on unknown names, ``exit()``, spawned workers and missing modules."""
        sentences = self._name_hints(error)
        if any(problem.name == "SystemExit" for problem in error.by_rank.values()):
            sentences.append("exit() and sys.exit() end the cell, not the ranks; %makedip -k ends the ranks")
        if any(_lacks_names_of_cells(problem) for problem in error.by_rank.values()):
            sentences.append(NOT_FORKED)
        sentences += self._module_hints(error)
        sentences += self._magic_hints(error)
        error.args = ("; ".join([error.args[0], *sentences]), *error.args[1:])

    def _module_hints(self, error: CellError) -> list[str]:
        group, missing = self._group(), ("ModuleNotFoundError", "ImportError")
        text = "\n".join(problem.message for problem in error.by_rank.values() if problem.name in missing)
        if not text or group is None:
            return []
        from ddip.group.objects import modules

        return [*filter(None, [modules.suggest_push(text, group.ranks)])]

    def _magic_hints(self, error: CellError) -> list[str]:
        """Return a hint if the cell has a magic without its %, as in ``pip install x``."""
        for problem in error.by_rank.values():
            text = {"NameError": problem.message, "SyntaxError": problem.traceback}.get(problem.name, "")
            found = COMMAND.search(strip_escapes(text))
            name = found and (found[1] or found[2])
            if name and name not in self._shell.user_ns and self._shell.find_line_magic(name) is not None:
                return [f"type %{name}, with the %: only cells that run in the notebook may lack it"]
        return []

    def _name_hints(self, error: CellError) -> list[str]:
        unknown: dict[str, list[int]] = {}
        for rank, problem in error.by_rank.items():
            found = UNKNOWN.search(problem.message) if problem.name == "NameError" else None
            if found:
                unknown.setdefault(found[1], []).append(rank)
        sentences, variables = [], []
        for name, ranks in unknown.items():
            value = self._shell.user_ns.get(name)
            if isinstance(value, ModuleType):
                alias = "" if value.__name__ == name else f" as {name}"
                sentences.append(f"type import {value.__name__}{alias} in a %%dip cell")
            elif name in self._shell.user_ns:
                variables.append(name)
            sentences += self._new_rank_hints(ranks)
        if variables:
            what, it = ("is a variable", "it") if len(variables) == 1 else ("are variables", "them")
            names = f"{', '.join(variables)} {what} of the notebook"
            sentences.append(f"{names}; %dipush {' '.join(variables)} copies {it} to every rank")
        return list(dict.fromkeys(sentences))

    def _new_rank_hints(self, ranks: list[int]) -> list[str]:
        """Return a hint if only new ranks lack a name, which earlier cells defined on the others."""
        group = self._group()
        new = [] if group is None else [rank for rank in ranks if rank in group.new_ranks]
        if not new or new != ranks:
            return []
        lack = "is new and lacks" if len(new) == 1 else "are new and lack"
        return [f"{ranks_text(new)} {lack} what earlier cells have defined: run those again"]


def _is_of_a_magic(error: BaseException) -> bool:
    """Return whether a magic of ddip has raised `error`, so that the user's code has no frame to debug."""
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in traceback.walk_tb(error.__traceback__)]
    return next((name for name in modules if name.startswith("ddip.")), "").startswith("ddip.notebook.")


def _set_last_error(error: BaseException) -> None:
    """Set the error that %debug, %tb and ``pdb.pm`` use."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def _lacks_names_of_cells(problem: RankError) -> bool:
    """Return True if a worker of a data loader ended without a signal, or its work could not be pickled."""
    if problem.name in ("PicklingError", "AttributeError") and UNPICKLED.search(problem.traceback):
        return True
    return bool(WORKER_ENDED.search(problem.message)) and "killed by signal" not in problem.traceback


TURNED_ON = re.compile(r"^\s*%(?:autoreload|(?:re)?load_ext\s+autoreload)\b", re.MULTILINE)


class Autoreload:
    """Warns the user once if autoreload is on in the notebook but not on all ranks."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._pids: set[int] = set()
        """PIDs of the ranks on which a cell has turned it on."""
        self._has_warned = False
        """True if the user has been warned since."""

    @property
    def is_on(self) -> bool:
        """True if autoreload is on in the notebook."""
        magics = self._shell.magics_manager.registry.get("AutoreloadMagics")
        return bool(getattr(getattr(magics, "_reloader", None), "enabled", False))

    def record_cell(self, cell: str, group: Group, ranks: Iterable[int]) -> None:
        """Record the ranks that run `cell` if it turns autoreload on."""
        if TURNED_ON.search(cell):
            self._pids |= {group.members[rank].pid for rank in ranks}
            self._has_warned = False  # warn again for ranks that are added later

    def after_cell(self, group: Group) -> None:
        """Warn once if autoreload is on in the notebook but not on all ranks."""
        if self._has_warned or not self.is_on:
            return
        lack = [rank for rank, member in enumerate(group.members) if member.pid not in self._pids]
        if lack:
            self._has_warned = True
            where = " only" if len(lack) == group.world_size else f", and not on {ranks_text(lack)}"
            remedy = "run %%dip, %load_ext autoreload, %autoreload 2 in a cell"
            notify(f"autoreload is on in the notebook{where}; to enable it on the ranks, {remedy}")
