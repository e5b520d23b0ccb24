"""ddip: distributed data interactive parallel. A group of PyTorch processes beside a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.errors import CellError
    from ddip.group import Group
    from ddip.torchddp import current_group, in_torchddp

__all__ = [
    "CellError",
    "Group",
    "current_group",
    "in_torchddp",
    "load_ipython_extension",
    "unload_ipython_extension",
]
__version__ = "0.1.0"


def load_ipython_extension(shell: InteractiveShell) -> None:
    """``%load_ext ddip``."""
    from ddip import magics

    magics.load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """``%unload_ext ddip``: ends the group."""
    from ddip import magics

    magics.unload(shell)


def __getattr__(name: str) -> Any:
    """Import the public names when they are first used: an engine imports this package too, and needs none."""
    if name == "Group":
        from ddip.group import Group

        return Group
    if name == "CellError":
        from ddip.errors import CellError

        return CellError
    if name in ("current_group", "in_torchddp"):
        from ddip import torchddp

        return getattr(torchddp, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
