"""Export the parts of a recording with torch's profiler, and join them into one trace file."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist

LEVEL, SILENT = "KINETO_LOG_LEVEL", "99"


@contextlib.contextmanager
def suppress_messages() -> Iterator[None]:
    """Suppress warnings, which the cell may have turned into errors, and the messages of Kineto on stderr.

    Kineto reads its log level from the environment when it is first used.
    """
    level = os.environ.setdefault(LEVEL, SILENT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if level == SILENT:
            os.environ.pop(LEVEL, None)


def export_part(profiler: Any, folder: str | None = None) -> IO[bytes]:
    """Export a part's trace and return it as an open file that is already deleted.

    Kineto can only write to a path, so the file is first made in `folder`, or in the folder for temporary files.
    """
    if dist.is_initialized() and profiler._get_distributed_info() is None:
        info = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
        profiler.add_metadata_json("distributedInfo", json.dumps(info))
    with tempfile.TemporaryDirectory(prefix="ddip-profile-", dir=folder) as scratch, suppress_messages():
        path = Path(scratch) / "part.json"
        profiler.export_chrome_trace(str(path))
        return path.open("rb")


BEGIN, END = b'"traceEvents": [', b'"traceName"'


def write_trace(parts: list[IO[bytes]], to: IO[bytes]) -> None:
    """Write one compressed trace `to` a file: the first of `parts` with the events of the others.

    Closes `parts`.
    """
    with gzip.GzipFile(fileobj=to, mode="wb", compresslevel=4) as packed:
        tail = b""
        for number, part in enumerate(parts):
            begin, end, size = _events_in(part)
            part.seek(0 if number == 0 else begin)
            if number:
                packed.write(b",")
            _copy_bytes(part, packed, end - part.tell())
            tail = tail or part.read(size)
            part.close()
        packed.write(tail)


def _events_in(part: IO[bytes]) -> tuple[int, int, int]:
    """Return the offsets at which the events of a trace begin and end, and the trace's size.

    Raises OSError if the trace is incomplete: Kineto ignores errors of the file system.
    """
    size = part.seek(0, os.SEEK_END)
    part.seek(0)
    begin = part.read(1 << 20).find(BEGIN) + len(BEGIN)
    tail_offset = max(begin, size - (1 << 16))
    part.seek(tail_offset)
    tail = part.read()
    name_offset = tail.rfind(END)
    end = tail.rfind(b"]", 0, name_offset if name_offset >= 0 else len(tail))
    if begin < len(BEGIN) or end < 0:
        raise OSError("torch has written an incomplete trace; is the disk full?")
    return begin, tail_offset + end, size


def _copy_bytes(source: IO[bytes], to: Any, size: int) -> None:
    while size > 0:
        piece = source.read(min(size, 1 << 20))
        if not piece:
            return
        to.write(piece)
        size -= len(piece)
