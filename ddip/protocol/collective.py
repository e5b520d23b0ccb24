"""Describe groups and collectives in words."""

from __future__ import annotations

from collections.abc import Sequence

NAMED = 8
"""Maximum number of ranks that are listed for a group."""


def group_text(ranks: Sequence[int], world_size: int) -> str:
    """Name the group of `ranks`; the group of all ranks is called the default group.

    >>> group_text([0, 2], 4)
    'the group of ranks 0, 2'
    """
    if len(ranks) == world_size:
        return "the default group"
    listed = ", ".join(map(str, ranks[:NAMED]))
    return f"the group of ranks {listed}{f' and {len(ranks) - NAMED} more' if len(ranks) > NAMED else ''}"


def kind_text(op: str, shapes: Sequence[Sequence[int]], dtype: str) -> str:
    """Describe a collective by operation, first shape and dtype, such as ``all_reduce of (4,) float32``.

    >>> kind_text("all_gather", [[2, 3], [2, 3]], "int64")
    'all_gather of (2, 3) and 1 more int64'
    """
    if not shapes:
        return op
    more = f" and {len(shapes) - 1} more" if len(shapes) > 1 else ""
    return f"{op} of {tuple(shapes[0])}{more} {dtype}".rstrip()
