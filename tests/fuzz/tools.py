"""The words of a fuzzer's program. They stand above it when it is printed, so that it can be pasted as it is."""

from __future__ import annotations

import os
import signal
import threading
import time

import ddip


class shown:
    """A line that can be interrupted, as a cell in a notebook, and whose error is printed."""

    def __enter__(self):
        self.former = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.began = time.monotonic()

    def __exit__(self, kind, error, trace):
        signal.signal(signal.SIGINT, lambda *_: None)
        print(f"{time.monotonic() - self.began:.2f} s", "" if error is None else f"{type(error).__name__}: {error}")
        return isinstance(error, (Exception, KeyboardInterrupt))


class after:
    """That many seconds into the block, do something; not if the block has ended before."""

    def __init__(self, seconds, do, *args):
        self.happened = False
        self.do, self.args = do, args
        self.timer = threading.Timer(seconds, self.act)

    def act(self):
        self.happened = True
        self.do(*self.args)

    def __enter__(self):
        self.timer.start()
        return self

    def __exit__(self, *_):
        self.timer.cancel()
        self.timer.join()


def press():
    """The stop button."""
    os.kill(os.getpid(), signal.SIGINT)


def kill(pid):
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def freeze(pid, seconds):
    """A process that gets no time for a while."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def rank(group, number):
    """Process of a rank."""
    return group.members[number].pid


def controller(group):
    """Process of the controller."""
    return group.cluster._ipp.controller.pid


def warm(group):
    """Process from which the ranks are forked; if they were spawned, the controller."""
    return group.cluster._warm.pid if group.cluster._warm else controller(group)


def gone(group, number):
    """Wait until the group knows that a rank has ended."""
    deadline = time.monotonic() + 60
    while number not in group.ranks.ended:
        assert time.monotonic() < deadline, f"the end of rank {number} is not noticed"
        time.sleep(0.01)


def known(group, pid):
    """Wait until the group knows that this process has ended, or is none of its own any more."""
    for number, member in enumerate(group.members if group.alive else []):
        if member.pid == pid:
            gone(group, number)


def over(group):
    """Wait until the group knows that its controller has ended."""
    deadline = time.monotonic() + 60
    while not group.cluster._controller_exit:
        assert time.monotonic() < deadline, "the end of the controller is not noticed"
        time.sleep(0.01)


def free(group):
    """Wait until every rank has ended the cell that was stopped; some take seconds for that."""
    deadline = time.monotonic() + 90
    while True:
        try:
            return group.ensure_ready()
        except ddip.errors.GroupError as error:
            if "still run" not in str(error) or time.monotonic() > deadline:
                raise


class asking:
    """Ask the group from another thread as long as the block lasts."""

    def __init__(self, group, what):
        self.group, self.what, self.over, self.error = group, what, threading.Event(), None
        self.thread = threading.Thread(target=self.ask)

    def ask(self):
        try:
            while not self.over.wait(0.02):
                answers = getattr(self.group, self.what)()
                assert len(answers) == self.group.world_size
        except BaseException as error:
            self.error = error

    def __enter__(self):
        self.thread.start()

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()
        if self.error is not None:
            raise self.error


class Evaluated:
    """An object that is unpickled by evaluating `there`, and pickled after `here` has been called."""

    def __init__(self, there, here=lambda: None):
        self.there, self.here = there, here

    def __reduce__(self):
        self.here()
        return eval, (self.there,)


def deep(levels):
    """A list in a list in a list."""
    made = []
    for _ in range(levels):
        made = [made]
    return made


PROOF = """
import os, psutil, torch, torch.distributed as dist
_y = torch.full((3,), float((rank + 1) * {n}))
dist.all_reduce(_y)
_me = psutil.Process()
_held = _me.num_fds(), _me.num_threads()
_proof = _me.pid, rank, world_size, _y.tolist(), {{_name: globals().get(_name) for _name in {names}}}, _held
"""
NAMES = "seen", "done", "v0", "v1", "v2"


def prove(group: ddip.Group, n: int):
    """An all_reduce over all ranks; what each of them is and has."""
    group.run(PROOF.format(n=n, names=NAMES))
    answers = group.pull_all(["_proof"], range(group.world_size))[0]
    return [answer["_proof"] for answer in answers]
