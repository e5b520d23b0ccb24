"""What the control group of this process allows it: inside a container, less than the machine has."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
FILES = {
    "memory": [("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")],
    "pids": [("pids.max", "pids.current")],
}
"""Limit and use, in version 2 and in version 1."""
UNLIMITED = 1 << 60
"""Version 1 writes a number about as large as this, or larger, where there is no limit."""


@dataclass(frozen=True)
class Bound:
    """A limit of a control group, and how much of it is used."""

    limit: int
    used: int

    @property
    def free(self) -> int:
        return max(0, self.limit - self.used)


def bound(controller: str, root: Path = ROOT, membership: Path = MEMBERSHIP) -> Bound | None:
    """The tightest limit of `controller` (``memory`` in bytes, or ``pids``) for this process; None: there is none."""
    try:
        text = membership.read_text()
    except OSError:
        return None
    found = [known for folder in _folders(controller, text, root) if (known := _read(controller, folder))]
    return min(found, key=lambda known: known.free, default=None)


def _folders(controller: str, membership: str, root: Path) -> Iterator[Path]:
    """Those of the process's control group and of all groups around it."""
    for line in membership.splitlines():
        number, controllers, path = (line.split(":", 2) + ["", ""])[:3]
        if number == "0" and not controllers:
            base = root
        elif controller in controllers.split(","):
            base = root / controllers if (root / controllers).is_dir() else root / controller
        else:
            continue
        folder = base / path.lstrip("/")
        yield from [folder, *(parent for parent in folder.parents if parent.is_relative_to(base))]


def _read(controller: str, folder: Path) -> Bound | None:
    for limit_file, use_file in FILES[controller]:
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / limit_file).read_text())  # not a number: "max"
            if limit < UNLIMITED:
                used = int((folder / use_file).read_text())
                return Bound(limit, max(0, used - _cache(folder)) if controller == "memory" else used)
    return None


def _cache(folder: Path) -> int:
    """Bytes of files that the kernel keeps in memory and gives up when it needs it."""
    with contextlib.suppress(OSError, ValueError):
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        figures = {words[0]: int(words[1]) for words in lines if len(words) == 2}
        return figures.get("total_inactive_file", figures.get("inactive_file", 0))
    return 0
