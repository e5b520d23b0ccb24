"""Call something on the main thread between two steps of its Python code: ``Py_AddPendingCall``.

A look at variables (``%dipull --now``) pauses the cell that way, so that no operator writes to a tensor while it is
copied. The profiler ends one part of a long profile and begins the next: torch takes both on the main thread only.

Why nothing gentler: a trace function slows every line of the cell, and a signal would interrupt its system calls.
Risk: Python holds no reference to what it is to call, and calls it wherever the main thread is between two
instructions, also within code of torch. So `Pause` keeps itself alive, and waits a step longer where a collective may
have begun and not ended.
Switches: ``DDIP_NATIVE_PAUSE``, ``DDIP_NATIVE_PROFILE``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed

from ddip.protocol import switches

REACH_SECONDS = 0.5
"""How long the main thread may take to come to the end of an operation."""
OF_COLLECTIVES = f"{Path(torch.distributed.__file__).parent}{os.sep}"
"""Folder of the code that begins a collective, and waits for it in another step."""


def prepare(function: Callable[[FrameType], object]) -> Callable[[], None]:
    """Return what asks the main thread to call ``function(frame)`` once; it must not raise, and lives for ever."""

    def call(_: Any) -> int:
        function(sys._getframe(1))
        return 0

    in_c = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call)

    def ask() -> None:
        ctypes.pythonapi.Py_AddPendingCall(in_c, None)

    return ask


class Pause:
    """Have the main thread wait between two steps of its cell, while this thread copies something.

    It is a pending call of Python's: ``PyObject_IsTrue`` of this object, the only function of Python's that fits.
    """

    _queued: set[Pause] = set()
    """Those that the main thread may still come to: Python has no reference."""

    def __init__(self, given_up: Callable[[], bool], seconds: float) -> None:
        """Wait for `seconds` at most, unless it is prolonged, and until `given_up` returns True."""
        self._given_up, self._process = given_up, os.getpid()
        self._lock = threading.Lock()
        self._reached, self._over = threading.Event(), threading.Event()
        self._waits_until = time.monotonic() + REACH_SECONDS + seconds
        self._is_waiting = False

    def begin(self) -> bool:
        """Wait for the main thread; returns False if it is inside an operation that takes long."""
        return switches.is_on(switches.PAUSE) and self._queue() and self._reached.wait(REACH_SECONDS)

    def _queue(self) -> bool:
        self._queued.add(self)
        call = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
        if ctypes.pythonapi.Py_AddPendingCall(call, ctypes.py_object(self)):  # it has too many
            self._queued.discard(self)
            return False
        return True

    def prolong(self) -> bool:
        """Have it wait until the end; returns False if it does not wait any more."""
        with self._lock:
            self._waits_until = float("inf")
            return self._is_waiting

    def end(self) -> None:
        """Let the main thread go on."""
        self._over.set()

    def __bool__(self) -> bool:
        """On the main thread: wait here, or ask to be called again where a collective may have begun and not ended."""
        if os.getpid() != self._process or self._over.is_set():
            self._queued.discard(self)
        elif sys._getframe(1).f_code.co_filename.startswith(OF_COLLECTIVES):
            self._queue()
        else:
            self._queued.discard(self)
            self._wait()
        return False

    def _wait(self) -> None:
        self._is_waiting = True
        self._reached.set()
        try:
            while not (self._over.wait(0.05) or self._given_up()):
                with self._lock:
                    if time.monotonic() > self._waits_until:
                        break
        finally:
            self._is_waiting = False
