"""The folder of a save: numbered versions, of which the latest complete one counts.

    run1/save-4            complete: ddip renames it when every byte and `FACTS` are on the disk
    run1/save-ab12.partial being written, with a lock on it, or left by a process that ended

A save is complete before its folder has this name, and the former version is removed after that. So a kill at any
moment leaves a complete version.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

FACTS = "save.json"
"""File with the facts about a save, in each version."""
NOT_SHARED = "{folder} is not on a file system that all hosts share; type a folder that is"
IN_USE = "another session saves to {folder} at the same time; try again, or type another folder"
COMPLETE, PARTIAL = re.compile(r"save-(\d+)"), re.compile(r"save-\w+\.partial")
FORMAT = 1
"""Version of the format; a load refuses any other."""


def begin_version(folder: str) -> str:
    """Create a folder for a new version in `folder`, and remove what ended processes have left there.

    Raises ValueError if `folder` has other files or is a file, and OSError.
    """
    home = Path(folder)
    if home.exists() and not home.is_dir():
        raise ValueError(f"{folder} is a file; type the name of a folder")
    home.mkdir(mode=0o700, parents=True, exist_ok=True)
    for entry in home.iterdir():
        if PARTIAL.fullmatch(entry.name):
            with lock_folder(entry, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine:
                if is_mine:
                    shutil.rmtree(entry, ignore_errors=True)
        elif not COMPLETE.fullmatch(entry.name):
            raise ValueError(f"{folder} has other files, such as {entry.name}; type another name")
    version = home / f"save-{secrets.token_hex(4)}.partial"
    version.mkdir(mode=0o700)
    return str(version)


def complete_version(version: str, facts: dict[str, Any]) -> str:
    """Write the facts, rename the folder of a version, remove former versions, and return its new name."""
    partial = Path(version)
    with (partial / FACTS).open("w") as file:
        json.dump(facts, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    home = partial.parent
    while True:
        done = home / f"save-{max(_version_numbers(home), default=0) + 1}"
        try:
            partial.rename(done)
            break
        except OSError:
            if not done.exists():  # else another session was quicker
                raise
    _sync_folder(home)
    with lock_folder(home, fcntl.LOCK_EX | fcntl.LOCK_NB) as is_mine:
        for number in _version_numbers(home) if is_mine else ():  # else a load reads one; the next save removes it
            if number < int(done.name.partition("-")[2]):
                shutil.rmtree(home / f"save-{number}", ignore_errors=True)
    return str(done)


@contextlib.contextmanager
def lock_folder(folder: str | Path, how: int = fcntl.LOCK_SH) -> Iterator[bool]:
    """Lock a folder, by default for reading; yield False if it does not exist or is in use."""
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # a pipe of this name would block
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(number, how)
        except OSError:
            yield False
            return
        yield True
    finally:
        os.close(number)


def drop_version(version: str) -> None:
    """Remove the folder of a version that failed."""
    shutil.rmtree(version, ignore_errors=True)
    with contextlib.suppress(OSError):
        Path(version).parent.rmdir()  # if it has no other version


def latest_version(folder: str) -> str:
    """Return the folder of the latest complete version.

    Raises LookupError without one, and ValueError if another user owns any of its files: loading runs code that they
    contain.
    """
    home = Path(folder)
    number = max(_version_numbers(home), default=None) if home.is_dir() else None
    if number is None:
        raise LookupError(f"there is no save in {folder}")
    version = home / f"save-{number}"
    for path in (home, version, *version.rglob("*")):
        if path.lstat().st_uid != os.getuid():
            raise ValueError(f"{path} belongs to another user, whose code a load would run; nothing was loaded")
    return str(version)


def read_facts(version: str) -> dict[str, Any]:
    """Return the facts about a version; raises ValueError if they are damaged or have another format."""
    try:
        facts: dict[str, Any] = json.loads((Path(version) / FACTS).read_text(errors="replace"))
        if facts["format"] != FORMAT:
            raise ValueError(f"{version} has format {facts['format']}, and this ddip reads format {FORMAT}")
        return {name: facts[name] for name in ("releases", "time", "ranks", "variables", "left_out")}
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{version} is damaged: {FACTS} is incomplete") from error


def current_releases() -> dict[str, str]:
    """Return the releases of Python and torch, on which a save may depend."""
    return {"Python": ".".join(map(str, sys.version_info[:2])), "torch": ".".join(torch.__version__.split(".")[:2])}


def _version_numbers(home: Path) -> list[int]:
    found = (COMPLETE.fullmatch(entry.name) for entry in home.iterdir())
    return [int(match[1]) for match in found if match]


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
