"""The connections between ranks, by what each rank tells of its ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def is_spoilt(made: Sequence[tuple[Sequence[tuple[Any, ...]], Sequence[int]]]) -> bool:
    """Has somebody else connected to a rank, by the connections of each rank, and the ports that were for other ranks?

    gloo may have taken that connection for the one of a rank: the first collective would wait for ever.
    """
    ends = {tuple(end) for connections, _ in made for end in connections}
    return any(
        end[1] in ports and (*end[2:], *end[:2]) not in ends for connections, ports in made for end in connections
    )


def shared(tables: Mapping[int, list[tuple[Any, ...]]]) -> dict[int, list[tuple[Any, ...]]]:
    """Of the connections of each rank, those with a rank at both ends, and not with the same one."""
    rank_of = {end: rank for rank, table in tables.items() for end in table}
    return {
        rank: [end for end in table if rank_of.get((*end[2:], *end[:2]), rank) != rank]
        for rank, table in tables.items()
    }
