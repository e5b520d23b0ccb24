"""ddip: distributed data interactive parallel. A group of PyTorch processes beside a notebook."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from ddip.cluster import folder

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.call.torchddp import in_torchddp
    from ddip.cluster.reach import Reach
    from ddip.errors import (
        BadInput,
        CellError,
        CellInterrupted,
        CellTimeout,
        DdipError,
        DipUsageError,
        GroupError,
        LocalCellFailed,
        NoGroup,
        PartitionError,
        RankError,
        RequestFailed,
        RequestInterrupted,
        TransferError,
    )
    from ddip.group.group import Group
    from ddip.group.members.placement import HostRequest, Request
    from ddip.group.session import current_group
    from ddip.sharded.save_points import save_point
    from ddip.sharded.state import dist_state

__all__ = [
    "BadInput",
    "CellError",
    "CellInterrupted",
    "CellTimeout",
    "DdipError",
    "DipUsageError",
    "Group",
    "GroupError",
    "HostRequest",
    "LocalCellFailed",
    "NoGroup",
    "PartitionError",
    "RankError",
    "Reach",
    "Request",
    "RequestFailed",
    "RequestInterrupted",
    "TransferError",
    "current_group",
    "dist_state",
    "in_torchddp",
    "load_ipython_extension",
    "save_point",
    "unload_ipython_extension",
]
__version__ = "0.1.0"


NO_MAGICS_IN_MARIMO = (
    "marimo has no magics: use ddip.Group, as in `with ddip.Group(2) as group: group.run(...)`; docs/from_python.md "
    "describes it"
)


def _is_in_marimo() -> bool:
    """Return True in a cell of a marimo notebook; False in a program that only imports marimo."""
    return bool(getattr(sys.modules.get("marimo"), "running_in_notebook", bool)())


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics; IPython calls this for ``%load_ext ddip``. Raises BadInput on a rank, and in marimo."""
    if _is_in_marimo():
        from ddip.errors import BadInput

        raise BadInput(NO_MAGICS_IN_MARIMO)
    if getattr(shell, "is_rank", False):
        from ddip.errors import BadInput

        raise BadInput(
            "%load_ext ddip: this cell runs on the ranks, and ddip is loaded in the notebook only; type it in the "
            "first line of a separate cell"
        )
    folder.ensure_ready()
    with folder.left_out():
        from ddip.notebook import loading

    loading.load_extension(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics and end the group; IPython calls this for ``%unload_ext ddip``."""
    from ddip.notebook import loading

    loading.unload_extension(shell)


def __dir__() -> list[str]:
    """List the public names, which Tab offers after ``ddip.``."""
    return [*__all__, "__doc__", "__version__"]


_HOME = {
    "Group": "ddip.group.group",
    "HostRequest": "ddip.group.members.placement",
    "Reach": "ddip.cluster.reach",
    "Request": "ddip.group.members.placement",
    "current_group": "ddip.group.session",
    "dist_state": "ddip.sharded.state",
    "in_torchddp": "ddip.call.torchddp",
    "save_point": "ddip.sharded.save_points",
}
"""The module that defines each public name; names that are not listed are exceptions from ``ddip.errors``."""


def __getattr__(name: str) -> Any:
    """Import a public name on first use: an engine also imports this package, and needs none of them."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with folder.left_out():
        found = getattr(importlib.import_module(_HOME.get(name, "ddip.errors")), name)
    globals()[name] = found  # a loop may call ddip.save_point a million times
    return found


if _is_in_marimo():
    sys.stderr.write(f"ddip: {NO_MAGICS_IN_MARIMO}\n")
