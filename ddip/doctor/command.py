"""The command: what is looked at, in which order, and what is printed.

A check imports what it needs when its turn comes, so that the first lines are there at once, and what cannot be
imported is a check that failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

from ddip.doctor import report
from ddip.doctor.report import Check, failed

INTERRUPTED = 130
"""Exit code after Ctrl-C, as that of a shell's."""
ABOUT = "Look at this machine and this environment, and say what keeps ddip from working, and what to do."
ENDING = "Exit code: 0 if no check failed, else 1."


def main(words: Sequence[str]) -> int:
    """Run ``doctor`` with these arguments; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m ddip doctor", description=ABOUT, epilog=ENDING)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--no-start", action="store_true", help="do not start any ranks")
    typed = parser.parse_args(words)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    began = time.monotonic()
    checks: list[Check] = []
    try:
        for check in look(start=not typed.no_start):
            checks.append(check)
            if not typed.json:
                print(check, flush=True)
    except KeyboardInterrupt:
        print("interrupted; nothing is left running", file=sys.stderr)
        return INTERRUPTED
    seconds = time.monotonic() - began
    print(report.as_json(checks, seconds) if typed.json else report.summary(checks, seconds))
    return report.exit_code(checks)


def _leave(number: int, frame: FrameType | None) -> None:
    """End as by an exception, which takes the ranks along."""
    raise SystemExit(128 + number)


def look(*, start: bool) -> Iterator[Check]:
    """Every check, as soon as it is done; with `start`, ranks are started at the end."""
    yield from guarded("python", _python)
    from ddip.doctor import torch_build

    probe = torch_build.Probe()  # torch is imported while the next checks run
    try:
        for name, check in _checks():
            yield from guarded(name, check)
        yield from guarded("torch", lambda: torch_build.check_torch(probe))
    finally:
        probe.end()
    if start:
        yield from guarded("start", lambda: _starts(probe.has_torch))


def _python() -> Check:
    from ddip.doctor import software

    return software.check_python()


def _checks() -> Iterator[tuple[str, Callable[[], Check | Iterable[Check]]]]:
    """What needs no torch: names, which are told if a check itself fails, and functions."""
    from ddip.doctor import gpus, machine, software

    yield "platform", machine.check_platform
    yield "packages", software.check_packages
    yield "front-end", software.check_front_end
    yield "folder", software.check_folder
    yield "environment", software.check_environment
    yield "memory", machine.check_memory
    yield "shared-memory", machine.check_shared_memory
    yield "limits", machine.check_limits
    yield "loopback", machine.check_loopback
    yield "run-folder", machine.check_run_folder
    yield "leftovers", machine.check_leftovers
    yield "gpus", gpus.check_gpus


def _starts(has_torch: bool) -> Iterator[Check]:
    """A group for each backend that can be here."""
    if not has_torch:
        yield failed("start-gloo", "not tried, since torch cannot be imported", "see what torch above needs")
        return
    from ddip.cluster import devices
    from ddip.doctor import trial

    yield trial.check_start("gloo")
    if devices.gpu_names():
        yield trial.check_start("nccl")


def guarded(name: str, check: Callable[[], Check | Iterable[Check]]) -> Iterator[Check]:
    """What `check` finds; what it raises is a check that failed: the others say what is wrong all the same."""
    try:
        found = check()
        yield from [found] if isinstance(found, Check) else found
    except ImportError as error:
        advice = "install ddip again, with all that it needs: python -m pip install --force-reinstall, and its name"
        yield failed(name, f"{type(error).__name__}: {error}", advice)
    except Exception as error:
        yield failed(name, f"this check itself failed: {type(error).__name__}: {error}", "report this line")
