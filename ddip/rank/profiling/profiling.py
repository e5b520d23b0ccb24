"""A cell's profile on this rank: recorded by torch's profiler while the cell runs, divided and written when it is asked
for.

    cell begins     profiler and sampler start
    it runs         an event takes 200 bytes; when it is over, 1.6 KB for a moment. Nobody can count events while they
                    are recorded, so when the process has grown by so much that they may be too many, the profiler stops
                    where the cell's own code is, they are counted, and it starts again: the recording has parts
    cell ends       both stop
    collect         called by the notebook then: the figures, and one trace of all parts

The cell goes its way whatever becomes of that: a fault is told, and torch allows one profiler at a time, so one that
the cell starts has precedence.
"""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO, Any

import torch
import torch.distributed as dist
from torch.autograd import profiler as torch_profiler

from ddip.protocol import switches
from ddip.protocol.reports import CollectiveRow, ProfileReport
from ddip.rank.native import freed, pending_calls
from ddip.rank.process_group import collectives, flight_recorder
from ddip.rank.process_group.flight_recorder import Entry
from ddip.rank.profiling import profile_events, timeline, trace_file
from ddip.rank.profiling.profile_events import Recorded
from ddip.rank.profiling.profile_sampler import Sampler, resident
from ddip.rank.profiling.timeline import Layers
from ddip.rank.runtime import c10d, libraries, stacks
from ddip.rank.runtime.gpu import gpu

MOST_EVENTS = 300_000
GROWTH_BYTES = 64 << 20
"""Of the process; as many events take that, or more."""
PATIENCE_SECONDS = 2.0
"""For which a part waits to end at a place where no operation is cut in two."""
DRAIN_AT = 1200
"""Collectives after which the flight recorder is read: it keeps the last 2000."""
MOST_ROWS = 50_000
"""Collectives that are told."""
STARTERS = ("_prepare_profiler", "_enable_profiler")
"""Functions of ``torch.autograd.profiler`` that each of torch's profilers begins with."""
OTHER = "a profiler that the cell itself has started"
IN_A_THREAD = "a thread of the cell has started a profiler"

_wanted = ""
"""Folder for the trace of the next cell; empty: it is not profiled."""
_recording: _Recording | None = None
"""The profile of the cell that runs, or of the last one."""


class _Recording:
    """Of one cell."""

    def __init__(self, folder: str) -> None:
        self._folder = folder if os.access(folder, os.W_OK) else None
        self.recorded = Recorded(Layers(time.time_ns(), 0))
        self.fault = self.note = ""
        self.report: ProfileReport | None = None
        self.trace: IO[bytes] | None = None
        """For a notebook on another host."""
        self._thread = threading.get_native_id()
        self._profiler: Any = None
        self._parts: list[IO[bytes]] = []
        self._starters: dict[str, Callable[..., Any]] = {}
        self._sampler = Sampler(self._look)
        self._base = resident()
        self._due: float | None = None
        """Since when a part is to end; on ``time.monotonic``."""
        self._is_asked = False
        """Will the main thread come to `pause`?"""
        self._entries: dict[tuple[int, int], Entry] = {}
        self._begun = 0
        self._groups: dict[str, list[int]] = {}
        self._world: list[int] = []

    # -- while the cell runs

    def start(self) -> None:
        """On the main thread, before the cell's code."""
        if torch_profiler._is_profiler_enabled:
            self.fault = "a profiler of a former cell's is still on"
            return
        self._begun = _collectives_begun()
        self._start_part()
        self._sampler.start()
        self.recorded.layers.begin = time.time_ns()

    def _start_part(self) -> None:
        with trace_file.quiet():
            profiler = torch.profiler.profile(activities=_activities())
            profiler.start()
        self._profiler = profiler
        self._starters = {name: getattr(torch_profiler, name) for name in STARTERS}
        for name, starter in self._starters.items():
            setattr(torch_profiler, name, self._giving_way(starter))

    def _giving_way(self, starter: Callable[..., Any]) -> Callable[..., Any]:
        def start(*args: Any, **kwargs: Any) -> Any:
            if threading.get_native_id() == self._thread:
                self.finish(OTHER)
            else:  # it takes the recording away; to write what is left would crash the process (torch 2.14)
                self.fault = IN_A_THREAD
            return starter(*args, **kwargs)

        return start

    def _stop_part(self) -> Any:
        """Returns the profiler, which has its events until they are taken."""
        for name, starter in self._starters.items():
            setattr(torch_profiler, name, starter)
        self._starters = {}
        profiler, self._profiler = self._profiler, None
        with trace_file.quiet():
            profiler.stop()
        return profiler

    def _take(self, profiler: Any) -> None:
        """The events of a part."""
        profile_events.read(profiler.profiler.kineto_results.events(), self._thread, self.recorded)
        self._parts.append(trace_file.exported(profiler, self._folder))

    def _look(self) -> None:
        """Now and then, on the sampler's thread."""
        if self._profiler is None:
            return
        if _collectives_begun() - self._begun >= DRAIN_AT:
            self._drain()
        if self._due is None and resident() - self._base > GROWTH_BYTES:
            self._due = time.monotonic()
        if self._due is not None and not self._is_asked and switches.is_on(switches.PROFILE):
            self._is_asked = True
            _ask_main_thread()

    def _drain(self) -> None:
        """The flight recorder."""
        self._begun = _collectives_begun()
        self._entries |= {entry.record: entry for entry in flight_recorder.entries()}

    def pause(self, path: str) -> None:
        """On the main thread, between two instructions of the code in the file `path`."""
        self._is_asked = False
        try:
            if self._due is not None and self._profiler is not None and not self.fault:
                is_late = time.monotonic() > self._due + PATIENCE_SECONDS
                if is_late or not libraries.is_librarys(path):
                    self._next_part()
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"

    def _next_part(self) -> None:
        end = time.time_ns()
        self._take(self._stop_part())
        self._due, self._base = None, resident()
        if self.recorded.count < MOST_EVENTS:
            self._start_part()
        else:
            self._close(f"{self.recorded.count:,} events, as many as are kept", end)

    @stacks.never_interrupted
    def finish(self, why: str = "") -> None:
        """The cell has ended, or `why` the recording does before."""
        try:
            if self._profiler is not None:
                end = time.time_ns()
                profiler = self._stop_part()
                self._close(why, end)
                if not self.fault:
                    self._take(profiler)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"

    def _close(self, why: str, end: int) -> None:
        layers = self.recorded.layers
        self._sampler.stop()
        layers.end, layers.samples = end, self._sampler.samples
        self.note = why
        self._drain()
        self._world = list(range(dist.get_world_size())) if dist.is_initialized() else []
        self._groups = {name: dist.get_process_group_ranks(group) for group, name in c10d.groups().items()}

    # -- afterwards

    def collect(self, path: str) -> ProfileReport:
        """Write the trace to `path`, or keep it for `part`; once."""
        if self.report is None:
            try:
                self.report = self._collected(path)
            except Exception as error:
                self.fault = f"{type(error).__name__}: {error}"
            if self.report is None:
                self.report = profile_events.empty(self.fault or "nothing was recorded")
        return self.report

    def _collected(self, path: str) -> ProfileReport | None:
        if self.fault or not self._parts:
            return None
        divided = timeline.divide(self.recorded.layers)
        size = self._write(path)
        entries = sorted(self._entries.values(), key=lambda entry: entry.record)
        rows: list[CollectiveRow] = profile_events.collectives(self.recorded, entries, self._groups, self._world)
        report: ProfileReport = {
            **profile_events.empty(""),
            "note": self.note,
            "begin": self.recorded.layers.begin,
            "end": self.recorded.layers.end,
            "compute": divided.compute,
            "python": divided.python,
            "loading": divided.loading,
            "idle": divided.idle,
            "communication": divided.communication,
            "collectives": rows[:MOST_ROWS],
            "events": self.recorded.count,
            "size": size,
        }
        self.recorded = Recorded(Layers(0, 0))
        freed.give_back_all()
        return report

    def _write(self, path: str) -> int:
        """Returns the size of the trace, bytes."""
        if path:
            part = Path(f"{path}.part")
            try:
                with part.open("wb") as file:
                    trace_file.write(self._parts, file)
                    size = file.tell()
                part.replace(path)
            except BaseException:
                part.unlink(missing_ok=True)
                raise
        else:  # it stays open until the notebook has it
            self.trace = tempfile.TemporaryFile()  # noqa: SIM115
            trace_file.write(self._parts, self.trace)
            size = self.trace.tell()
        self._parts.clear()
        return size

    def drop(self) -> None:
        """Another cell begins."""
        self.finish()
        for file in (*self._parts, self.trace):
            if file is not None:
                file.close()


@stacks.never_interrupted
def _on_main_thread(frame: FrameType) -> None:
    """Called by Python when it has finished an instruction; an interrupt waits (``stacks.py``)."""
    if _recording is not None:
        _recording.pause(frame.f_code.co_filename)


_ask_main_thread = pending_calls.prepare(_on_main_thread)


def _activities() -> list[Any]:
    activities = torch.profiler.ProfilerActivity
    return [activities.CPU, *([activities.CUDA] if gpu.device.type == "cuda" else [])]


def _collectives_begun() -> int:
    with contextlib.suppress(Exception):
        return sum(collectives.counts().values())
    return 0


# -- what the kernel calls


def ask(wanted: str) -> None:
    """A cell has come; is it to be profiled, and if so, what is the folder of the traces beside the notebook?"""
    global _wanted, _recording
    _wanted = wanted
    former, _recording = _recording, None
    if former is not None:
        former.drop()


def begin() -> None:
    """The cell's code begins."""
    global _recording, _wanted
    folder, _wanted = _wanted, ""
    if folder:
        try:
            _recording = _Recording(folder)
            _recording.start()
        except Exception as error:
            if _recording is not None:
                _recording.fault = f"{type(error).__name__}: {error}"


def end() -> None:
    """It has ended."""
    if _recording is not None:
        _recording.finish()


# -- what the notebook calls


@functools.cache
def prepare() -> None:
    """Before the first cell that is profiled: torch imports for seconds what its profiler needs, on some ranks longer
    than on others."""
    if not torch_profiler._is_profiler_enabled:
        with trace_file.quiet(), torch.profiler.profile(activities=_activities()):
            pass


def collect(path: str) -> ProfileReport:
    """The profile of the last cell; its trace is written to `path`, or, if that is empty, comes by `part`."""
    return profile_events.empty("the cell has not begun there") if _recording is None else _recording.collect(path)


def part(begin: int, end: int) -> bytes:
    """Of the trace; without an end it is let go."""
    trace = None if _recording is None else _recording.trace
    if trace is None or begin >= end:
        if trace is not None:
            trace.close()
        return b""
    trace.seek(begin)
    return trace.read(end - begin)


def clock() -> int:
    """Nanoseconds; on the control thread."""
    return time.time_ns()
