"""The cell that this rank runs, as the notebook tells it: its name, who else runs it, and what can be shown."""

from __future__ import annotations

import torch.distributed as dist

_name = ""  # these three are what the functions below return
_ranks: tuple[int, ...] = ()  # see above
_rich = True  # see above


def begin(name: str, ranks: list[int], rich: bool) -> None:
    """A cell begins on `ranks`; its `name` is the same on all of them. `rich`: the notebook can show HTML."""
    global _name, _ranks, _rich
    _name, _ranks, _rich = name, tuple(ranks), rich


def name() -> str:
    """Of the cell; the same on every rank that runs it."""
    return _name


def ranks() -> tuple[int, ...]:
    """The ranks that run the cell."""
    return _ranks


def is_rich() -> bool:
    """Can the notebook show HTML? A terminal cannot."""
    return _rich


def is_everywhere() -> bool:
    """Is there a group, and does each of its ranks run the cell? Only then may the cell begin a collective."""
    return dist.is_initialized() and dist.get_world_size() == len(_ranks)
