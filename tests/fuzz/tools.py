"""Helpers of a fuzzer's program, printed above it so that it can be pasted unchanged."""

from __future__ import annotations

import os
import signal
import threading
import time

import ddip


class shown:
    """Run a line that can be interrupted, like a cell in a notebook, and print its error."""

    def __enter__(self):
        self.former = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.began = time.monotonic()

    def __exit__(self, kind, error, trace):
        signal.signal(signal.SIGINT, lambda *_: None)
        print(f"{time.monotonic() - self.began:.2f} s", "" if error is None else f"{type(error).__name__}: {error}")
        return isinstance(error, (Exception, KeyboardInterrupt))


class after:
    """Run a function that many seconds into the block, unless the block has ended by then."""

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
    """Press the stop button."""
    os.kill(os.getpid(), signal.SIGINT)


def kill(pid):
    """Send SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def freeze(pid, seconds):
    """Suspend a process for a while."""
    os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    os.kill(pid, signal.SIGCONT)


def rank(group, number):
    """Return the PID of a rank."""
    return group.members[number].pid


def controller(group):
    """Return the PID of the controller."""
    return group.cluster._ipp.controller.pid


def preload_process(group):
    """Return the PID of the process that ranks are forked from; the controller if they were spawned."""
    return group.cluster._warm.pid if group.cluster._warm else controller(group)


def wait_for_end_of_rank(group, number):
    """Wait until the group has noticed the end of a rank."""
    deadline = time.monotonic() + 60
    while number not in group.ranks.ended:
        assert time.monotonic() < deadline, f"the end of rank {number} is not noticed"
        time.sleep(0.01)


def wait_until_noticed(group, pid):
    """Wait until the group has noticed the end of this process, if it still belongs to the group."""
    for number, member in enumerate(group.members if group.alive else []):
        if member.pid == pid:
            wait_for_end_of_rank(group, number)


def wait_for_end_of_controller(group):
    """Wait until the group has noticed the end of its controller."""
    deadline = time.monotonic() + 60
    while not group.cluster._controller_exit:
        assert time.monotonic() < deadline, "the end of the controller is not noticed"
        time.sleep(0.01)


def wait_until_free(group):
    """Wait until every rank has ended the stopped cell, which may take seconds."""
    deadline = time.monotonic() + 90
    while True:
        try:
            return group.ensure_ready()
        except ddip.errors.GroupError as error:
            if "still run" not in str(error) or time.monotonic() > deadline:
                raise


class asking:
    """Ask the group from another thread for the length of the block."""

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
    """An object that calls `here` when pickled, and evaluates `there` when unpickled."""

    def __init__(self, there, here=lambda: None):
        self.there, self.here = there, here

    def __reduce__(self):
        self.here()
        return eval, (self.there,)


def deep(levels):
    """Return nested lists."""
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
    """Run an all_reduce over all ranks; return identity and variables of each."""
    group.run(PROOF.format(n=n, names=NAMES))
    answers = group.pull_all(["_proof"], range(group.world_size))[0]
    return [answer["_proof"] for answer in answers]
