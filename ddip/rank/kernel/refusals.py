"""What is typed on ranks by mistake, and says what to do instead: ddip's own magics, and debuggers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.error import UsageError

OF_THE_NOTEBOOK = (
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
OWN_CELL = "is a magic of the notebook, and this cell runs on the ranks: type it in the first line of a cell of its own"
DIP = "is not a magic: the cell runs on the ranks anyway"
TWICE = "is there twice: leave out the second one; the cell runs on the ranks anyway"
NO_DEBUGGER = (
    "there is no debugger on ranks yet; %dipstack shows where each rank is, %dipull gets its variables, and a %%dip "
    "local cell runs in the notebook, where %debug works"
)
PROMPTS = ("(Pdb", "ipdb>", "(ipdb")


def install(shell: Any) -> None:
    """Give `shell` magics that refuse, and ``breakpoint()`` the same words."""
    for name in OF_THE_NOTEBOOK:
        shell.register_magic_function(_refusing(f"%{name} {OWN_CELL}"), "line", name)
    shell.register_magic_function(_refusing(f"%dip {DIP}"), "line", "dip")
    for kind, name in (("line", "%dip"), ("cell", "dip")):
        shell.register_magic_function(_refusing(f"%%dip {TWICE}"), kind, name)
    for kind in ("line", "cell"):
        shell.register_magic_function(_refusing(NO_DEBUGGER), kind, "debug")
    shell.register_magic_function(_refusing(NO_DEBUGGER), "line", "pdb")
    sys.breakpointhook = _refusing(NO_DEBUGGER)


def _refusing(text: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        __tracebackhide__ = True  # IPython leaves out this frame
        raise UsageError(text)

    return refuse


def is_debugger(prompt: str) -> bool:
    """Is `prompt` what a debugger asks with?"""
    return prompt.startswith(PROMPTS)
