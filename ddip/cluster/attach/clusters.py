"""Find ipyparallel clusters by the connection files that their controllers write; read only."""

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
class ClusterInfo:
    """A cluster, found by its connection file for clients."""

    profile: str
    id: str
    file: Path

    @property
    def name(self) -> str:
        """The unambiguous name that a user may type."""
        return f"{self.profile}/{self.id}" if self.id else self.profile

    def called(self, typed: str) -> bool:
        """Return True if `typed` names this cluster by its ID, profile or both."""
        return typed in (self.id, self.profile, self.name, f"{self.profile}/", f"{self.profile}:{self.id}") and bool(
            typed
        )


def find_connection_file(typed: str) -> str:
    """Return the path of the connection file of the running cluster that `typed` names.

    `typed`: ID, profile, ``profile/ID``, or the path of the file itself. Raises GroupError, with the names of running
    clusters, if none or several match.
    """
    if typed.endswith(".json"):
        return _checked_file(typed)
    found = [cluster for cluster in list_clusters() if cluster.called(typed)]
    exact = [cluster for cluster in found if typed in (cluster.id, cluster.name)] or found
    running = [cluster for cluster in exact if is_running(cluster.file)]
    if len(running) == 1:
        return str(running[0].file)
    if running:
        names = ", ".join(cluster.name for cluster in running)
        raise GroupError(f"-c {typed}: several clusters match; type one of {names}")
    why = "its controller does not answer" if found else "there is no such cluster"
    raise GroupError(f"-c {typed}: {why}; {_running_text()}")


def _checked_file(typed: str) -> str:
    file = Path(typed).expanduser().absolute()
    if file.name.startswith("cluster-"):  # ipcluster's file; the controller's is beside it
        own = file.name.removeprefix("cluster-").removesuffix(".json")
        file = file.with_name(f"{BEGIN}-{own}-{END}" if own else f"{BEGIN}-{END}")
    if not file.is_file():
        raise GroupError(f"-c {typed}: there is no file {file}; {_running_text()}")
    try:
        whole = "registration" in json.loads(file.read_text())
    except (OSError, ValueError):
        whole = False
    if not whole or file.name.endswith("engine.json"):
        raise GroupError(f"-c {typed}: this is not a connection file for clients, whose name ends in -{END}")
    return str(file)


def _running_text() -> str:
    names = [cluster.name for cluster in list_clusters() if is_running(cluster.file)]
    return (
        f"running: {', '.join(names)}"
        if names
        else "no cluster runs here; ipcluster start starts one (a group of ddip: --attach)"
    )


def list_clusters() -> Sequence[ClusterInfo]:
    """List the clusters with a connection file in a profile, except those that ddip started.

    Some may have ended without removing the file.
    """
    found = []
    for file in sorted(Path(get_ipython_dir()).glob(f"profile_*/security/{BEGIN}-*{END}")):
        profile = file.parent.parent.name.removeprefix("profile_")
        own = file.name.removeprefix(f"{BEGIN}-").removesuffix(END).removesuffix("-")
        if not own.startswith("ddip-"):  # else ddip has started it
            found.append(ClusterInfo(profile, own, file))
    return found


def is_running(file: Path) -> bool:
    """Connect briefly to the controller with this connection file, and return True if it listens.

    One that can be reached only by an ssh tunnel is taken to listen; one whose file cannot be read is not.
    """
    try:
        info = json.loads(file.read_text())
        scheme, _, address = info["interface"].partition("://")
        if info.get("ssh"):
            return True
        if scheme == "ipc":
            with socket.socket(socket.AF_UNIX) as probe:
                probe.connect(f"{address}:{info['registration']}")
            return True
        anywhere = address in ("*", "0.0.0.0")
        return any(
            _is_listening(target, info["registration"])
            for target in ((info["location"], "127.0.0.1") if anywhere else (address,))
        )
    except (OSError, ValueError, KeyError):
        return False


def _is_listening(address: str, port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection((address, port), CONNECT_SECONDS).close()
        return True
    return False
