"""What a stop in a loop over a Fabric's model leaves is one step, on every rank.

A stop may find all ranks at work, after the collectives of a step, when only some have taken it: no rank waits for
another then, and the group would stay, with parameters that differ. So where a cell fails in which an optimizer of a
Fabric has taken steps, the group is formed again, and its DDP wrappers go on with rank 0's parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ddip.apps import patches
from ddip.apps.lightning.packages import modules
from ddip.rank import current, process_group

_has_stepped = False
"""Has a Fabric's optimizer taken a step in this cell?"""


def apply() -> None:
    """See it take steps."""
    for module in modules("fabric.wrappers"):
        patches.patch(module._FabricOptimizer, "step", _noted(module._FabricOptimizer.step))


def _noted(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        global _has_stepped
        _has_stepped = True
        return step(self, *args, **kwargs)

    return take


def begin_cell() -> None:
    """No step has been taken yet."""
    global _has_stepped
    _has_stepped = False


def end_cell(error: BaseException | None) -> None:
    """Some ranks may be a step ahead of others."""
    if error is not None and _has_stepped and current.is_everywhere():
        process_group.give_up()
