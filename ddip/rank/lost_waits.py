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
from collections.abc import Collection
from pathlib import Path
from typing import Any

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
def _library() -> Any:
    return ctypes.CDLL(str(LIBRARY))


@functools.cache
def _methods() -> int | None:
    """What a buffer begins with; None on a system, or with a torch, that has no such."""
    with contextlib.suppress(OSError, ValueError):
        return ctypes.addressof(ctypes.c_char.in_dll(_library(), METHODS)) + TO_METHODS
    return None


def waits() -> dict[int, int]:
    """The buffer that each thread waits for just now, by the number of the thread; none where it cannot be known."""
    found: dict[int, int] = {}
    if not os.path.exists("/proc/self/task") or _methods() is None:
        return found
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # it has ended, or waits for no address
                buffer = _buffer_around(_waits_for(thread), memory.fileno())
                if buffer is not None:
                    found[int(thread)] = buffer
    return found


def _waits_for(thread: str) -> int:
    """First argument of the call of the system that `thread` is in; 0 if it is in none."""
    call = Path(f"/proc/self/task/{thread}/syscall").read_text().split()
    return int(call[1], 16) if len(call) > 1 else 0


def _buffer_around(address: int, memory: int) -> int | None:
    """Where the buffer begins that `address` is in. Read as a file, memory that is not there raises OSError."""
    start = address - address % WORD.size - REACH
    if start <= 0:
        return None
    words = [word for (word,) in WORD.iter_unpack(os.pread(memory, REACH, start))]
    offsets = [number * WORD.size for number, word in enumerate(words) if word == _methods()]
    return start + offsets[-1] if offsets else None


def end(buffers: Collection[int]) -> None:
    """Have those who wait for one of `buffers` go on, as if the message were there."""
    for name in ENDING:
        function = _library()[name]
        function.argtypes, function.restype = [ctypes.c_void_p], None
        for buffer in buffers:
            function(buffer)
