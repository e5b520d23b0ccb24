"""Use an app in a script of ``%dipexport`` that torchrun starts, so that its cells train as they did in the session."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType

import torch
import torch.distributed as dist

from ddip import apps
from ddip.rank.runtime import current
from ddip.rank.runtime.gpu import gpu

_app: ModuleType | None = None  # set by `use_app`
_in_cell = False  # True from the first `begin_cell`


def use_app(name: str, device: torch.device) -> None:
    """Prepare the app `name` in this process of the group, as ``%makedip -a`` prepares it on a rank.

    Raises BadInput if the app does not exist, or its framework is not installed.
    """
    global _app
    _app = importlib.import_module(apps.find_module(name))
    gpu.use(device)
    current.begin_cell("start", [*range(dist.get_world_size())], False, None)
    _call_if_defined("prepare")


def begin_cell(number: int, ranks: Sequence[int] = (), part: int = 1) -> None:
    """Prepare this process for the code of cell `number`, as the session did on `ranks`; empty means all.

    `part`: number of the part, if the cell has run code on different ranks.
    """
    global _in_cell
    if _in_cell:
        _call_if_defined("end_cell", None)
    _in_cell = True
    current.begin_cell(f"cell {number}.{part}", [*(ranks or range(dist.get_world_size()))], False, None)
    _call_if_defined("begin_cell")


def _call_if_defined(function: str, *args: object) -> None:
    if hasattr(_app, function):
        getattr(_app, function)(*args)
