"""What the doctor says: one line a check for people, one object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import ddip

Status = Literal["ok", "warning", "failed"]
SCHEMA = 1
"""Of the JSON object; raised when a key changes its meaning or goes."""
NAME_WIDTH = 15
INDENT = " " * (9 + NAME_WIDTH)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    status: Status
    found: str
    advice: str = ""
    """What to do; empty if there is nothing to do."""

    def __str__(self) -> str:
        first, *more = self.found.splitlines() or [""]
        lines = [f"{self.status:9}{self.name:{NAME_WIDTH}}{first}", *(INDENT + line for line in more)]
        return "\n".join([*lines, *([f"{INDENT}-> {self.advice}"] if self.advice else [])])


def ok(name: str, found: str) -> Check:
    """Nothing to do."""
    return Check(name, "ok", found)


def warning(name: str, found: str, advice: str) -> Check:
    """ddip works; something may be slower, smaller or other than the user thinks."""
    return Check(name, "warning", found, advice)


def failed(name: str, found: str, advice: str) -> Check:
    """ddip, or a part of it that this machine has the hardware for, does not work."""
    return Check(name, "failed", found, advice)


def exit_code(checks: Sequence[Check]) -> int:
    """1 if a check failed, else 0."""
    return int(any(check.status == "failed" for check in checks))


def summary(checks: Sequence[Check], seconds: float) -> str:
    """The last line.

    >>> summary([ok("python", "3.12")], 2.0)
    '1 check in 2.0 s: all ok'
    """
    bad = sum(check.status == "failed" for check in checks)
    warnings = sum(check.status == "warning" for check in checks)
    parts = [f"{bad} failed"] if bad else []
    parts += [f"{warnings} warning{'s' if warnings > 1 else ''}"] if warnings else []
    count = "1 check" if len(checks) == 1 else f"{len(checks)} checks"
    return f"{count} in {seconds:.1f} s: {', '.join(parts) or 'all ok'}"


def as_json(checks: Sequence[Check], seconds: float) -> str:
    """All checks as one object."""
    report = {
        "schema": SCHEMA,
        "ddip": ddip.__version__,
        "exit_code": exit_code(checks),
        "seconds": round(seconds, 2),
        "checks": [asdict(check) for check in checks],
    }
    return json.dumps(report, indent=2)
