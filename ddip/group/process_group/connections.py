"""Match the TCP connections between ranks by the two ends that each rank reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def has_unknown_connection(reports: Sequence[tuple[Sequence[tuple[Any, ...]], Sequence[int]]]) -> bool:
    """Return whether an unknown process has connected to a rank, at a port meant for other ranks.

    `reports`: the connections of each rank, as pairs of ends, and its ports for other ranks. gloo may have taken such a
    connection for a rank's, and the first collective would then wait indefinitely.
    """
    ends = {tuple(end) for connections, _ in reports for end in connections}
    return any(
        end[1] in ports and (*end[2:], *end[:2]) not in ends for connections, ports in reports for end in connections
    )


def between_ranks(tables: Mapping[int, list[tuple[Any, ...]]]) -> dict[int, list[tuple[Any, ...]]]:
    """Return the connections of each rank that lead to another rank.

    `tables`: the connections of each rank, as pairs of ends: own address and port, then the other's.
    """
    rank_of = {end: rank for rank, table in tables.items() for end in table}
    return {
        rank: [end for end in table if rank_of.get((*end[2:], *end[:2]), rank) != rank]
        for rank, table in tables.items()
    }
