"""Find the keepers of this user, and claim one for this kernel.

Each keeper has a run folder, which only this user can enter (``ownership.py``), with these files:

    kept.json       `KeptGroup`, as JSON; written once the keeper accepts connections
    kernel.json     Jupyter's connection file, with the key; the sockets are ``k-1`` to ``k-5``
    claim           locked by the kernel that is attached; the operating system releases the lock when it ends
    holder          this kernel, as text; in a file of its own, since closing any file of a claim releases the lock
    values          what a push or a pull copies, while it runs
    log             what the keeper writes outside of cells
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TextIO

import psutil

from ddip.cluster.processes import ownership
from ddip.cluster.processes.processes import Proc
from ddip.errors import BadInput, GroupError

RECORD, CONNECTION, CLAIM, HOLDER, LOG = "kept.json", "kernel.json", "claim", "holder", "log"
ABOUT = "DDIP_KEPT"
"""Environment variable with the name and the seconds of a new keeper, as JSON."""
_mine: set[str] = set()
"""Folders that this process has claimed: closing any file of a claim would release it."""
CLAIM_SECONDS = 1.5
"""Time for which a claim is tried; a keeper tests the lock for an instant, and another kernel may be ending."""


@dataclass(frozen=True)
class KeptGroup:
    """A keeper, as its record describes it."""

    name: str
    """Name that users type: the notebook's, with a number if several have the same."""
    pid: int
    started: float
    """Start time of the process, as `Proc` has it, which with the PID identifies it."""
    seconds: float
    """Time for which the group continues without a kernel, in seconds."""
    folder: str

    @property
    def is_claimed(self) -> bool:
        """True if a kernel is attached."""
        return not can_claim(Path(self.folder))

    @property
    def is_alive(self) -> bool:
        """True if the keeper runs."""
        return self.find_process() is not None

    def find_process(self) -> psutil.Process | None:
        """Return the keeper's process; None if it has ended."""
        return Proc(self.pid, self.started).find()

    def end(self, seconds: float = 30) -> bool:
        """End the keeper and its group; return False if that takes longer than `seconds`."""
        process = self.find_process()
        with contextlib.suppress(psutil.NoSuchProcess):
            if process is not None:
                process.terminate()
        return self.wait_for_end(seconds)

    def wait_for_end(self, seconds: float) -> bool:
        """Wait until the keeper has ended, for at most `seconds`; return True if it has."""
        until = time.monotonic() + seconds  # psutil would wait until the parent has reaped it
        while self.is_alive:
            if time.monotonic() > until:
                return False
            time.sleep(0.02)
        return True

    def holder(self) -> str:
        """Return the kernel that is attached, as text for users; empty if there is none."""
        with contextlib.suppress(OSError):
            return Path(self.folder, HOLDER).read_text(errors="replace").strip() if self.is_claimed else ""
        return ""

    def write(self) -> None:
        """Write the record into the folder, atomically."""
        new = Path(self.folder, f"{RECORD}.new")
        new.touch(0o600)
        new.write_text(json.dumps(asdict(self)))
        new.replace(Path(self.folder, RECORD))


def list_kept() -> list[KeptGroup]:
    """Return the running keepers of this user on this machine, by name."""
    found = []
    for folder in ownership.run_folders():
        with contextlib.suppress(OSError, ValueError, TypeError):
            kept = KeptGroup(**json.loads(ownership.read_file(folder, RECORD)))
            if kept.folder == str(folder) and kept.is_alive:
                found.append(kept)
    return sorted(found, key=lambda kept: kept.name)


def find_kept(typed: str) -> KeptGroup:
    """Return the kept group `typed`, a name or a keeper's PID; empty: the only one that no kernel holds.

    Raises BadInput, with the names, if there is none or several.
    """
    kept = list_kept()
    if typed:
        return find_named(kept, typed, "--attach")
    free = [one for one in kept if not one.is_claimed]
    if len(free) == 1:
        return free[0]
    if free:
        raise BadInput(f"--attach: several groups are kept; type one of {', '.join(one.name for one in free)} after it")
    if kept:
        raise GroupError(_held_text(kept[0]))
    raise BadInput(f"--attach: {_names_text(kept)}")


def holder_text(notebook: str, pid: int) -> str:
    """Return the kernel with this PID as text for users of other kernels.

    `notebook`: its name, or ``pid`` and the PID.

    >>> holder_text("train.ipynb", 24), holder_text("pid 24", 24)
    ('the kernel of train.ipynb (PID 24)', 'the kernel with PID 24')
    """
    return f"the kernel with PID {pid}" if notebook == f"pid {pid}" else f"the kernel of {notebook} (PID {pid})"


def _held_text(kept: KeptGroup) -> str:
    ways = "there, %unload_ext ddip releases it, and %makedip -k ends it"
    return f"--attach: {kept.name} is held by {kept.holder() or 'another kernel'}; {ways}"


def find_named(kept: Sequence[KeptGroup], typed: str, option: str) -> KeptGroup:
    """Return the one of `kept` with the name or the PID `typed`; raise BadInput, which names `option`."""
    named = [one for one in kept if typed in (one.name, str(one.pid))]
    if len(named) == 1:
        return named[0]
    if named:
        pids = ", ".join(str(one.pid) for one in named)
        raise BadInput(f"{option} {typed}: several kept groups have this name; type the PID of a keeper: {pids}")
    raise BadInput(f"{option} {typed}: no kept group has this name; {_names_text(kept)}")


def _names_text(kept: Sequence[KeptGroup]) -> str:
    if kept:
        return f"kept groups: {', '.join(one.name for one in kept)}"
    return "no group is kept on this machine; %makedip --keep starts one (-c attaches to an ipyparallel cluster)"


def keep_time_text(seconds: float) -> str:
    """Return the time of ``--keep`` as ``30 min`` or ``90 s``."""
    return f"{seconds / 60:g} min" if seconds >= 120 else f"{seconds:g} s"


def choose_name(notebook: str) -> str:
    """Return the name of a new kept group: that of its notebook, with a number if it is taken."""
    first = Path(notebook).stem or "group"
    first = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in first)
    taken = {one.name for one in list_kept()}
    names = (first, *(f"{first}-{number}" for number in range(2, len(taken) + 3)))
    return next(name for name in names if name not in taken)


def can_claim(folder: Path) -> bool:
    """Return True if no kernel holds the claim in `folder`."""
    if str(folder) in _mine:
        return False
    try:
        with (folder / CLAIM).open("r+") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def claim_keeper(kept: KeptGroup, holder: str) -> TextIO:
    """Claim the keeper for this process; return the open file that holds the lock.

    `release_keeper` closes it. `holder`: this kernel, as text for users of other kernels. Raises GroupError if another
    kernel holds the claim.
    """
    if kept.folder in _mine:
        raise GroupError(f"--attach: this notebook is attached to {kept.name} already")
    # a lock of lockf, unlike one of flock, is not inherited by processes that the kernel forks
    try:
        file = Path(kept.folder, CLAIM).open("r+")  # noqa: SIM115 - returned
    except FileNotFoundError:
        raise GroupError(f"--attach: the keeper of {kept.name} has just ended") from None
    until = time.monotonic() + CLAIM_SECONDS
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            if time.monotonic() > until:
                file.close()
                raise GroupError(_held_text(kept)) from None
            time.sleep(0.02)
    _mine.add(kept.folder)
    Path(kept.folder, HOLDER).write_text(holder)
    return file


def release_keeper(kept: KeptGroup, file: TextIO) -> None:
    """Release the claim of this process, so that another kernel can attach."""
    file.close()
    _mine.discard(kept.folder)
