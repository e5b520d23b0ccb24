"""Refuse ddip magics in cells that run on ranks, except ``%diprun``, and say what to type instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from IPython.core.error import UsageError

from ddip.protocol.cell_messages import NOTEBOOK_MAGICS
from ddip.rank.kernel import script_runner

OWN_CELL = "is a magic of the notebook, and this cell runs on the ranks: type it in the first line of a separate cell"
DIP = "is not a magic: the cell runs on the ranks anyway"
TWICE = "appears twice: leave out the second one; the cell runs on the ranks anyway"


def install_refusals(shell: Any) -> None:
    """Register magics that raise UsageError in `shell`, and ``%diprun``."""
    shell.register_magic_function(script_runner.run_script, "line", "diprun")
    for name in NOTEBOOK_MAGICS:
        shell.register_magic_function(_make_refusal(f"%{name} {OWN_CELL}"), "line", name)
    shell.register_magic_function(_make_refusal(f"%dip {DIP}"), "line", "dip")
    for kind, name in (("line", "%dip"), ("cell", "dip")):
        shell.register_magic_function(_make_refusal(f"%%dip {TWICE}"), kind, name)


def _make_refusal(text: str) -> Callable[..., NoReturn]:
    """Return a function that raises UsageError with this `text`, whatever its arguments."""

    def raise_refusal(*_: Any, **__: Any) -> NoReturn:
        __tracebackhide__ = True  # IPython omits this frame
        raise UsageError(text)

    return raise_refusal
