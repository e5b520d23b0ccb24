"""On a rank: record the lines that a training step runs, and plant a fault at one of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TRACED = (
    "accelerate/",
    "fastai/",
    "lightning/",
    "torch/_tensor.py",
    "torch/amp/",
    "torch/autograd/",
    "torch/distributed/",
    "torch/nn/",
    "torch/optim/",
    "torch/utils/_contextlib.py",
    "torch/utils/data/",
    "transformers/trainer",
)
"""Traced Python code of a training step. A fault in other code looks to the loop like one at the caller's line."""
PARTS = (
    ("torch/optim/lr_scheduler.py", "scheduler, scaler, EMA"),
    ("torch/optim/swa_utils.py", "scheduler, scaler, EMA"),
    ("torch/amp/grad_scaler.py", "scheduler, scaler, EMA"),
    ("accelerate/scheduler.py", "scheduler, scaler, EMA"),
    ("torch/optim/", "optimizer.step"),
    ("torch/autograd/__init__.py", "backward"),
    ("torch/_tensor.py", "backward"),
    ("torch/utils/data/", "data"),
    ("accelerate/data_loader.py", "data"),
    ("torch/nn/modules/", "forward"),
    ("torch/nn/parallel/", "forward"),
)
NAMED_PARTS = {"zero_grad": "zero_grad", "batch": "data", "no_sync": "other", "error": "forward", "join": "other"}
WAIT_SECONDS = 8.0
"""How long a rank stays at the place of a stop or a time limit."""


class PlantedError(ValueError):
    """A planted fault."""


class Tracer:
    """Run a block with a trace function on its lines; subclasses define what happens at a line.

    `loop` is a function of the cell that defines the training loop.
    """

    def __init__(self, loop: Any) -> None:
        self._file = loop.__code__.co_filename
        self._labels: dict[CodeType, str] = {}

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _label(self, code: CodeType) -> str:
        """Return a file name that is the same on all machines; empty if its lines are not traced."""
        label = self._labels.get(code)
        if label is None:
            path = code.co_filename
            label = "loop" if path == self._file else path.rpartition("-packages/")[2] if "-packages/" in path else ""
            if label != "loop" and not label.startswith(TRACED):
                label = ""
            self._labels[code] = label
        return label

    def _call(self, frame: FrameType, event: str, _: Any) -> Any:
        return self._line if self._label(frame.f_code) else None

    def _line(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            self.at_line(self._label(frame.f_code), frame)
        return self._line

    def at_line(self, label: str, frame: FrameType) -> None:
        raise NotImplementedError

    def part_of(self, frame: FrameType | None) -> str:
        """Return the part of the training step that `frame` belongs to."""
        while frame is not None:
            label, name = self._label(frame.f_code), frame.f_code.co_name
            if label and name in NAMED_PARTS:
                return NAMED_PARTS[name]
            if label == "loop" and name == "train":
                return "between"
            for prefix, part in PARTS:
                if label.startswith(prefix):
                    return part
            frame = frame.f_back
        return "other"


class Recorder(Tracer):
    """Record how often each line is reached: ``{"loop:12|between": 1}``."""

    def __init__(self, loop: Any, file: str) -> None:
        super().__init__(loop)
        self._out = file
        self.counts: dict[str, int] = {}

    def at_line(self, label: str, frame: FrameType) -> None:
        place = f"{label}:{frame.f_lineno}|{self.part_of(frame)}"
        self.counts[place] = self.counts.get(place, 0) + 1

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        Path(self._out).write_text(json.dumps(self.counts))


class Fault(Tracer):
    """Cause a fault of `kind` at the `nth` visit of `place`."""

    def __init__(self, loop: Any, kind: str, place: str, nth: int, folder: str, rank: int) -> None:
        super().__init__(loop)
        where, _, self._part = place.partition("|")
        self._place_label, _, line = where.rpartition(":")
        self._number = int(line)
        self._kind, self._left = kind, nth
        self._reached, self._go = Path(folder, f"reached.{rank}"), Path(folder, "go")

    def at_line(self, label: str, frame: FrameType) -> None:
        if frame.f_lineno != self._number or label != self._place_label or self.part_of(frame) != self._part:
            return
        self._left -= 1
        if self._left == 0:
            sys.settrace(None)
            self._reached.write_text("")
            self._happen()

    def _happen(self) -> None:
        if self._kind == "raise":
            raise PlantedError("planted")
        if self._kind == "memory":
            import torch

            raise torch.OutOfMemoryError("planted") if self._number % 2 else MemoryError("planted")
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        until = time.monotonic() + WAIT_SECONDS  # the stop or the time limit comes while the rank waits here
        while not self._go.exists() and time.monotonic() < until:
            time.sleep(0.01)


def record(loop: Any, file: str, rank: int) -> Any:
    """Return a context in which rank 0 records its lines."""
    return Recorder(loop, file) if rank == 0 else contextlib.nullcontext()


def plant(loop: Any, kind: str, place: str, nth: int, folder: str, rank: int, victims: list[int]) -> Any:
    """Return a context in which the fault happens on the ranks `victims`."""
    return Fault(loop, kind, place, nth, folder, rank) if rank in victims else contextlib.nullcontext()
