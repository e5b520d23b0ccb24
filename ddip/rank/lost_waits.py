"""Waits in gloo that nobody would end: for a message that was half sent or half received when its connection broke.

gloo tells whoever waits on a broken connection, but for who waits for that message: this thread stays until the group's
timeout, half an hour. Of 130 ranks that were killed in an ``all_reduce`` of 4 MB, three left the other rank so (torch
2.15).

The system tells for which address a thread waits. If one of gloo's buffers lies there, which begins with the address of
its class's methods, the two that end such a wait are called; they are public in gloo, and torch has no way to them.
``tests/unit/test_private_names.py`` fails when a release changes their names.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

LIBRARY = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
METHODS = "_ZTVN4gloo9transport3tcp13UnboundBufferE"
ENDING = (
    "_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitSendEv",
    "_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitRecvEv",
)
WORD = struct.Struct("@N")
TO_METHODS = 2 * WORD.size
"""Where in the class's table an object points to."""
REACH = 176
"""Bytes from the beginning of a buffer to the end of what a thread can wait for in it."""


@functools.cache
def _gloo() -> tuple[int, list[Callable[[int], None]]] | None:
    """What a buffer begins with, and what ends a wait for it; None on a system, or with a torch, that has no such."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        methods = ctypes.addressof(ctypes.c_char.in_dll(library, METHODS)) + TO_METHODS
        ending = [getattr(library, name) for name in ENDING]
    except (OSError, ValueError, AttributeError):
        return None
    for function in ending:
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return methods, ending


def waits() -> dict[int, int]:
    """The buffer that each thread waits for just now, by the number of the thread; none where it cannot be known."""
    found: dict[int, int] = {}
    gloo = _gloo()
    if gloo is None or not os.path.exists("/proc/self/task"):
        return found
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended, or waits for no address
                buffer = _buffer_around(_waits_for(thread), gloo[0], memory.fileno())
                if buffer is not None:
                    found[int(thread)] = buffer
    return found


def _waits_for(thread: str) -> int:
    """First argument of the call of the system that `thread` is in; 0 if it is in none."""
    return _call_in(Path(f"/proc/self/task/{thread}/syscall").read_bytes())[1]


def is_known() -> bool:
    """Can it be known whether a thread waits for a message?"""
    return _gloo() is not None and os.path.exists("/proc/self/task")


class Waits:
    """Does the main thread of this process wait for other ranks? The files in which the system tells that stay open:
    to open them takes ten times as long as to read them."""

    def __init__(self, workers: Sequence[str]) -> None:
        """`workers`: numbers of the threads that do gloo's collectives. Raises OSError if they cannot be looked at."""
        self._files: list[int] = []
        try:
            for thread in (str(os.getpid()), *workers):
                self._files.append(os.open(f"/proc/self/task/{thread}/syscall", os.O_RDONLY))
            self._memory = os.open("/proc/self/mem", os.O_RDONLY)
        except BaseException:
            self.close()
            raise
        self._files.append(self._memory)

    def close(self) -> None:
        """Nobody looks any more."""
        files, self._files = self._files, []
        for file in files:
            os.close(file)

    def look(self) -> bool:
        """It does if it sleeps in the same call of the system as a worker that waits for a message just now, or waits
        for a message itself."""
        gloo, (main, *workers, _) = _gloo(), self._files
        with contextlib.suppress(OSError):  # a worker has ended
            call, address = _call_in(os.pread(main, 200, 0))
            if call < 0 or gloo is None:
                return False
            asleep = [its for number, its in map(_call_of_file, workers) if number == call]
            for waits_at in (address, *asleep):
                with contextlib.suppress(OSError):  # no memory is there: it waits for something else
                    if _buffer_around(waits_at, gloo[0], self._memory) is not None:
                        return True
        return False


def _call_of_file(file: int) -> tuple[int, int]:
    return _call_in(os.pread(file, 200, 0))


def _call_in(text: bytes) -> tuple[int, int]:
    """Number and first argument of the call of the system that a thread is in; (-1, 0) if it is in none."""
    call = text.split()
    return (int(call[0]), int(call[1], 16)) if len(call) > 1 else (-1, 0)


def _buffer_around(address: int, methods: int, memory: int) -> int | None:
    """Where the buffer begins that `address` is in: it points to `methods`.

    Read as a file, memory that is not there raises OSError.
    """
    start = address - address % WORD.size - REACH
    if start <= 0:
        return None
    words = [word for (word,) in WORD.iter_unpack(os.pread(memory, REACH, start))]
    offsets = [number * WORD.size for number, word in enumerate(words) if word == methods]
    return start + offsets[-1] if offsets else None


def end(buffers: Collection[int]) -> None:
    """Have those who wait for one of `buffers` go on, as if the message were there."""
    gloo = _gloo()
    for function in gloo[1] if gloo else ():
        for buffer in buffers:
            function(buffer)
