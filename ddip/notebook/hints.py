"""Help while a person types, and hints when a name is on the other side.

Tab and ``?`` in a cell that will run on ranks are answered by rank 0, if it is idle and quick; else by the notebook.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from IPython.core.completer import CompletionContext, SimpleCompletion, context_matcher

from ddip.errors import CellError
from ddip.output.area import notify, notify_late

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group.group import Group
    from ddip.notebook.autodip import Autodip
    from ddip.protocol.on_rank import RemoteCall

ANSWER_SECONDS = 0.2
"""How long a person waits for rank 0's answer; then the notebook answers alone."""
MAGIC = re.compile(r"\s*%%dip(?:[ \t]([^\n]*))?\n")
UNKNOWN = re.compile(r"name '(\w+)' is not defined")


class Hints:
    """Everything of this kind, as long as the extension is loaded."""

    def __init__(self, shell: InteractiveShell, group: Callable[[], Group | None], autodipper: Autodip) -> None:
        self._shell = shell
        self._group = group
        self._autodipper = autodipper
        self._matcher = context_matcher(identifier="ddip", priority=1e6)(lambda context: self._match(context))
        shell.Completer.custom_matchers.append(self._matcher)
        shell.events.register("post_run_cell", self._after_cell)
        shell.events.register("pre_run_cell", self._before_cell)
        self._kernel = getattr(shell, "kernel", None)
        if self._kernel is not None:
            self._inspect = self._kernel.do_inspect
            self._kernel.do_inspect = self._inspect_there

    def close(self) -> None:
        """Leave IPython as it was."""
        if self._matcher in self._shell.Completer.custom_matchers:
            self._shell.Completer.custom_matchers.remove(self._matcher)
        self._shell.events.unregister("post_run_cell", self._after_cell)
        self._shell.events.unregister("pre_run_cell", self._before_cell)
        if self._kernel is not None:
            del self._kernel.do_inspect

    # -- while a person types

    def _begin_of(self, text: str) -> int | None:
        """Where the code begins that will run on ranks; None: it will run here."""
        found = MAGIC.match(text)
        if found is not None:
            return None if "local" in (found[1] or "").split() else found.end()
        return 0 if self._autodipper.takes(text) else None

    def _ask(
        self, ask: Callable[[str, int], RemoteCall[dict[str, Any]]], text: str, cursor: int
    ) -> tuple[int, dict[str, Any]] | None:
        """Rank 0's answer, and where the code that it was asked about begins."""
        begin = self._begin_of(text)
        group = self._group()
        if begin is None or cursor < begin or group is None or not group.alive:
            return None
        answer = group.try_call(ask(text[begin:], cursor - begin), ANSWER_SECONDS)
        return None if answer is None else (begin, answer)

    def _match(self, context: CompletionContext) -> dict[str, Any]:
        from ddip.protocol import on_rank  # no part of %load_ext

        lines = context.full_text.split("\n")
        cursor = sum(len(line) + 1 for line in lines[: context.cursor_line]) + context.cursor_position
        asked = self._ask(on_rank.complete, context.full_text, cursor)
        if asked is None:
            return {"completions": []}
        begin, answer = asked
        kinds = {
            item["text"]: item.get("type") for item in answer.get("metadata", {}).get("_jupyter_types_experimental", ())
        }
        return {
            "completions": [SimpleCompletion(text=text, type=kinds.get(text)) for text in answer["matches"]],
            "matched_fragment": context.full_text[begin + answer["cursor_start"] : cursor],
            "ordered": True,
            "suppress": True,
        }

    def _inspect_there(self, code: str, cursor: int, detail_level: int = 0, *args: Any, **kwargs: Any) -> Any:
        """What stands in for the kernel's ``do_inspect``."""
        from ddip.protocol import on_rank  # no part of %load_ext

        asked = self._ask(lambda text, at: on_rank.inspect(text, at, detail_level), code, cursor)
        if asked is not None and asked[1].get("found"):
            return asked[1]
        return self._inspect(code, cursor, detail_level, *args, **kwargs)

    # -- after a cell

    def _before_cell(self, info: Any) -> None:
        notify_late()

    def _after_cell(self, result: Any) -> None:
        error = result.error_in_exec or result.error_before_exec
        group = self._group()
        if not isinstance(error, NameError) or group is None or not group.alive:
            return
        found = UNKNOWN.search(str(error))
        if found is not None and group.has_name(found[1]):
            notify(f"{found[1]} is a variable of the ranks; %dipull {found[1]} copies rank 0's to the notebook")

    def explain(self, error: CellError) -> None:
        """Add to `error` which of the names that a rank did not know the notebook has."""
        names = []
        for problem in error.by_rank.values():
            found = UNKNOWN.search(problem.message)
            if problem.name == "NameError" and found and found[1] not in names and found[1] in self._shell.user_ns:
                names.append(found[1])
        if names:
            what = f"{', '.join(names)} {'is a variable' if len(names) == 1 else 'are variables'} of the notebook"
            error.args = (f"{error.args[0]}; {what}; %dipush {' '.join(names)} copies to every rank", *error.args[1:])
