"""What the warm process does with its memory before it forks."""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest

from ddip.cluster.preload_server import HUGE_PAGE, Warm, scattered_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the warm process is Linux's")


def test_memory_that_is_put_into_large_pages_has_what_it_had() -> None:
    with mmap.mmap(-1, 3 * HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        for place in range(0, len(memory), 4096):
            memory[place : place + 8] = place.to_bytes(8, "little")
        begin = ctypes.addressof(held := ctypes.c_char.from_buffer(memory))
        pieces = [piece for piece in scattered_memory() if begin <= piece <= begin + len(memory) - HUGE_PAGE]
        assert len(pieces) >= 2 and not any(piece % HUGE_PAGE for piece in pieces)
        for piece in pieces:
            Warm.gather(piece)
        del held
        for place in range(0, len(memory), 4096):
            assert memory[place : place + 8] == place.to_bytes(8, "little")
