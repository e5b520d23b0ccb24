"""Bytes that several processes of one user on one host have in memory once."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType

MOST_PIECES = 1000
"""Of one call of the system's, which allows 1024."""

COPIED = 1 << 21
"""Bytes of what is copied out of such memory: it is not worth a mapping of its own, of which a process has so many."""


def portions(pieces: Iterable[memoryview], size: int) -> Iterator[list[memoryview]]:
    """What `pieces` hold, in portions of at most `size` bytes, and a full one wherever it can be."""
    portion: list[memoryview] = []
    room = size
    for piece in pieces:
        left = piece
        while left:
            portion.append(left[:room])
            room -= len(portion[-1])
            left = left[len(portion[-1]) :]
            if not room or len(portion) == MOST_PIECES:
                yield portion
                portion, room = [], size
    if portion:
        yield portion


class SharedBytes:
    """Written by one process, and read by others of the same user that are told its `path`.

    On Linux it is memory that has no name in any folder: the kernel takes it back when the last process that has it
    open ends, however that ends. It is not bound to the size of ``/dev/shm``, which is 64 MB in a container. Elsewhere
    it is a file in a `folder` that only this user can enter. Raises OSError where there is neither.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._named = False
        self._descriptor = self._without_a_name()
        if self._descriptor is not None:
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        elif folder is None:
            raise OSError("this system has no memory without a name")
        else:
            self._descriptor, self.path = tempfile.mkstemp(prefix="push-", dir=folder)  # 0600
            self._named = True

    @staticmethod
    def _without_a_name() -> int | None:
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
        """Add to what is there, which has at most `MOST_PIECES`."""
        assert self._descriptor is not None
        left = list(portion)
        while left:
            written = os.writev(self._descriptor, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = memoryview(left[0])[written:]

    def rewind(self) -> None:
        """Write from the beginning again, over what is there."""
        assert self._descriptor is not None
        os.lseek(self._descriptor, 0, os.SEEK_SET)

    def view(self) -> mmap.mmap:
        """All that is there; it stays when this is closed. Who changes it has a copy of what is changed."""
        assert self._descriptor is not None
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_COPY)

    def close(self) -> None:
        """Let go of it; who has a `view` keeps it. May be called twice."""
        if self._named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._named = None, False


def view(path: str) -> mmap.mmap:
    """The same of what another process has written, by the path that it told. Raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    finally:
        os.close(descriptor)
