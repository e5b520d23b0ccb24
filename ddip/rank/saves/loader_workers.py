"""Let a loaded `DataLoader` start its persistent workers again without another random number.

The first iterator of a loader draws a seed for its workers. With persistent workers, later epochs draw none. So a
loader whose workers ran when it was saved undoes the draw of its next iterator, after the new workers have their seed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader, dataloader

from ddip.protocol import compat_torch

LOST = "they start again, and draw other random numbers, such as for augmentations; those of the rank continue"
"""Reason why the workers of a loader are not loaded."""


class EndedWorkers:
    """Stands for the iterator of a loader until ``DataLoader.__iter__`` resets it for the next epoch."""

    def _reset(self, loader: Any) -> None:
        """Replace this object in `loader` by a new iterator with new workers."""
        generator = torch.default_generator if loader.generator is None else loader.generator
        before = generator.get_state()
        iterator: Any = object.__new__(dataloader._MultiProcessingDataLoaderIter)

        def reset_first(loader: Any, first_iter: bool) -> None:
            del iterator._reset
            generator.set_state(before)
            iterator._reset(loader, first_iter)

        iterator._reset = reset_first  # called last by __init__, before the sampler draws
        iterator.__init__(loader)
        loader._iterator = iterator


def has_persistent_workers(loader: DataLoader[Any]) -> bool:
    """Return whether the next epoch of `loader` would use the workers of the last one."""
    if not compat_torch.is_on(compat_torch.PERSISTENT_WORKERS):
        return False
    return isinstance(vars(loader).get("_iterator"), (EndedWorkers, dataloader._MultiProcessingDataLoaderIter))
