"""What is known of a group and of its cells, as plain data for programs; and as text, for people."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from ddip.errors import ranks_text
from ddip.group.cell import Cell
from ddip.group.cell_status import status_of
from ddip.group.history import History
from ddip.group.placement import GroupSpec
from ddip.output.cell_data import error_data
from ddip.output.cells_table import cells_table
from ddip.output.tables import RankInfo, info_table
from ddip.protocol.status import SCHEMA, DeviceStatus, GroupStatus, LastError, RankStatus, Status

if TYPE_CHECKING:
    from ddip.group.group import Group

LISTED = 20
"""Cells that are listed, besides those that go on."""
STATES: dict[str, Any] = {"no answer": "no_answer", "GPU lost": "gpu_lost"}


def last(cells: Sequence[Cell], most: int) -> list[Cell]:
    """The last ones, and those that have not ended."""
    first = max(0, len(cells) - most)
    return [cell for number, cell in enumerate(cells) if number >= first or not cell.done.done()]


def about(spec: GroupSpec, app: str | None, healthy: bool, infos: Sequence[RankInfo]) -> GroupStatus:
    """The group of `spec` as a whole; `healthy`: as far as its process group is concerned."""
    return {
        "size": spec.size,
        "backend": spec.backend,
        "healthy": healthy and not any(info.state in ("ended", "GPU lost") for info in infos),
        "app": app,
        "hosts": list(dict.fromkeys(info.host for info in infos)),
    }


def status(
    cells: Sequence[Cell],
    about: GroupStatus | None = None,
    infos: Sequence[RankInfo] = (),
    stuck: Collection[int] = (),
) -> Status:
    """All of it, out of what is known; `stuck` ranks run a cell that was given up."""
    ranks = [_rank(info, _cell_on(info.rank, info.rank in stuck, cells)) for info in infos]
    errors: dict[int, LastError] = {}
    for cell in cells:
        for rank, error in cell.errors.items():
            errors[rank] = {**error_data(error), "cell": cell.number}
    return {
        "schema": SCHEMA,
        "group": about,
        "ranks": ranks,
        "devices": _devices(ranks),
        "cells": [status_of(cell) for cell in cells],
        "errors": {str(rank): error for rank, error in sorted(errors.items())},
    }


def _rank(info: RankInfo, cell: int | None) -> RankStatus:
    gpu = (info.gpu_allocated, info.gpu_reserved, info.gpu_total)
    figures = None if gpu == (None, None, None) else gpu
    return {
        "rank": info.rank,
        "host": info.host,
        "pid": info.pid,
        "device": info.device,
        "memory": info.memory,
        "gpu": figures and {"allocated": figures[0], "reserved": figures[1], "total": figures[2]},
        "state": STATES.get(info.state, info.state),
        "doing": info.doing,
        "busy_for": info.busy_for,
        "cell": None if info.state == "ended" else cell,
    }


def _cell_on(rank: int, stuck: bool, cells: Sequence[Cell]) -> int | None:
    """Number of the cell that `rank` runs."""
    for cell in reversed(cells):
        runs = cell.state == "running" or (stuck and cell.outcome in ("stuck", "interrupted", "timeout"))
        if runs and rank in cell.ranks and rank not in cell.replied:
            return cell.number
    return None


def _devices(ranks: Sequence[RankStatus]) -> list[DeviceStatus]:
    devices: dict[tuple[str, str], DeviceStatus] = {}
    for rank in ranks:
        key = rank["host"], rank["device"]
        none: DeviceStatus = {"device": key[1], "host": key[0], "ranks": [], "memory_total": None}
        device = devices.setdefault(key, none)
        device["ranks"].append(rank["rank"])
        if rank["gpu"] is not None:
            device["memory_total"] = rank["gpu"]["total"]
    return list(devices.values())


def of(group: Group | None, history: History) -> Status:
    """That of a `group` that lives, or of none, and of the last cells of `history`."""
    return status(last(list(history), LISTED)) if group is None else group.status()


def text_of(group: Group | None, history: History, most: int = LISTED) -> str:
    """The same for people."""
    cells = last(list(history), most)
    blocks = ["there is no group"]
    if group is not None:
        blocks = ["\n".join([group.describe().removeprefix("ddip: "), info_table(group.info()), *group.remarks()])]
    if cells:
        blocks.append(cells_table([cell.row() for cell in cells]))
    errors = {rank: (cell, error) for cell in cells for rank, error in cell.errors.items()}
    lines = [
        f"{ranks_text([rank])}, cell {cell.number}: {f'was blocked in {error.waited}' if error.waited else error}"
        for rank, (cell, error) in sorted(errors.items())
    ]
    if lines:
        blocks.append("\n".join(["last errors", *lines]))
    return "\n\n".join(blocks)
