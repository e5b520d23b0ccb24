"""Refuse ddip magics and debuggers in cells that run on ranks, and say what to type instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.error import UsageError

NOTEBOOK_MAGICS = (
    "makedip",
    "autodip",
    "dipush",
    "dipull",
    "dipshards",
    "dipcheck",
    "dipsync",
    "dipcells",
    "dipcell",
    "dipwait",
    "dipstop",
    "dipstack",
    "dipwatch",
    "dipstatus",
    "dipper",
)
OWN_CELL = "is a magic of the notebook, and this cell runs on the ranks: type it in the first line of a separate cell"
DIP = "is not a magic: the cell runs on the ranks anyway"
TWICE = "appears twice: leave out the second one; the cell runs on the ranks anyway"
NO_DEBUGGER = (
    "there is no debugger on ranks yet; %dipstack shows where each rank is, %dipull gets its variables, and a %%dip "
    "local cell runs in the notebook, where %debug works"
)
PROMPTS = ("(Pdb", "ipdb>", "(ipdb")


def install_refusals(shell: Any) -> None:
    """Register magics that raise UsageError in `shell`; ``breakpoint()`` also raises it."""
    for name in NOTEBOOK_MAGICS:
        shell.register_magic_function(_make_refusal(f"%{name} {OWN_CELL}"), "line", name)
    shell.register_magic_function(_make_refusal(f"%dip {DIP}"), "line", "dip")
    for kind, name in (("line", "%dip"), ("cell", "dip")):
        shell.register_magic_function(_make_refusal(f"%%dip {TWICE}"), kind, name)
    for kind in ("line", "cell"):
        shell.register_magic_function(_make_refusal(NO_DEBUGGER), kind, "debug")
    shell.register_magic_function(_make_refusal(NO_DEBUGGER), "line", "pdb")
    sys.breakpointhook = _make_refusal(NO_DEBUGGER)


def _make_refusal(text: str) -> Callable[..., NoReturn]:
    """Return a function that raises UsageError with this `text`, whatever its arguments."""

    def raise_refusal(*_: Any, **__: Any) -> NoReturn:
        __tracebackhide__ = True  # IPython omits this frame
        raise UsageError(text)

    return raise_refusal


def is_debugger(prompt: str) -> bool:
    """Return whether `prompt` is the prompt of a debugger."""
    return prompt.startswith(PROMPTS)
