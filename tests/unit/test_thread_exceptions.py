"""Exceptions raised in another thread; runs in a separate process, which may hang."""

from __future__ import annotations

import subprocess
import sys

import pytest

SLEEPS = """
import sys, threading
from ddip.rank.native.thread_exceptions import raise_in

class Stop(BaseException): pass

go, came = threading.Event(), []
def sleep():
    try:
        go.wait()
        came.append("nothing")
    except Stop:
        came.append("stop")
sleeper = threading.Thread(target=sleep)
sleeper.start()
stopper = threading.Thread(target=raise_in, args=(sleeper.ident, Stop))
stopper.start()
stopper.join()
traced = []
def trace(frame, event, arg):
    traced.append(frame.f_code.co_name)
def function(): return 1
sys.settrace(trace)
function()
sys.settrace(None)
go.set()
sleeper.join()
assert traced == ["function"] and came == ["stop"], (traced, came)
"""


@pytest.mark.native("threads")
def test_a_sleeping_thread_does_not_delay_traced_code() -> None:
    subprocess.run([sys.executable, "-c", SLEEPS], check=True, timeout=60)
