"""Run a function on the main thread between two instructions of its Python code, with ``Py_AddPendingCall``.

``%dipull --now`` pauses the cell in this way, so that no operator writes to a tensor while it is copied. The profiler
ends one part of a long profile and begins the next, which torch allows on the main thread only.

Why nothing gentler: a trace function slows every line of the cell, and a signal would interrupt its system calls.
Risk: Python holds no reference to the pending object, and calls it wherever the main thread is between two
instructions, even in code of torch. So `Pause` keeps itself alive, and waits one step longer if a collective may have
begun but not ended.
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
"""Time that the main thread has to finish its current operation."""
DISTRIBUTED_FOLDER = f"{Path(torch.distributed.__file__).parent}{os.sep}"
"""Folder of the functions that begin a collective and wait for it in separate steps."""


def prepare_call(function: Callable[[FrameType], object]) -> Callable[[], None]:
    """Return a function that has the main thread call ``function(frame)`` once, with its current frame.

    `function` must not raise. Call this once per function and keep the result, since pending calls need it.
    """

    def call_function(_: Any) -> int:
        function(sys._getframe(1))
        return 0

    in_c = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(call_function)

    def request_call() -> None:
        ctypes.pythonapi.Py_AddPendingCall(in_c, None)

    return request_call


class Pause:
    """A pause of the main thread between two instructions, in which another thread copies variables.

    The pending call is ``PyObject_IsTrue`` of this object, the only suitable function of Python's C interface.
    """

    _queued: set[Pause] = set()
    """Pauses that the main thread has yet to reach, kept here because Python holds no reference to them."""

    def __init__(self, given_up: Callable[[], bool], seconds: float) -> None:
        """Prepare a pause of at most `seconds`, unless prolonged, or until `given_up` returns True."""
        self._is_given_up, self._process = given_up, os.getpid()
        self._lock = threading.Lock()
        self._is_reached, self._is_over = threading.Event(), threading.Event()
        self._waits_until = time.monotonic() + REACH_SECONDS + seconds
        self._is_waiting = False

    def begin(self) -> bool:
        """Wait until the main thread pauses; return False if it does not within `REACH_SECONDS`."""
        return switches.is_on(switches.PAUSE) and self._queue() and self._is_reached.wait(REACH_SECONDS)

    def _queue(self) -> bool:
        self._queued.add(self)
        call = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)
        if ctypes.pythonapi.Py_AddPendingCall(call, ctypes.py_object(self)):  # Python's queue is full
            self._queued.discard(self)
            return False
        return True

    def prolong(self) -> bool:
        """Remove the time limit of the pause; return False if the main thread has already continued."""
        with self._lock:
            self._waits_until = float("inf")
            return self._is_waiting

    def end(self) -> None:
        """Make the main thread continue."""
        self._is_over.set()

    def __bool__(self) -> bool:
        """Pause the calling main thread, or queue this again if a collective may have begun but not ended."""
        if os.getpid() != self._process or self._is_over.is_set():
            self._queued.discard(self)
        elif sys._getframe(1).f_code.co_filename.startswith(DISTRIBUTED_FOLDER):
            self._queue()
        else:
            self._queued.discard(self)
            self._wait()
        return False

    def _wait(self) -> None:
        self._is_waiting = True
        self._is_reached.set()
        try:
            while not (self._is_over.wait(0.05) or self._is_given_up()):
                with self._lock:
                    if time.monotonic() > self._waits_until:
                        break
        finally:
            self._is_waiting = False
