"""Have the ranks changed the parameters of their DDPs equally often in a cell?

An error or a stop may come after the collectives of a step, when one rank has taken the step and another has not: none
of them waits, and all go on, with parameters that differ.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass
class _Counted:
    parameters: list[Tensor]
    before: int = 0
    """This cell, or the wrapper."""

    def now(self) -> int:
        """torch counts what is written into a tensor, but for those made in inference mode."""
        with contextlib.suppress(RuntimeError):
            return sum(parameter._version for parameter in self.parameters)
        return 0


_counted: weakref.WeakKeyDictionary[nn.Module, _Counted] = weakref.WeakKeyDictionary()


def watch(wrapper: nn.Module, module: nn.Module) -> None:
    """Count what is written into the parameters of `module`."""
    _counted[wrapper] = counted = _Counted([one for one in module.parameters() if one.requires_grad])
    counted.before = counted.now()


def forget(wrapper: nn.Module) -> None:
    """It is used no more."""
    _counted.pop(wrapper, None)


def begin_cell() -> None:
    """Count anew."""
    for counted in _counted.values():
        counted.before = counted.now()


def count() -> int:
    """In this cell."""
    return sum(counted.now() - counted.before for counted in _counted.values())
