"""Which ipyparallel clusters there are, by the files that their controllers write. Nothing is written here."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from IPython.paths import get_ipython_dir

from ddip.errors import GroupError

CONNECT_SECONDS = 1.0
BEGIN, END = "ipcontroller", "client.json"


@dataclass(frozen=True)
class Found:
    """The connection file of a cluster, for clients."""

    profile: str
    id: str
    file: Path

    @property
    def name(self) -> str:
        """As a user may type it."""
        return f"{self.profile}/{self.id}" if self.id else self.profile

    def called(self, typed: str) -> bool:
        """Is it one of those that are called so?"""
        return typed in (self.id, self.profile, self.name, f"{self.profile}/", f"{self.profile}:{self.id}") and bool(
            typed
        )


def find(typed: str) -> str:
    """The connection file of the cluster that somebody means. Raises GroupError, which names those that run."""
    if typed.endswith(".json"):
        return _of_file(typed)
    found = [one for one in all_there() if one.called(typed)]
    exact = [one for one in found if typed in (one.id, one.name)] or found
    running = [one for one in exact if runs(one.file)]
    if len(running) == 1:
        return str(running[0].file)
    if running:
        names = ", ".join(one.name for one in running)
        raise GroupError(f"-c {typed}: there are several: type one of {names}")
    why = "its controller does not answer" if found else "there is no such cluster"
    raise GroupError(f"-c {typed}: {why}; {_those_that_run()}")


def _of_file(typed: str) -> str:
    file = Path(typed).expanduser().absolute()
    if file.name.startswith("cluster-"):  # ipcluster's own file; the controller's is beside it
        own = file.name.removeprefix("cluster-").removesuffix(".json")
        file = file.with_name(f"{BEGIN}-{own}-{END}" if own else f"{BEGIN}-{END}")
    if not file.is_file():
        raise GroupError(f"-c {typed}: there is no file {file}; {_those_that_run()}")
    try:
        whole = "registration" in json.loads(file.read_text())
    except (OSError, ValueError):
        whole = False
    if not whole or file.name.endswith("engine.json"):
        raise GroupError(f"-c {typed}: that is no connection file for clients; its name ends in -{END}")
    return str(file)


def _those_that_run() -> str:
    names = [one.name for one in all_there() if runs(one.file)]
    return f"those that run are {', '.join(names)}" if names else "none runs here; ipcluster start makes one"


def all_there() -> Sequence[Found]:
    """All that have a file in a profile, also those that have ended without removing it; but none of ddip's own."""
    found = []
    for file in sorted(Path(get_ipython_dir()).glob(f"profile_*/security/{BEGIN}-*{END}")):
        profile = file.parent.parent.name.removeprefix("profile_")
        own = file.name.removeprefix(f"{BEGIN}-").removesuffix(END).removesuffix("-")
        if not own.startswith("ddip-"):  # those of groups, which have nothing else in them
            found.append(Found(profile, own, file))
    return found


def runs(file: Path) -> bool:
    """Does its controller listen?"""
    try:
        told = json.loads(file.read_text())
        scheme, _, address = told["interface"].partition("://")
        if told.get("ssh"):
            return True  # only by a tunnel
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as one:
                one.connect(f"{address}:{told['registration']}")
            return True
        anywhere = address in ("*", "0.0.0.0")
        return any(
            _listens(where, told["registration"])
            for where in ((told["location"], "127.0.0.1") if anywhere else (address,))
        )
    except (OSError, ValueError, KeyError):
        return False


def _listens(address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((address, port), CONNECT_SECONDS).close()
        return True
    return False
