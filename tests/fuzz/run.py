"""A run of the fuzzer: stretches of steps on groups, figures, and what is left of a failure when it is shrunk."""

from __future__ import annotations

import collections
import contextlib
import ctypes
import gc
import inspect
import logging
import os
import resource
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

from ddip.cluster.processes import preload_client
from tests.cluster import leftovers

from . import steps, tools
from .model import Broken
from .player import Player
from .steps import Step

STRETCH = 50
"""Steps of some families on one group."""
TRIES = 2
"""How often a shorter sequence may succeed before it is believed to: much of what fails depends on the moment."""
SETTLED = 3
"""Stretches after which this process has opened all that it opens once."""
MORE = (30, 10, 150.0)
"""Descriptors, threads, megabytes that it may hold more at the end."""
FOLDER = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
"""For IPython and run folders; IPython writes to it until this process ends."""


class LastLines(logging.Handler):
    """The last of what a logger has to say; it is for whoever looks for the cause of a failure."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._lines: collections.deque[str] = collections.deque(maxlen=20)
        logger = logging.getLogger(name)
        logger.setLevel(logging.DEBUG)
        logger.addHandler(self)
        logger.propagate = False

    def emit(self, record: logging.LogRecord) -> None:
        at = time.strftime("%H:%M:%S", time.localtime(record.created))
        self._lines.append(f"{at}.{record.msecs:03.0f} {record.getMessage()}")

    def text(self) -> str:
        """All lines."""
        return "\n".join(self._lines)


class Run:
    """So many steps, from a seed."""

    def __init__(
        self, seed: int, count: int, stretch: int = 0, shrink: float = 120, go_on: bool = False, only: str | None = None
    ) -> None:
        self.seed, self.count, self.stretch, self.shrink_seconds, self.go_on = seed, count, stretch, shrink, go_on
        self.only = only
        self.played = 0
        self.failures = 0
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        self._log = LastLines("ddip")
        self.held: list[tuple[int, int, float]] = []
        self.has_torch = False
        """Has this process imported it?"""

    def all(self) -> int:
        """Play them; returns the exit code."""
        self._prepare()
        print(f"seed {self.seed}, {self.count} steps", flush=True)
        began = time.monotonic()
        folder = FOLDER.name
        os.environ["IPYTHONDIR"], os.environ["TMPDIR"] = f"{folder}/ipython", f"{folder}/tmp"
        os.environ.pop("XDG_RUNTIME_DIR", None)
        with leftovers.no_shared_memory_left():
            Path(os.environ["TMPDIR"]).mkdir()
            tempfile.tempdir = None
            try:
                for drawn in self._stretches():
                    self._play_stretch(drawn)
                    self.stretch += 1
                    if self.failures and not self.go_on:
                        break
                self._table(time.monotonic() - began)
                leftovers.assert_nothing_left(os.getpid())
            finally:
                preload_client.end()
            assert leftovers.family_of(os.getpid()) == []
            assert leftovers.run_folders() == []
        self._check_held()
        return 1 if self.failures else 0

    def _check_held(self) -> None:
        """What this process holds between groups does not grow; the first stretches open what is opened once."""
        if len(self.held) > SETTLED:
            before, after = self.held[SETTLED], self.held[-1]
            if any(a > b + more for b, a, more in zip(before, after, MORE, strict=True)):
                self.failures += 1
                print(f"FAILED: the notebook's process holds more and more: {self.held}")

    def _prepare(self) -> None:
        signal.signal(signal.SIGINT, lambda *_: None)  # one that comes between two lines is void, as in a kernel
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    # -- a stretch

    def _stretches(self) -> Iterator[Sequence[Step]]:
        if self.only is not None:
            for step in steps.each(self.seed, self.only):
                yield [step]
        else:
            while self.played < self.count:
                yield steps.draw(f"{self.seed} {self.stretch}", min(STRETCH, self.count - self.played))

    def _play_stretch(self, drawn: Sequence[Step]) -> None:
        size = 2 + self.stretch % 3
        player: Player | None = None
        at = 0
        try:
            player = Player(size)
            for step in drawn:
                began = time.monotonic()
                player.play(step)
                self._note(step, time.monotonic() - began)
                at += 1
            player.end()
        except Broken as broken:
            self.failures += 1
            at = min(at, len(drawn) - 1)  # it may have been the end of the group
            print(f"\nFAILED: seed {self.seed}, stretch {self.stretch}, step {at}: {drawn[at]}\n{broken}", flush=True)
            print(f"the last of ddip's log:\n{self._log.text()}")
            print(f"before that was said:\n{player.heard.getvalue()[-2000:] if player else ''}")
            self._note(drawn[at], 0.0)
            _give_up(player)
            self._report(size, drawn[: at + 1], player.program if player else [])
        finally:
            _give_up(player)
        me = psutil.Process()
        if "torch" in sys.modules and not self.has_torch:  # unpickling brought it here: 500 MB
            self.has_torch = True
            self.held.clear()
        gc.collect()
        with contextlib.suppress(AttributeError):  # not glibc
            ctypes.CDLL(None).malloc_trim(0)  # what is free has not gone back to the system: up to 64 MB a thread
        self.held.append((me.num_fds(), me.num_threads(), me.memory_info().rss / 1e6))

    def _note(self, step: Step, seconds: float) -> None:
        self.seconds[f"{step.family}: {step.what}"].append(seconds)
        self.played += 1
        if self.only is not None:
            print(f"{seconds:6.2f} s {step.family}: {step.what}", flush=True)
        if self.played % 100 == 0:
            counts = collections.Counter(key.partition(":")[0] for key, all in self.seconds.items() for _ in all)
            said = ", ".join(f"{family} {count}" for family, count in sorted(counts.items()))
            print(f"{self.played} steps: {said}; held {self.held[-1] if self.held else ''}", flush=True)

    def _table(self, whole: float) -> None:
        everything = [s for seconds in self.seconds.values() for s in seconds]
        families: dict[str, list[float]] = collections.defaultdict(list)
        for key, seconds in self.seconds.items():
            families[key.partition(":")[0]] += seconds
        print(f"\n{'kind':56} times  median   worst")
        for key, seconds in sorted(families.items()):
            print(f"{key:56} {len(seconds):5} {statistics.median(seconds):7.2f} {max(seconds):7.2f}")
        for key, seconds in sorted(self.seconds.items()):
            print(f"  {key:54} {len(seconds):5} {statistics.median(seconds):7.2f} {max(seconds):7.2f}")
        if everything:
            print(
                f"{len(everything)} steps in {whole:.0f} s, median {statistics.median(everything):.2f} s; "
                f"{self.failures} failures; held (descriptors, threads, MB) {self.held[0]} -> {self.held[-1]}"
            )

    # -- a failure

    def _report(self, size: int, failed: Sequence[Step], whole: Sequence[str]) -> None:
        shortest, program, why = self._shrink(size, failed)
        if program:
            print(f"\n{len(shortest)} of {len(failed)} steps are enough: {why}\n")
        else:
            print(f"\nit did not fail again; all {len(failed)} steps:\n")
        print("\n".join([inspect.getsource(tools), *(program or whole)]), flush=True)

    def _shrink(self, size: int, failed: Sequence[Step]) -> tuple[Sequence[Step], list[str], str]:
        """The fewest steps that have been found to fail, within the time that is allowed for that."""
        deadline = time.monotonic() + self.shrink_seconds
        best: tuple[Sequence[Step], list[str], str] = (failed, [], "")

        def fails(candidate: Sequence[Step]) -> bool:
            nonlocal best
            for _ in range(TRIES):
                if time.monotonic() > deadline:
                    return False
                program, why = _outcome(size, candidate)
                if why:
                    best = candidate, program, why
                    return True
            return False

        length = 1  # what fails at the end has most often begun shortly before
        while length < len(failed) and not fails(failed[-length:]):
            length *= 2
        if not best[1] and not fails(failed):
            return best
        chunk = max(1, len(best[0]) // 2)
        while chunk and time.monotonic() < deadline:
            begin = 0
            while begin < len(best[0]) - 1:
                if not fails([*best[0][:begin], *best[0][begin + chunk :]]):
                    begin += chunk
            chunk //= 2
        return best


def _outcome(size: int, candidate: Sequence[Step]) -> tuple[list[str], str]:
    """The program of these steps, and how it fails; empty if it does not."""
    player: Player | None = None
    try:
        player = Player(size)
        for step in candidate:
            player.play(step)
        player.end()
    except Broken as broken:
        return player.program if player else [], str(broken) or traceback.format_exc()
    finally:
        _give_up(player)
    return [], ""


def _give_up(player: Player | None) -> None:
    """End its group, whatever state that is in."""
    if player is not None and "group" in player.names:
        with contextlib.suppress(Exception):
            player.group.shutdown()
