"""Bytes that several processes of one user on one host have in memory once."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from pathlib import Path
from types import TracebackType


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

    def write(self, part: bytes | memoryview) -> None:
        """Add to what is there."""
        assert self._descriptor is not None
        left = memoryview(part)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def view(self) -> mmap.mmap:
        """All that is there, to be read; it stays when this is closed."""
        assert self._descriptor is not None
        return mmap.mmap(self._descriptor, 0, access=mmap.ACCESS_READ)

    def close(self) -> None:
        """Let go of it; who has a `view` keeps it. May be called twice."""
        if self._named:
            with contextlib.suppress(OSError):
                os.unlink(self.path)
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor, self._named = None, False


def view(path: str) -> mmap.mmap:
    """What another process has written, to be read, by the path that it told. Raises OSError or ValueError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
