"""The doctor's report: one line per check for people, one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import ddip

SCHEMA = 1
"""Version of the JSON object; to be raised if a key is removed or changes its meaning."""
NAME_WIDTH = 15
INDENT = " " * (9 + NAME_WIDTH)


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    status: Literal["ok", "warning", "failed"]
    found: str
    advice: str = ""
    """Advice to the user; empty if there is nothing to do."""

    def __str__(self) -> str:
        first, *more = self.found.splitlines() or [""]
        lines = [f"{self.status:9}{self.name:{NAME_WIDTH}}{first}", *(INDENT + line for line in more)]
        return "\n".join([*lines, *([f"{INDENT}-> {self.advice}"] if self.advice else [])])


def ok(name: str, found: str) -> Check:
    """Return the result of the check `name` if there is nothing to do; `found` is shown. Prints nothing."""
    return Check(name, "ok", found)


def warning(name: str, found: str, advice: str) -> Check:
    """Return a result: ddip works, but something may be slower, smaller or different than expected.

    `found` says what, and `advice` what to do.
    """
    return Check(name, "warning", found, advice)


def failed(name: str, found: str, advice: str) -> Check:
    """Return a result: ddip cannot work, or cannot use hardware that this machine has.

    `found` says why, and `advice` what to do.
    """
    return Check(name, "failed", found, advice)


def exit_code(checks: Sequence[Check]) -> int:
    """Return 1 if a check failed, else 0."""
    return int(any(check.status == "failed" for check in checks))


def summary_line(checks: Sequence[Check], seconds: float) -> str:
    """Count the results in one line.

    >>> summary_line([ok("python", "3.12")], 2.0)
    '1 check in 2.0 s: all ok'
    """
    bad = sum(check.status == "failed" for check in checks)
    warnings = sum(check.status == "warning" for check in checks)
    parts = [f"{bad} failed"] if bad else []
    parts += [f"{warnings} warning{'s' if warnings > 1 else ''}"] if warnings else []
    count = "1 check" if len(checks) == 1 else f"{len(checks)} checks"
    return f"{count} in {seconds:.1f} s: {', '.join(parts) or 'all ok'}"


def as_json(checks: Sequence[Check], seconds: float) -> str:
    """Return all checks as one JSON object."""
    report = {
        "schema": SCHEMA,
        "ddip": ddip.__version__,
        "exit_code": exit_code(checks),
        "seconds": round(seconds, 2),
        "checks": [asdict(check) for check in checks],
    }
    return json.dumps(report, indent=2)
