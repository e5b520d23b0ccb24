"""Test the mechanisms of this package when a rank starts, and turn off those that fail in this process."""

from __future__ import annotations

import contextlib
import functools

from ddip.protocol import switches
from ddip.rank.native import lost_waits, sockets


@functools.cache
def turn_off_failing() -> None:
    """Test each mechanism that is on, once per process, and turn it off if it fails; takes about 2 ms."""
    tests = {
        switches.SOCKETS: sockets.can_shut_down,
        switches.LISTENERS: sockets.can_fence,
        switches.GLOO_WAITS: lost_waits.is_possible,
    }
    for name, works in tests.items():
        if switches.is_on(name):
            with contextlib.suppress(Exception):
                if works():
                    continue
            switches.turn_off(name)
