"""Abort gloo waits that a broken connection left hanging, for a message that was half sent or half received.

When a connection breaks, gloo notifies the threads that wait on it, except for one that waits for such a message: it
waits until the group's timeout, half an hour. When one of two ranks was killed in an ``all_reduce`` of 4 MB, this
happened to the other rank 3 times in 130 (torch 2.15).

Linux shows the address on which a thread waits. If it lies in a gloo buffer, recognized by the vtable pointer at its
begin, the two functions that abort its waits are called. They are public in gloo, but torch does not expose them.
``tests/unit/test_private_names.py`` fails when a release changes their names.

An aborted wait returns as if the message had arrived, so the collective continues with undefined values. Therefore the
caller (``membership.py``) interrupts the cell first.

Risk: the address may lie in a buffer of another group, on which a collective of the user waits; that one then also
continues with undefined values, in a cell that is interrupted. Only ranks whose group has been released are searched.
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
VTABLE = "_ZTVN4gloo9transport3tcp13UnboundBufferE"
ABORT_FUNCTIONS = (
    "_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitSendEv",
    "_ZN4gloo9transport3tcp13UnboundBuffer13abortWaitRecvEv",
)
WORD = struct.Struct("@N")
VTABLE_OFFSET = 2 * WORD.size
"""Offset within the vtable to which an object's vtable pointer points."""
BUFFER_BYTES = 176
"""Size of the part of a buffer that holds the addresses on which a thread can wait."""


@functools.cache
def _find_gloo() -> tuple[int, list[Callable[[int], None]]] | None:
    """Return the vtable pointer of gloo's buffers and the functions that abort waits; None if missing."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        vtable = ctypes.addressof(ctypes.c_char.in_dll(library, VTABLE)) + VTABLE_OFFSET
        aborts = [getattr(library, name) for name in ABORT_FUNCTIONS]
    except (OSError, ValueError, AttributeError):
        return None
    for function in aborts:
        function.argtypes, function.restype = [ctypes.c_void_p], None
    return vtable, aborts


def is_possible() -> bool:
    """Return whether this torch has the functions that abort waits."""
    return _find_gloo() is not None


def find_waits() -> dict[int, int]:
    """Return the address of the gloo buffer on which each thread waits now, by thread ID.

    Threads that wait for something else are left out; the result is empty on systems other than Linux.
    """
    found: dict[int, int] = {}
    gloo = _find_gloo() if switches.is_on(switches.GLOO_WAITS) else None
    if gloo is None or not os.path.exists("/proc/self/task"):
        return found
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("rb", buffering=0) as memory:
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):  # the thread has ended, or does not wait on an address
                buffer = _find_buffer(_awaited_address(thread), gloo[0], memory.fileno())
                if buffer is not None:
                    found[int(thread)] = buffer
    return found


def _awaited_address(thread: str) -> int:
    """Return the first argument of the system call that `thread` is in; 0 if it is in none."""
    call = Path(f"/proc/self/task/{thread}/syscall").read_bytes().split()
    return int(call[1], 16) if len(call) > 1 else 0


def _find_buffer(address: int, vtable: int, memory: int) -> int | None:
    """Return the address of the gloo buffer that contains `address`, found by its pointer to `vtable`.

    Returns None if there is no such buffer. `memory` is the descriptor of ``/proc/self/mem``, where reading unmapped
    memory raises OSError.
    """
    start = address - address % WORD.size - BUFFER_BYTES
    if start <= 0:
        return None
    words = [word for (word,) in WORD.iter_unpack(os.pread(memory, BUFFER_BYTES, start))]
    offsets = [number * WORD.size for number, word in enumerate(words) if word == vtable]
    return start + offsets[-1] if offsets else None


def end_waits(buffers: Collection[int]) -> None:
    """Abort all waits on `buffers`, addresses from `find_waits`; interrupt the cell first.

    The waiting threads continue as if the message had arrived, with undefined values.
    """
    gloo = _find_gloo()
    for function in gloo[1] if gloo else ():
        for buffer in buffers:
            function(buffer)
