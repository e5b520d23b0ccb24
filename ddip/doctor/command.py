"""``python -m ddip doctor``: run the checks in order, and print each result at once.

Each check imports what it needs only when it runs, so that the first lines appear at once, and a module that cannot be
imported fails one check only.
"""

from __future__ import annotations

import argparse
import importlib
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING

from ddip.doctor import doctor_report
from ddip.doctor.doctor_report import Check, failed

if TYPE_CHECKING:
    from ddip.doctor.torch_build import Probe

INTERRUPTED = 130
"""Exit code after Ctrl-C, as in a shell."""
ABOUT = "Check this machine and environment for problems that keep ddip from working, and suggest remedies."
ENDING = "Exit code: 0 if no check failed, else 1."
CHECKS = [
    ("platform", "platforms", "check_platform"),
    ("packages", "software", "check_packages"),
    ("names", "private_names", "check_names"),
    ("folder", "software", "check_folder"),
    ("environment", "software", "check_environment"),
    ("memory", "machine", "check_memory"),
    ("shared-memory", "machine", "check_shared_memory"),
    ("limits", "machine", "check_limits"),
    ("loopback", "machine", "check_loopback"),
    ("run-folder", "machine", "check_run_folder"),
    ("leftovers", "machine", "check_leftovers"),
    ("gpus", "gpus", "check_gpus"),
]
"""Checks that need no torch: the name shown if the check itself raises, the doctor's module, the function."""


def main(words: Sequence[str]) -> int:
    """Run ``doctor`` with these arguments, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ddip doctor", description=ABOUT, epilog=ENDING)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--no-start", action="store_true", help="do not start any ranks")
    typed = parser.parse_args(words)
    for name in {"SIGTERM", "SIGHUP"} & set(dir(signal)):  # Windows, where the platform check fails, has no SIGHUP
        signal.signal(getattr(signal, name), _raise_exit)
    began = time.monotonic()
    checks: list[Check] = []
    try:
        for check in run_checks(start=not typed.no_start):
            checks.append(check)
            if not typed.json:
                print(check, flush=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second Ctrl-C must not change the exit code
        exec("pass")  # resets a flag: after an interrupt within exec, which dataclasses use, Python exits by SIGINT
        print("interrupted; nothing is left running", file=sys.stderr)
        return INTERRUPTED
    seconds = time.monotonic() - began
    print(doctor_report.as_json(checks, seconds) if typed.json else doctor_report.summary_line(checks, seconds))
    return doctor_report.exit_code(checks)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    """Handle a signal by raising SystemExit, so that ``finally`` blocks end the ranks."""
    raise SystemExit(128 + number)


def run_checks(*, start: bool) -> Iterator[Check]:
    """Yield every check as soon as it is done; with `start`, start ranks at the end."""
    yield from guard_check("python", _load_check("software", "check_python"))
    probe = _begin_probe()
    try:
        for name, module, function in CHECKS:
            yield from guard_check(name, _load_check(module, function))
        yield from guard_check("torch", lambda: _check_torch(probe))
    finally:
        if probe is not None:
            probe.end()
    if start:
        yield from guard_check("start", lambda: _check_starts(probe is not None and probe.has_torch))


def _load_check(module: str, function: str) -> Callable[[], Check | Iterable[Check]]:
    """Return a function that imports a module of the doctor and calls `function` in it."""
    return lambda: getattr(importlib.import_module(f"ddip.doctor.{module}"), function)()


def _begin_probe() -> Probe | None:
    """Import torch in a process while the other checks run; return None if ddip cannot start that process."""
    try:
        from ddip.doctor import torch_build
    except ImportError:
        return None
    return torch_build.Probe()


def _check_torch(probe: Probe | None) -> list[Check]:
    from ddip.doctor import torch_build

    return torch_build.check_torch(probe or torch_build.Probe())


def _check_starts(has_torch: bool) -> Iterator[Check]:
    """Start a group for each backend that this machine can have."""
    if not has_torch:
        yield failed("start-gloo", "not tried, since torch cannot be imported", "fix the check torch above first")
        return
    from ddip.cluster import devices
    from ddip.doctor import trial

    yield trial.check_start("gloo")
    if devices.gpu_names():
        yield trial.check_start("nccl")


def guard_check(name: str, check: Callable[[], Check | Iterable[Check]]) -> Iterator[Check]:
    """Yield the results of `check`; report an exception as a failed check, so that the other checks run."""
    try:
        found = check()
        yield from [found] if isinstance(found, Check) else found
    except ImportError as error:
        advice = f"install {error.name or 'that package'} again, or rename the file that is found in its place"
        yield failed(name, f"{type(error).__name__}: {error}", advice)
    except Exception as error:
        yield failed(name, f"this check itself failed: {type(error).__name__}: {error}", "report this line")
