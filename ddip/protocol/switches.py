"""Environment variables that turn off the rank's mechanisms below public interfaces.

``DDIP_NATIVE=0`` in the environment of the notebook turns all of them off; ``DDIP_NATIVE_SOCKETS=0`` turns off one. A
rank also turns off each mechanism whose self-test fails when the rank starts.
"""

from __future__ import annotations

import os

SOCKETS, LISTENERS, GLOO_WAITS = "SOCKETS", "LISTENERS", "GLOO_WAITS"
PAUSE, THREADS, PROFILE, HEAP = "PAUSE", "THREADS", "PROFILE", "HEAP"
LOST = {
    SOCKETS: "ranks that wait for another in vain are not unblocked, %makedip --repair replaces them",
    LISTENERS: "other processes of this network can connect to gloo",
    GLOO_WAITS: "a rank that waits for the rest of a message waits until the timeout of its group",
    PAUSE: "%dipull --now refuses tensors that a cell keeps writing to, and its values may be of different moments",
    THREADS: "a snapshot or a traceback that takes too long continues beside the cells",
    PROFILE: "the profile of a long cell stays in memory until the cell ends",
    HEAP: "memory that a step on the CPU frees returns to the system, and the next step may take longer",
}
"""Consequence for the user of turning off each mechanism."""
_failed: set[str] = set()
"""Mechanisms whose self-test failed in this process."""


def find_variables() -> dict[str, str]:
    """Return the variables of this process that turn mechanisms off, for ranks on other hosts."""
    names = ["DDIP_NATIVE", *(f"DDIP_NATIVE_{name}" for name in LOST)]
    return {name: os.environ[name] for name in names if name in os.environ}


def is_on(name: str) -> bool:
    """Return whether the mechanism `name` may be used in this process."""
    return "0" not in (os.environ.get("DDIP_NATIVE"), os.environ.get(f"DDIP_NATIVE_{name}")) and name not in _failed


def turn_off(name: str) -> None:
    """Turn the mechanism `name` off in this process, after its self-test has failed."""
    _failed.add(name)


def find_off() -> list[str]:
    """Return the names of the mechanisms that are off."""
    return [name for name in LOST if not is_on(name)]
