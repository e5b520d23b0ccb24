"""Read torch's flight recorder: the latest collectives of this rank, including those begun by C++.

The recorder has no public interface, except for one that writes files when a job hangs. torch has one recorder for nccl
and, in releases that also record gloo, one for all other backends. ``tests/unit/test_private_names.py`` fails when it
changes.
"""

from __future__ import annotations

import contextlib
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from packaging.version import Version

_distributed_c10d = getattr(torch._C, "_distributed_c10d", None)
DUMP_FUNCTIONS = ("_dump_fr_trace", "_dump_nccl_trace")
DTYPES = {
    "byte": "uint8",
    "char": "int8",
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "int": "int32",
    "long": "int64",
    "short": "int16",
}
"""Python's names of dtypes, by their names in C++."""


@dataclass(frozen=True)
class Entry:
    """A collective that this rank has begun."""

    group: str
    """The group's name in torch."""
    formed: int
    """torch's number of the group; if two groups had the same name, the later one has the greater number."""
    number: int
    """Number in its group, from 1; sends and receives are not counted."""
    op: str
    """Operation as in torch's traces, such as ``gloo:all_reduce``."""
    shapes: list[list[int]]
    dtypes: list[str]
    begun: int
    """Time at which it began, on ``time.time_ns``."""
    is_done: bool
    record: tuple[int, int]
    """Recorder and number of the record, which identify an entry of one rank; the number grows."""

    @property
    def name(self) -> str:
        """Operation without the backend."""
        return self.op.rpartition(":")[2]


def is_available() -> bool:
    """Return whether torch's flight recorder also records backends other than nccl: since torch 2.11.

    torch 2.10 has the function, but it returns nothing.
    """
    return hasattr(_distributed_c10d, DUMP_FUNCTIONS[0]) and Version(torch.__version__) >= Version("2.11")


def read_entries() -> list[Entry]:
    """Return the last 2000 collectives, in the order in which they were begun; takes 20 ms.

    gloo's recorder cannot return unfinished collectives only.
    """
    found: list[Entry] = []
    for number, name in enumerate(DUMP_FUNCTIONS):
        dump = getattr(_distributed_c10d, name, None)
        with contextlib.suppress(Exception):  # entries are optional information
            found += _parse_dump(number, pickle.loads(dump(True, False, False)) if dump is not None else {})
    return sorted(found, key=lambda entry: entry.begun)


def _parse_dump(number: int, dumped: Any) -> list[Entry]:
    return [
        Entry(
            group=str(entry["process_group"][0]),
            formed=entry["pg_id"],
            number=entry["collective_seq_id"],
            op=entry["profiling_name"],
            shapes=[list(map(int, size)) for size in entry["input_sizes"]],
            dtypes=[DTYPES.get(name.lower(), name.lower()) for name in entry["input_dtypes"]],
            begun=entry["time_created_ns"],
            is_done=bool(entry["retired"]) or entry["state"] == "completed",
            record=(number, entry["record_id"]),
        )
        for entry in dumped.get("entries", ())
        if not entry["is_p2p"]
    ]
