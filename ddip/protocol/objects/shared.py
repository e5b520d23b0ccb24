"""Share one copy of bytes in memory between processes of one user on one host."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

MOST_PIECES = 1000
"""Maximum number of buffers per ``writev`` call; Linux allows 1024."""

COPIED = 1 << 21
"""Bytes up to which a reader copies the data instead of keeping a mapping: mappings per process are limited."""


def split_portions(pieces: Iterable[memoryview], size: int | Callable[[], int]) -> Iterator[list[memoryview]]:
    """Yield the bytes of `pieces` in portions of at most `size` bytes and `MOST_PIECES` buffers.

    Only the last portion is below both limits. A function `size` is called before each portion.
    """
    portion: list[memoryview] = []
    limit = size if callable(size) else lambda: size
    room = limit()
    for piece in pieces:
        left = piece
        while left:
            portion.append(left[:room])
            room -= len(portion[-1])
            left = left[len(portion[-1]) :]
            if not room or len(portion) == MOST_PIECES:
                yield portion
                portion, room = [], limit()
    if portion:
        yield portion


class SharedBytes:
    """Memory that one process writes, and that processes of the same user read by its `path`.

    On Linux it is an anonymous memory file (``memfd_create``): the kernel frees it when the last process that has it
    open ends, even after a crash. The size of ``/dev/shm``, 64 MB in a container, does not limit it. Other systems use
    a file in `folder`, which only this user can enter. Raises OSError if neither is available.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._named = False
        self._descriptor = self._make_memory_file()
        if self._descriptor is not None:
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        elif folder is None:
            raise OSError("this system has no memory without a name")
        else:
            self._descriptor, self.path = tempfile.mkstemp(prefix="push-", dir=folder)  # 0600
            self._named = True

    @staticmethod
    def _make_memory_file() -> int | None:
        if hasattr(os, "memfd_create"):
            with contextlib.suppress(OSError):  # a sandbox may forbid it
                return os.memfd_create("ddip-push")
        return None

    def __enter__(self) -> SharedBytes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, portion: Sequence[bytes | memoryview]) -> None:
        """Append `portion`, which has at most `MOST_PIECES` buffers."""
        assert self._descriptor is not None
        left = list(portion)
        while left:
            written = os.writev(self._descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = memoryview(left[0])[written:]

    def rewind(self) -> None:
        """Move to the beginning, so that the next `write` overwrites the contents."""
        assert self._descriptor is not None
        os.lseek(self._descriptor, 0, os.SEEK_SET)

    def view(self) -> mmap.mmap:
        """Map the contents copy-on-write: a change stays private to the mapping. The mapping outlives `close`."""
        assert self._descriptor is not None
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)

    def close(self) -> None:
        """Close the memory; mappings made by `map_file` stay valid. May be called twice."""
        if self._named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._named = None, False


def map_file(path: str) -> mmap.mmap:
    """Map what another process has written at `path`, copy-on-write.

    Raises OSError if the path cannot be opened or mapped, and ValueError if the file is empty.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
