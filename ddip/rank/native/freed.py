"""What C++ has freed: kept while a cell runs, and given back to the system when it has ended.

A training step on the CPU frees all that it has allocated, and the next one allocates it again. With glibc's defaults,
what is freed at the end of the heap goes back to the system, and comes again as pages that the kernel must clear first:
the order of a few blocks decides whether a step has ten page faults or ten thousand. A step of a small convolutional
network took 40 to 42 ms of CPU time with this, and 50 to 64 without.

Why nothing gentler: glibc has no other interface for it. Risk: a process that needs much memory for a moment gives it
back a little later. Without glibc it does nothing.
Switch: ``DDIP_NATIVE_HEAP``.
"""

from __future__ import annotations

import ctypes
import os
import time

from ddip.protocol import switches

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 1 << 30
"""That the end of the heap may keep while a cell runs."""
HEAP_BYTES = 1 << 25
"""Larger blocks come from the system, and go back there: the most to which glibc raises that limit by itself."""
SPARE_BYTES = 1 << 26
"""That may stay free between cells."""
LONG_SECONDS, REST = 0.02, 50
"""A heap of a hundred thousand holes takes longer to be looked at; it is left alone for so many times as long then."""
THEIRS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
"""With any of these in the environment the user has set the allocator."""


class _MallocInfo(ctypes.Structure):
    """glibc's ``struct mallinfo2``; `fordblks` is what is free in all its heaps, bytes."""

    _fields_ = [("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t)]


_kept = False  # has malloc been told to keep memory?
_left = 0
"""What was free after the last time: between blocks in use, where it stays, but has no pages any more."""
_not_before = 0.0  # seconds on time.monotonic
_libc = ctypes.CDLL(None)
_mallopt, _mallinfo, _malloc_trim = (getattr(_libc, name, None) for name in ("mallopt", "mallinfo2", "malloc_trim"))
"""None: another C library, or a glibc before 2.33."""
if _mallinfo is not None:
    _mallinfo.restype = _MallocInfo


def keep() -> None:
    """From now on; nothing happens where the user has set the allocator, it is not glibc's, or this is turned off."""
    global _kept
    is_ours = switches.is_on(switches.HEAP) and not any(name in os.environ for name in THEIRS)
    if is_ours and _mallopt is not None and _mallinfo is not None:
        _kept = bool(_mallopt(M_MMAP_THRESHOLD, HEAP_BYTES) and _mallopt(M_TRIM_THRESHOLD, KEPT_BYTES))


def give_back() -> None:
    """To the system, after a cell; where there is little more than the last time, the next one has it."""
    global _left, _not_before
    began = time.perf_counter()
    if not _kept or _mallinfo is None or began < _not_before:
        return
    free = _mallinfo().fordblks
    if free > _left + SPARE_BYTES:
        give_back_all()
        _left = _mallinfo().fordblks
    else:
        _left = min(_left, free)
    ended = time.perf_counter()
    _not_before = ended + REST * (ended - began) if ended - began > LONG_SECONDS else ended


def give_back_all() -> None:
    """Also where it is little."""
    if _malloc_trim is not None:
        _malloc_trim(0)
