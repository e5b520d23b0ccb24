"""Make malloc keep freed memory while a cell runs, and return it to the system when the cell has ended.

A training step on the CPU frees all memory that it has allocated, and the next step allocates it again. With glibc's
defaults, memory freed at the end of the heap returns to the system and comes back as pages that the kernel must clear
first, so the order of a few blocks decides whether a step has ten page faults or ten thousand. A step of a small
convolutional network took 40 to 42 ms of CPU time with this mechanism, and 50 to 64 ms without.

Why nothing gentler: glibc has no other interface for it. Risk: a process that briefly needs much memory returns it a
little later. With other C libraries, this file does nothing.
Switch: ``DDIP_NATIVE_HEAP``.
"""

from __future__ import annotations

import ctypes
import os
import time

from ddip.protocol import switches

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
"""Free memory that may stay at the end of the heap while a cell runs."""
HEAP_BYTES = 1 << 25
"""Size up to which blocks come from the heap; the maximum to which glibc raises this threshold by itself."""
SPARE_BYTES = 1 << 26
"""Additional free memory that may stay between cells."""
LONG_SECONDS, PAUSE_FACTOR = 0.02, 50
"""Duration of a look above which the next one waits for this many times as long. A heap with a hundred thousand holes
takes longer."""
USER_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""Environment variables by which a user configures the allocator."""


class _MallocInfo(ctypes.Structure):
    """The ``struct mallinfo2`` of glibc; `fordblks` is the free memory in all its heaps, bytes."""

    _fields_ = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


_keeps_memory = False
"""True once malloc is configured to keep freed memory."""
_untrimmable_bytes = 0
"""Free memory after the last trim: it lies between blocks in use and no longer occupies pages."""
_next_look = 0.0
"""Time before which `give_back` does nothing, on ``time.perf_counter``."""
_libc = ctypes.CDLL(None)
_mallopt, _mallinfo, _malloc_trim = (getattr(_libc, name, None) for name in ("mallopt", "mallinfo2", "malloc_trim"))
"""Functions of glibc; None with another C library, or with glibc before 2.33."""
if _mallinfo is not None:
    _mallinfo.restype = _MallocInfo


def keep_freed_memory() -> None:
    """Make glibc's malloc keep freed memory instead of returning it to the system.

    It does nothing if the user has configured malloc or turned this feature off.
    """
    global _keeps_memory
    is_default = switches.is_on(switches.HEAP) and not any(name in os.environ for name in USER_SETTINGS)
    if is_default and _mallopt is not None and _mallinfo is not None:
        _keeps_memory = bool(_mallopt(M_MMAP_THRESHOLD, HEAP_BYTES) and _mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def give_back() -> None:
    """Return free memory to the system after a cell, if it has grown by `SPARE_BYTES` since the last trim."""
    global _untrimmable_bytes, _next_look
    began = time.perf_counter()
    if not _keeps_memory or _mallinfo is None or began < _next_look:
        return
    free = _mallinfo().fordblks
    if free > _untrimmable_bytes + SPARE_BYTES:
        give_back_all()
        _untrimmable_bytes = _mallinfo().fordblks
    else:
        _untrimmable_bytes = min(_untrimmable_bytes, free)
    ended = time.perf_counter()
    _next_look = ended + PAUSE_FACTOR * (ended - began) if ended - began > LONG_SECONDS else ended


def give_back_all() -> None:
    """Return all free memory to the system, even if it is little."""
    if _malloc_trim is not None:
        _malloc_trim(0)
