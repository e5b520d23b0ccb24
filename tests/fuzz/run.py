"""A run of the fuzzer: stretches of steps on groups, statistics, and the shrinking of a failure."""

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
"""Steps per group."""
TRIES = 2
"""How often a shorter sequence must succeed before it is dropped: many failures depend on timing."""
SETTLED = 3
"""Stretches after which this process has opened everything that it opens once."""
MORE = (30, 10, 150.0)
"""Additional descriptors, threads and megabytes that it may hold at the end."""
FOLDER = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
"""Folder for IPython and run folders; IPython writes to it until this process ends."""


class LastLines(logging.Handler):
    """A log handler that keeps the last lines, for the analysis of a failure."""

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
        """Return all lines."""
        return "\n".join(self._lines)


class Run:
    """A run of `count` steps from a seed."""

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
        """True once this process has imported torch."""

    def all(self) -> int:
        """Play all steps; return the exit code."""
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
                preload_client.end_process()
            assert leftovers.family_of(os.getpid()) == []
            assert leftovers.run_folders() == []
        self._check_held()
        return 1 if self.failures else 0

    def _check_held(self) -> None:
        """Fail if this process holds more and more between groups, after the first stretches."""
        if len(self.held) > SETTLED:
            before, after = self.held[SETTLED], self.held[-1]
            if any(a > b + more for b, a, more in zip(before, after, MORE, strict=True)):
                self.failures += 1
                print(f"FAILED: the notebook's process holds more and more: {self.held}")

    def _prepare(self) -> None:
        signal.signal(signal.SIGINT, lambda *_: None)  # a SIGINT between two lines has no effect, as in a kernel
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))

    # -- a stretch

    def _stretches(self) -> Iterator[Sequence[Step]]:
        if self.only is not None:
            for step in steps.matching_steps(self.seed, self.only):
                yield [step]
        else:
            while self.played < self.count:
                yield steps.draw_steps(f"{self.seed} {self.stretch}", min(STRETCH, self.count - self.played))

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
            at = min(at, len(drawn) - 1)  # the failure may be in the end of the group
            print(f"\nFAILED: seed {self.seed}, stretch {self.stretch}, step {at}: {drawn[at]}\n{broken}", flush=True)
            print(f"the last of ddip's log:\n{self._log.text()}")
            print(f"before that was said:\n{player.heard.getvalue()[-2000:] if player else ''}")
            self._note(drawn[at], 0.0)
            _end_group(player)
            self._report(size, drawn[: at + 1], player.program if player else [])
        finally:
            _end_group(player)
        me = psutil.Process()
        if "torch" in sys.modules and not self.has_torch:  # unpickling has imported it here, which takes 500 MB
            self.has_torch = True
            self.held.clear()
        gc.collect()
        with contextlib.suppress(AttributeError):  # only glibc has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)  # returns free memory to the system, up to 64 MB per thread
        self.held.append((me.num_fds(), me.num_threads(), me.memory_info().rss / 1e6))

    def _note(self, step: Step, seconds: float) -> None:
        self.seconds[f"{step.family}: {step.what}"].append(seconds)
        self.played += 1
        if self.only is not None:
            print(f"{seconds:6.2f} s {step.family}: {step.what}", flush=True)
        if self.played % 100 == 0:
            counts = collections.Counter(key.partition(":")[0] for key, all in self.seconds.items() for _ in all)
            counts_text = ", ".join(f"{family} {count}" for family, count in sorted(counts.items()))
            print(f"{self.played} steps: {counts_text}; held {self.held[-1] if self.held else ''}", flush=True)

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
        """Return the shortest sequence that was found to fail, within the time limit."""
        deadline = time.monotonic() + self.shrink_seconds
        best: tuple[Sequence[Step], list[str], str] = (failed, [], "")

        def fails(candidate: Sequence[Step]) -> bool:
            nonlocal best
            for _ in range(TRIES):
                if time.monotonic() > deadline:
                    return False
                program, why = _try_steps(size, candidate)
                if why:
                    best = candidate, program, why
                    return True
            return False

        length = 1  # a failure most often has a recent cause
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


def _try_steps(size: int, candidate: Sequence[Step]) -> tuple[list[str], str]:
    """Return the program of these steps, and its failure; empty if there is none."""
    player: Player | None = None
    try:
        player = Player(size)
        for step in candidate:
            player.play(step)
        player.end()
    except Broken as broken:
        return player.program if player else [], str(broken) or traceback.format_exc()
    finally:
        _end_group(player)
    return [], ""


def _end_group(player: Player | None) -> None:
    """End the player's group, whatever its state."""
    if player is not None and "group" in player.names:
        with contextlib.suppress(Exception):
            player.group.shutdown()
