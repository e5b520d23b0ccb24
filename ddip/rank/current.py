"""The cell that this rank runs, as the notebook tells it: its name, and who else runs it."""

from __future__ import annotations

import torch.distributed as dist

_name = ""
_ranks: tuple[int, ...] = ()


def begin(name: str, ranks: list[int]) -> None:
    """A cell begins on `ranks`; its `name` is the same on all of them."""
    global _name, _ranks
    _name, _ranks = name, tuple(ranks)


def name() -> str:
    """Of the cell; the same on every rank that runs it."""
    return _name


def ranks() -> tuple[int, ...]:
    """The ranks that run the cell."""
    return _ranks


def is_everywhere() -> bool:
    """Is there a group, and does each of its ranks run the cell? Only then may the cell begin a collective."""
    return dist.is_initialized() and dist.get_world_size() == len(_ranks)
