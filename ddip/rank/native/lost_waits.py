"""Waits in gloo that nobody would end: for a message that was half sent or half received when its connection broke.

gloo tells whoever waits on a broken connection, but for who waits for that message: this thread stays until the group's
timeout, half an hour. Of 130 ranks that were killed in an ``all_reduce`` of 4 MB, three left the other rank so (torch
2.15).

The system tells for which address a thread waits. If one of gloo's buffers lies there, which begins with the address of
its class's methods, the two that end such a wait are called; they are public in gloo, and torch has no way to them.
``tests/unit/test_private_names.py`` fails when a release changes their names.

Risk: another object of the same class at that address, which a collective of the user's waits for: it raises as if it
had been released. It is only looked for in ranks whose group was released.
Switch: ``DDIP_NATIVE_GLOO_WAITS``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import struct
from collections.abc import Callable, Collection
from pathlib import Path

import torch

from ddip.protocol import switches

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


def is_possible() -> bool:
    """Return whether this torch has what ends such a wait."""
    return _gloo() is not None


def waits() -> dict[int, int]:
    """The buffer that each thread waits for just now, by the number of the thread; none where it cannot be known."""
    found: dict[int, int] = {}
    gloo = _gloo() if switches.is_on(switches.GLOO_WAITS) else None
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
    call = Path(f"/proc/self/task/{thread}/syscall").read_bytes().split()
    return int(call[1], 16) if len(call) > 1 else 0


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
