"""torch's flight recorder: the collectives that this rank has begun last, those that C++ has begun too.

It is private (the public way to it writes files when a job hangs). torch has one for nccl and, in releases that record
gloo as well, one for all other backends. ``tests/unit/test_private_names.py`` fails when it changes.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

_distributed_c10d = getattr(torch._C, "_distributed_c10d", None)
DUMPS = ("_dump_fr_trace", "_dump_nccl_trace")


@dataclass(frozen=True)
class Entry:
    """A collective."""

    group: str
    """Its name in torch."""
    formed: int
    """torch's number of the group; of two that had one name, the second has the greater."""
    number: int
    """In its group, from 1; sends and receives are not counted."""
    op: str
    """As torch's traces call it, such as ``gloo:all_reduce``."""
    shapes: list[list[int]]
    dtypes: list[str]
    begun: int
    """On ``time.time_ns``."""
    is_done: bool
    record: tuple[int, int]
    """By which two entries of one rank are told apart; they grow."""

    @property
    def name(self) -> str:
        """Without the backend."""
        return self.op.rpartition(":")[2]


def is_there() -> bool:
    """Does this torch record other backends than nccl?"""
    return hasattr(_distributed_c10d, DUMPS[0])


def entries() -> list[Entry]:
    """The last 2000, in the order in which they were begun: it takes 20 ms.

    Those of gloo that are under way cannot be had alone.
    """
    found: list[Entry] = []
    for number, name in enumerate(DUMPS):
        dump = getattr(_distributed_c10d, name, None)
        with contextlib.suppress(Exception):  # it is there for a look
            found += _parse(number, pickle.loads(dump(True, False, False)) if dump is not None else {})
    return sorted(found, key=lambda entry: entry.begun)


def _parse(number: int, dumped: Any) -> list[Entry]:
    return [
        Entry(
            group=str(entry["process_group"][0]),
            formed=entry["pg_id"],
            number=entry["collective_seq_id"],
            op=entry["profiling_name"],
            shapes=_shapes(entry["input_sizes"]),
            dtypes=[_dtype(name) for name in entry["input_dtypes"]],
            begun=entry["time_created_ns"],
            is_done=bool(entry["retired"]) or entry["state"] == "completed",
            record=(number, entry["record_id"]),
        )
        for entry in dumped.get("entries", ())
        if not entry["is_p2p"]
    ]


def _shapes(sizes: Sequence[Sequence[int]]) -> list[list[int]]:
    return [list(map(int, size)) for size in sizes]


DTYPES = {"float": "float32", "double": "float64", "half": "float16", "long": "int64", "int": "int32", "short": "int16"}
"""What C++ calls them, and Python."""


def _dtype(name: str) -> str:
    lower = name.lower()
    known = {"char": "int8", "byte": "uint8", **DTYPES}
    return known.get(lower, lower)
