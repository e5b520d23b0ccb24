"""The files of torch's profiler: a part of a recording, and all parts as one trace."""

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
def quiet() -> Iterator[None]:
    """The cell may have made errors of warnings; and Kineto writes to stderr when it starts and stops, unless the
    environment says that it is not to, before it is used."""
    told = os.environ.setdefault(LEVEL, SILENT)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        if told == SILENT:
            os.environ.pop(LEVEL, None)


def exported(profiler: Any, folder: str | None = None) -> IO[bytes]:
    """A part, as the profiler writes it, in a file that is in no folder any more; until then, in this one, or where
    temporary files are. Kineto writes to no open file."""
    if dist.is_initialized() and profiler._get_distributed_info() is None:
        info = {"backend": dist.get_backend(), "rank": dist.get_rank(), "world_size": dist.get_world_size()}
        profiler.add_metadata_json("distributedInfo", json.dumps(info))
    with tempfile.TemporaryDirectory(prefix="ddip-profile-", dir=folder) as scratch, quiet():
        path = Path(scratch) / "part.json"
        profiler.export_chrome_trace(str(path))
        return path.open("rb")


BEGIN, END = b'"traceEvents": [', b'"traceName"'


def write(parts: list[IO[bytes]], to: IO[bytes]) -> None:
    """The traces of all parts as one, compressed: the first, with the events of the others."""
    with gzip.GzipFile(fileobj=to, mode="wb", compresslevel=4) as packed:
        tail = b""
        for number, part in enumerate(parts):
            begin, end, size = _events_in(part)
            part.seek(0 if number == 0 else begin)
            if number:
                packed.write(b",")
            _copy(part, packed, end - part.tell())
            tail = tail or part.read(size)
            part.close()
        packed.write(tail)


def _events_in(part: IO[bytes]) -> tuple[int, int, int]:
    """Where the events of a trace begin and end, and its size."""
    size = part.seek(0, os.SEEK_END)
    part.seek(0)
    begin = part.read(1 << 20).index(BEGIN) + len(BEGIN)
    from_end = max(begin, size - (1 << 16))
    part.seek(from_end)
    tail = part.read()
    named = tail.rfind(END)
    return begin, from_end + tail.rindex(b"]", 0, named if named >= 0 else len(tail)), size


def _copy(source: IO[bytes], to: Any, size: int) -> None:
    while size > 0:
        piece = source.read(min(size, 1 << 20))
        if not piece:
            return
        to.write(piece)
        size -= len(piece)
