"""Describe the ranks, the group and its cells as plain data, without waiting for running cells."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ddip.group import stopping
from ddip.group.cells.cell import Cell
from ddip.group.cells.cell_status import status_of
from ddip.group.members.placement import GroupSpec
from ddip.group.members.ranks import Ranks
from ddip.output.cells.cell_data import error_data
from ddip.output.tables.tables import RankInfo
from ddip.protocol import on_rank
from ddip.protocol.status_types import SCHEMA, DeviceStatus, GroupStatus, LastError, RankStatus, Status

ANSWER_SECONDS = 2.0
"""Time that a rank may take to report its figures."""
LISTED = 20
"""Number of cells to list, besides those that have not ended."""
STATES: dict[str, Any] = {"no answer": "no_answer", "GPU lost": "gpu_lost"}


def rank_infos(ranks: Ranks, spec: GroupSpec, button: stopping.Button) -> list[RankInfo]:
    """Ask all ranks for process, device, memory and activity, and return the answers in rank order.

    Waits at most two seconds for answers, or until `button` is pressed. A rank that has not answered by then is
    listed as ``ended``, ``stopped`` or ``no answer``.
    """
    ended, abandoned, everywhere = ranks.ended, ranks.busy, range(len(ranks.members))
    answers = ranks.call_on_control_channel(everywhere, on_rank.rank_figures(), seconds=ANSWER_SECONDS, button=button)
    infos = []
    for rank, member in enumerate(ranks.members):
        figures: Mapping[str, Any] = answers[rank] or {}
        state, doing = "ended" if rank in ended else "no answer", figures.get("doing") or abandoned.get(rank, "")
        if figures:
            state = "busy" if figures["busy"] else "GPU lost" if rank in ranks.gpu_lost else "idle"
        elif rank not in ended and (stopped := ranks.stopped_text(rank)):
            state, doing = "stopped", stopped
        gpu = figures.get("gpu") or {}
        infos.append(
            RankInfo(
                rank=rank,
                host=member.host,
                pid=member.pid,
                device=spec.device_name(rank),
                memory=figures.get("memory"),
                gpu_allocated=gpu.get("allocated"),
                gpu_reserved=gpu.get("reserved"),
                gpu_total=gpu.get("total"),
                state=state,
                seconds=figures.get("seconds"),
                doing=doing,
                busy_for=figures.get("busy_for"),
            )
        )
    return infos


def last_cells(cells: Sequence[Cell], most: int) -> list[Cell]:
    """Return the last `most` cells, and earlier ones that have not ended."""
    first = max(0, len(cells) - most)
    return [cell for number, cell in enumerate(cells) if number >= first or not cell.done.done()]


def describe_group(spec: GroupSpec, app: str | None, healthy: bool, infos: Sequence[RankInfo]) -> GroupStatus:
    """Return the status of the group as a whole; `healthy`: the state of its process group."""
    return {
        "size": spec.size,
        "backend": spec.backend,
        "healthy": healthy and not any(info.state in ("ended", "GPU lost") for info in infos),
        "app": app,
        "hosts": list(dict.fromkeys(info.host for info in infos)),
    }


def group_status(
    cells: Sequence[Cell],
    about: GroupStatus | None = None,
    infos: Sequence[RankInfo] = (),
    stuck: Collection[int] = (),
) -> Status:
    """Assemble the status from these parts; `stuck` ranks still run an abandoned cell.

    Without `about` and `infos`, the status is that of a group that has ended.
    """
    ranks = [_rank_status(info, _cell_on(info.rank, info.rank in stuck, cells)) for info in infos]
    errors: dict[int, LastError] = {}
    for cell in cells:
        for rank, error in cell.errors.items():
            errors[rank] = {**error_data(error), "cell": cell.number}
    return {
        "schema": SCHEMA,
        "group": about,
        "ranks": ranks,
        "devices": _device_statuses(ranks),
        "cells": [status_of(cell) for cell in cells],
        "errors": {str(rank): error for rank, error in sorted(errors.items())},
    }


def _rank_status(info: RankInfo, cell: int | None) -> RankStatus:
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
    """Return the number of the cell that `rank` is running; None if there is none."""
    for cell in reversed(cells):
        runs = cell.state == "running" or (stuck and cell.outcome in ("stuck", "interrupted", "timeout"))
        if runs and rank in cell.ranks and rank not in cell.replied:
            return cell.number
    return None


def _device_statuses(ranks: Sequence[RankStatus]) -> list[DeviceStatus]:
    devices: dict[tuple[str, str], DeviceStatus] = {}
    for rank in ranks:
        key = rank["host"], rank["device"]
        none: DeviceStatus = {"device": key[1], "host": key[0], "ranks": [], "memory_total": None}
        device = devices.setdefault(key, none)
        device["ranks"].append(rank["rank"])
        if rank["gpu"] is not None:
            device["memory_total"] = rank["gpu"]["total"]
    return list(devices.values())
