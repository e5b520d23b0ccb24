"""Raise an exception in another thread.

    raise_in(thread)  -->  PyThreadState_SetAsyncExc  -->  the thread raises before its next instruction in Python code

Python 3.11 and 3.12 set one flag for the whole process until some thread has raised such an exception. A thread that
sleeps in C code may never do so. As long as the flag is set, the interpreter is slow, and a traced function does not
get past its first line: a cell under a debugger or coverage would hang. So the caller also raises an exception in its
own thread, which clears the flag; Python sets it again when the other thread continues.

Why nothing gentler: the thread runs code of a user's object, such as ``__reduce__``, which does not check any flag.
Risk: the exception may interrupt a ``finally`` block of that code.
Switch: ``DDIP_NATIVE_THREADS``.
"""

from __future__ import annotations

import ctypes
import threading

from ddip.protocol import switches


class _Clear(BaseException):
    """An exception that the caller of `raise_in` raises in its own thread and catches."""


def raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Raise `error` in the thread with this identifier before its next instruction in Python code.

    None withdraws an exception that has not been raised yet. Do not call this from the main thread, where an interrupt
    could come between the two steps.
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
