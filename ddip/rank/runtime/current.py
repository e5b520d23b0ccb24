"""Facts about the cell that this rank runs, as sent by the notebook: name, ranks, HTML and the script of %diprun."""

from __future__ import annotations

import torch.distributed as dist

from ddip.protocol.cell_messages import ScriptFile

_name = ""  # returned by `cell_name`
_ranks: tuple[int, ...] = ()  # returned by `cell_ranks`
_rich = True  # returned by `is_rich`
_script: ScriptFile | None = None  # returned by `script_file`


def begin_cell(name: str, ranks: list[int], rich: bool, script: ScriptFile | None) -> None:
    """Store the facts about the cell `name` that begins on `ranks`.

    `rich`: the notebook can show HTML; `script`: the script that the cell runs, if it is a ``%diprun`` cell.
    """
    global _name, _ranks, _rich, _script
    _name, _ranks, _rich, _script = name, tuple(ranks), rich, script


def cell_name() -> str:
    """Return the name of the cell, which is the same on every rank that runs it."""
    return _name


def cell_ranks() -> tuple[int, ...]:
    """Return the ranks that run the current cell; between cells, those of the last one."""
    return _ranks


def script_file() -> ScriptFile | None:
    """Return the script that the cell runs; None if it is not a ``%diprun`` cell."""
    return _script


def is_rich() -> bool:
    """Return whether the notebook can show HTML, which a terminal cannot."""
    return _rich


def is_everywhere() -> bool:
    """Return whether there is a group and all its ranks run the cell, so that it may begin a collective."""
    return dist.is_initialized() and dist.get_world_size() == len(_ranks)
