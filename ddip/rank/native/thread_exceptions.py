"""Raise an exception in another thread.

    raise_in(thread)  -->  PyThreadState_SetAsyncExc  -->  the thread raises before its next step in Python code

Python 3.11 and 3.12 keep one flag for the whole process until a thread has raised such an exception. A thread that
sleeps in C code may never do so. Meanwhile the interpreter is slow, and does not get past the first line of a function
while it is traced: a cell with a debugger or coverage would hang. So the caller raises one in its own thread as well,
which clears the flag; Python sets it again when the other thread continues.

Why nothing gentler: the thread runs code of a user's object, such as ``__reduce__``, which looks at no flag.
Risk: the exception may come within a ``finally`` of that code.
Switch: ``DDIP_NATIVE_THREADS``.
"""

from __future__ import annotations

import ctypes
import threading

from ddip.protocol import switches


class _Clear(BaseException):
    """Raised and caught by the caller."""


def raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in the thread with this identifier before its next step in Python code; None: no longer.

    Not for the main thread to call: an interrupt would come between.
    """
    if not switches.is_on(switches.THREADS):
        return
    _set_exception(thread, error)
    try:
        _set_exception(threading.get_ident(), _Clear)
        while True:
            pass
    except _Clear:
        return


def _set_exception(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
