"""Profile a cell on this rank: torch's profiler records it, and the notebook then collects figures and a trace.

    cell begins     start the profiler and the sampler
    cell runs       An event takes 200 bytes, and at the end 1.6 KB for a moment. Events cannot be counted while they
                    are recorded. If the process has grown so much that they may be too many, the profiler stops when
                    the cell's own code runs, the events are counted, and it starts again: a recording has parts.
    cell ends       stop both
    collect         compute the figures and write one trace of all parts, when the notebook asks

Profiling must not affect the cell, so faults are only reported with the profile. torch allows one profiler at
a time, so ddip's stops if the cell starts its own.
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
from ddip.rank.profiling.profile_events import RecordedEvents
from ddip.rank.profiling.profile_sampler import Sampler, resident_bytes
from ddip.rank.profiling.timeline import Layers
from ddip.rank.runtime import c10d, libraries, stacks
from ddip.rank.runtime.gpu import gpu

MOST_EVENTS = 300_000
GROWTH_BYTES = 64 << 20
"""Growth of the process after which a part of the recording ends; `MOST_EVENTS` events take at least that much."""
PATIENCE_SECONDS = 2.0
"""Wait for the cell's own code before a part ends elsewhere, which may cut an operation in two."""
DRAIN_AT = 1200
"""Collectives after which the flight recorder is drained; it keeps the last 2000."""
MOST_ROWS = 50_000
"""Limit of collectives in a report."""
STARTERS = ("_prepare_profiler", "_enable_profiler")
"""Functions of ``torch.autograd.profiler`` that every torch profiler calls first."""
OTHER = "a profiler that the cell has started"
IN_A_THREAD = "a thread of the cell has started a profiler"

_wanted = ""
"""Folder for the trace of the next cell; "" if that is not profiled."""
_recording: _Recording | None = None
"""Recording of the running cell, or of the last one."""


class _Recording:
    """The recording of one cell, with the report made from it."""

    def __init__(self, folder: str) -> None:
        self._folder = folder if os.access(folder, os.W_OK) else None
        self.recorded = RecordedEvents(Layers(time.time_ns(), 0))
        self.fault = self.note = ""
        self.report: ProfileReport | None = None
        self.trace: IO[bytes] | None = None
        """Open trace file for a notebook on another host, which fetches it in parts."""
        self._thread = threading.get_native_id()
        self._profiler: Any = None
        self._parts: list[IO[bytes]] = []
        self._starters: dict[str, Callable[..., Any]] = {}
        self._sampler = Sampler(self._check_limits)
        self._base = resident_bytes()
        self._due_since: float | None = None
        """Time since which the current part should end, on ``time.monotonic``; None while it may continue."""
        self._pause_requested = False
        """True if the main thread will call `pause`."""
        self._entries: dict[tuple[int, int], Entry] = {}
        self._begun = 0
        self._groups: dict[str, list[int]] = {}
        self._world: list[int] = []

    # -- while the cell runs

    def start(self) -> None:
        """Start recording; call this on the main thread, before the cell's code."""
        if torch_profiler._is_profiler_enabled:
            self.fault = "a profiler of an earlier cell is still on"
            return
        self._begun = _collectives_begun()
        self._start_part()
        self._sampler.start()
        self.recorded.layers.begin = time.time_ns()

    def _start_part(self) -> None:
        with trace_file.suppress_messages():
            profiler = torch.profiler.profile(activities=_profiled_activities())
            profiler.start()
        self._profiler = profiler
        self._starters = {name: getattr(torch_profiler, name) for name in STARTERS}
        for name, starter in self._starters.items():
            setattr(torch_profiler, name, self._stop_before(starter))

    def _stop_before(self, starter: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap `starter` so that this recording stops before the cell's own profiler starts."""

        def stop_and_start(*args: Any, **kwargs: Any) -> Any:
            if threading.get_native_id() == self._thread:
                self.finish(OTHER)
            else:  # it ends our recording, whose export would crash the process (torch 2.14)
                self.fault = IN_A_THREAD
            return starter(*args, **kwargs)

        return stop_and_start

    def _stop_part(self) -> Any:
        """Stop the profiler and return it, with its events."""
        for name, starter in self._starters.items():
            setattr(torch_profiler, name, starter)
        self._starters = {}
        profiler, self._profiler = self._profiler, None
        with trace_file.suppress_messages():
            profiler.stop()
        return profiler

    def _read_part(self, profiler: Any) -> None:
        """Read the events of a stopped `profiler`, and export its trace to a file."""
        profile_events.read_events(profiler.profiler.kineto_results.events(), self._thread, self.recorded)
        self._parts.append(trace_file.export_part(profiler, self._folder))

    def _check_limits(self) -> None:
        """Drain a full flight recorder, and request the end of a part that uses too much memory.

        Runs on the sampler's thread.
        """
        if self._profiler is None:
            return
        if _collectives_begun() - self._begun >= DRAIN_AT:
            self._drain_recorder()
        if self._due_since is None and resident_bytes() - self._base > GROWTH_BYTES:
            self._due_since = time.monotonic()
        if self._due_since is not None and not self._pause_requested and switches.is_on(switches.PROFILE):
            self._pause_requested = True
            _ask_main_thread()

    def _drain_recorder(self) -> None:
        """Copy the entries of the flight recorder, before it overwrites them."""
        self._begun = _collectives_begun()
        self._entries |= {entry.record: entry for entry in flight_recorder.read_entries()}

    def pause(self, path: str) -> None:
        """End the part if it is due and `path`, the file of the running code, is not a library's.

        Called on the main thread between two bytecodes.
        """
        self._pause_requested = False
        try:
            if self._due_since is not None and self._profiler is not None and not self.fault:
                is_late = time.monotonic() > self._due_since + PATIENCE_SECONDS
                if is_late or not libraries.is_librarys(path):
                    self._next_part()
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            self._sampler.stop()

    def _next_part(self) -> None:
        end = time.time_ns()
        self._read_part(self._stop_part())
        self._due_since, self._base = None, resident_bytes()
        if self.recorded.count < MOST_EVENTS:
            self._start_part()
        else:
            self._end_recording(f"{self.recorded.count:,} events, as many as are kept", end)

    @stacks.never_interrupted
    def finish(self, why: str = "") -> None:
        """Stop recording at the end of the cell, or earlier for the reason `why`."""
        try:
            if self._profiler is not None:
                end = time.time_ns()
                profiler = self._stop_part()
                self._end_recording(why, end)
                if not self.fault:
                    self._read_part(profiler)
        except Exception as error:
            self.fault = f"{type(error).__name__}: {error}"
            self._sampler.stop()

    def _end_recording(self, why: str, end: int) -> None:
        layers = self.recorded.layers
        self._sampler.stop()
        layers.end, layers.samples = end, self._sampler.samples
        self.note = why
        self._drain_recorder()
        self._world = list(range(dist.get_world_size())) if dist.is_initialized() else []
        self._groups = {name: dist.get_process_group_ranks(group) for group, name in c10d.named_groups().items()}

    # -- afterwards

    def collect(self, path: str) -> ProfileReport:
        """Return the report; the first call also writes the trace to `path` ("": keeps it for `trace_part`)."""
        if self.report is None:
            try:
                self.report = self._build_report(path)
            except Exception as error:
                self.fault = f"{type(error).__name__}: {error}"
            if self.report is None:
                self.report = profile_events.empty_report(self.fault or "nothing was recorded")
        return self.report

    def _build_report(self, path: str) -> ProfileReport | None:
        if self.fault or not self._parts:
            return None
        divided = timeline.divide_time(self.recorded.layers)
        size = self._write_trace(path)
        entries = sorted(self._entries.values(), key=lambda entry: entry.record)
        rows: list[CollectiveRow] = profile_events.collective_rows(self.recorded, entries, self._groups, self._world)
        report: ProfileReport = {
            **profile_events.empty_report(""),
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
        self.recorded = RecordedEvents(Layers(0, 0))
        freed.give_back_all()
        return report

    def _write_trace(self, path: str) -> int:
        """Write the trace of all parts to `path` ("": a temporary file); return its size in bytes."""
        if path:
            partial = Path(f"{path}.part")
            try:
                with partial.open("wb") as file:
                    trace_file.write_trace(self._parts, file)
                    size = file.tell()
                partial.replace(path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        else:  # it stays open until the notebook has fetched it
            self.trace = tempfile.TemporaryFile()  # noqa: SIM115
            trace_file.write_trace(self._parts, self.trace)
            size = self.trace.tell()
        self._parts.clear()
        return size

    def drop(self) -> None:
        """Discard the recording, because another cell begins."""
        self.finish()
        for file in (*self._parts, self.trace):
            if file is not None:
                with contextlib.suppress(OSError):  # the disk is full; the descriptor is closed nevertheless
                    file.close()


@stacks.never_interrupted
def _on_main_thread(frame: FrameType) -> None:
    """End the recording's current part; Python calls this between two bytecodes, shielded from interrupts."""
    if _recording is not None:
        _recording.pause(frame.f_code.co_filename)


_ask_main_thread = pending_calls.prepare_call(_on_main_thread)


def _profiled_activities() -> list[Any]:
    activities = torch.profiler.ProfilerActivity
    return [activities.CPU, *([activities.CUDA] if gpu.device.type == "cuda" else [])]


def _collectives_begun() -> int:
    with contextlib.suppress(Exception):
        return sum(collectives.counts_by_group().values())
    return 0


# -- what the kernel calls


def request_recording(wanted: str) -> None:
    """Prepare for the next cell: `wanted` is the folder for its trace, or "" if it is not profiled."""
    global _wanted, _recording
    _wanted = wanted
    former, _recording = _recording, None
    if former is not None:
        former.drop()


def begin_recording() -> None:
    """Start recording if the cell that begins is to be profiled.

    Never raises: the report has any error.
    """
    global _recording, _wanted
    folder, _wanted = _wanted, ""
    if folder:
        try:
            _recording = _Recording(folder)
            _recording.start()
        except Exception as error:
            if _recording is not None:
                _recording.fault = f"{type(error).__name__}: {error}"


def end_recording() -> None:
    """Stop recording at the end of the cell."""
    if _recording is not None:
        _recording.finish()


# -- what the notebook calls


@functools.cache
def prepare_profile() -> None:
    """Run an empty profile before the first profiled cell.

    torch's profiler imports modules for seconds, and some ranks take longer than others.
    """
    if not torch_profiler._is_profiler_enabled:
        with trace_file.suppress_messages(), torch.profiler.profile(activities=_profiled_activities()):
            pass


def collect_profile(path: str) -> ProfileReport:
    """Return the report of the last cell, and write its trace to `path` ("": keep it for `trace_part`)."""
    return (
        profile_events.empty_report("the cell has not begun there") if _recording is None else _recording.collect(path)
    )


def trace_part(begin: int, end: int) -> bytes:
    """Return the bytes from `begin` to `end` of the kept trace; an empty range frees the trace."""
    trace = None if _recording is None else _recording.trace
    if trace is None or begin >= end:
        if trace is not None:
            trace.close()
        return b""
    trace.seek(begin)
    return trace.read(end - begin)


def read_clock() -> int:
    """Return this host's time in nanoseconds; runs on the control thread."""
    return time.time_ns()
