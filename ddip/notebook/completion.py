"""Tab on the line of a ddip magic: options from the magic's parser, and values from the group and the notebook."""

from __future__ import annotations

import glob
import os
import re
from argparse import Action
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from IPython.core.completer import Completion

from ddip import apps

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group.group import Group

ANSWER_SECONDS = 0.5
"""Seconds to wait for a rank's answer to Tab or ``?``; JupyterLab drops completions that take longer than 1 s."""
MAGIC = re.compile(r"(?:.*[\s=])?(%%?)(\w*dip\w*)[ \t](.*)")
"""The last magic of a line up to the cursor, and what follows it."""
OPEN_QUOTE = re.compile(r"""[^"']*["']([^"']*)""")
"""Arguments of ``%autodip`` up to the cursor, if this is in quotes: the arguments of ``%%dip``."""


class MagicCompleter:
    """Completes the arguments of ddip's magics."""

    def __init__(self, shell: InteractiveShell, group: Callable[[], Group | None]) -> None:
        self._shell, self._group = shell, group

    def complete(self, before: str) -> list[Completion] | None:
        """Return the words that can stand after the text `before`; None if its last line has no ddip magic."""
        found = MAGIC.fullmatch(before.rpartition("\n")[2])
        if found is None:
            return None
        escape, name, typed = found.groups()
        magic = self._shell.find_magic(name, "cell" if escape == "%%" else "line")
        if not getattr(magic, "__module__", "").startswith("ddip."):
            return None
        quoted = OPEN_QUOTE.fullmatch(typed) if name == "autodip" else None
        if quoted is not None:
            name, typed, magic = "dip", quoted[1], self._shell.find_magic("dip", "cell")
        *words, token = re.split(r"[\s,]+", typed)
        actions = getattr(getattr(magic, "parser", None), "_actions", [])
        offered = self._offer(name, actions, [*filter(None, words)], token)
        begin = len(before) - len(token)
        fitting = [word for word in offered if word.startswith(token) and word not in words]
        return [Completion(begin, len(before), word, type="magic") for word in fitting]

    def _offer(self, magic: str, actions: list[Action], words: list[str], token: str) -> list[str]:
        """Return the options and values that can come after `words`.

        `token` is the beginning of the word that is completed.
        """
        options = {option: action for action in actions for option in action.option_strings}
        option, equals, _ = token.partition("=")
        if equals and option in options:
            return [f"{option}={value}" for value in self._values(magic, options[option], 0, words, "")]
        expected = _expected_arguments(actions, options, words)
        if token.startswith("-") or not expected:
            return list(options)
        return [value for action, count in expected for value in self._values(magic, action, count, words, token)]

    def _values(self, magic: str, action: Action, count: int, words: list[str], token: str) -> Iterable[str]:
        """Return values for the argument `action`, which has `count` values already."""
        kind = action.metavar or action.dest
        kind = kind if isinstance(kind, str) else kind[min(count, len(kind) - 1)]
        group = self._group()
        match kind:
            case "RANK":
                size = 0 if group is None else group.world_size
                return [*(["all"] if action.dest != "source" else []), *map(str, range(size))]
            case "names" | "NAME" | "MODEL":
                return self._names(magic, group, words, token)
            case "GPU":
                from ddip.cluster import devices  # not needed by %load_ext, which must be fast

                return ["all", *map(str, range(len(devices.gpu_names())))]
            case "app":
                return apps.app_names()
            case "CELL":
                return [] if group is None else [str(cell.number) for cell in group.history]
            case "FOLDER" | "PATH" | "SCRIPT" | "ARGUMENT":
                paths = sorted(glob.glob(f"{glob.escape(token)}*"))
                return [f"{path}/" if os.path.isdir(path) else path for path in paths]
        return kind.split("|") if "|" in kind else []

    def _names(self, magic: str, group: Group | None, words: list[str], token: str) -> Iterable[str]:
        """Return names of variables: the notebook's for ``%dipush``, else those of the typed rank, or rank 0."""
        if magic == "dipush":
            hidden = self._shell.user_ns_hidden
            return sorted(name for name in self._shell.user_ns if name not in hidden and not name.startswith("_"))
        if group is None or words[-1:] == ["as"]:
            return []
        ranks = [int(word) for word in words if word.isdecimal() and int(word) < group.world_size]
        return group.variable_names(token, ranks[0] if ranks else 0, ANSWER_SECONDS)


def _expected_arguments(
    actions: list[Action], options: dict[str, Action], words: list[str]
) -> list[tuple[Action, int]]:
    """Return the arguments that can take the next word, each with the number of values it has so far."""
    current, count, placed = None, 0, 0
    for word in words:
        if word in options:
            current, count = options[word], 0
        elif current is not None and _takes_more(current, count):
            count += 1
        else:
            placed += 1
    positional = [(action, placed) for action in actions if not action.option_strings]
    if current is None or not _takes_more(current, count):
        return [(action, placed) for action, _ in positional if action.nargs == "*" or not placed]
    return [(current, count), *(pair for pair in positional if count and pair[0].nargs == "*")]


def _takes_more(option: Action, count: int) -> bool:
    """Return whether `option` can take another value after `count` values."""
    return option.nargs == "+" or (option.nargs != 0 and count == 0)
