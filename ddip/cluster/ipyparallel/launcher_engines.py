"""ipyparallel clusters of ddip's own, by a launcher of ipyparallel's, for as long as a group is attached to them."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import select
import subprocess
import sys
import time
import uuid
from collections.abc import Callable

from ddip.cluster import folder
from ddip.cluster.attach import attached
from ddip.errors import BadInput, GroupError, RequestInterrupted

GROUP = "ipyparallel.engine_launchers"
LOOK_SECONDS = 0.2
END_SECONDS = 30.0
"""How long a launcher may take to end its engines."""
_keepers: dict[str, subprocess.Popen[bytes]] = {}
"""By the connection file of their cluster."""
_holds: dict[str, int] = {}
"""How many want it."""


def check(launcher: str) -> None:
    """Raise BadInput if ipyparallel has no such launcher; one with a dot is a class of somebody's own."""
    names = sorted(one.name for one in importlib.metadata.entry_points(group=GROUP))
    if launcher not in names and "." not in launcher:
        raise BadInput(f"--engines {launcher}: ipyparallel has no such launcher; type one of {', '.join(names)}")


def start(launcher: str, profile: str, n: int | None, progress: Callable[[str], None]) -> str:
    """Start a cluster, and wait for its engines; returns its connection file. It is to be given back.

    Raises GroupError or RequestInterrupted; nothing is left of it then.
    """
    with folder.left_out():
        import ipyparallel  # noqa: F401
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "ddip.cluster.ipyparallel.engines_keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    try:
        asked = {"launcher": launcher, "profile": profile, "n": n, "id": f"ddip-{os.getpid()}-{uuid.uuid4().hex[:8]}"}
        keeper.stdin.write(json.dumps(asked).encode() + b"\n")
        keeper.stdin.flush()
        progress(f"ddip: starting engines with {launcher}")
        told: dict[str, str] = {}
        while not told:
            told = _said(keeper, launcher)
        file, count = told["file"], int(told["n"])
        _wait(keeper, launcher, file, count, progress)
    except BaseException as error:
        _end(keeper)
        if isinstance(error, KeyboardInterrupt):
            raise RequestInterrupted(
                "the start was interrupted; its engines were ended, and there is no group"
            ) from None
        raise
    _keepers[file], _holds[file] = keeper, 1
    return file


def _said(keeper: subprocess.Popen[bytes], launcher: str) -> dict[str, str]:
    """What the keeper has said, if it has."""
    assert keeper.stdout is not None
    if not select.select([keeper.stdout], [], [], LOOK_SECONDS)[0]:
        return {}
    told: dict[str, str] = json.loads(keeper.stdout.readline() or b'{"error": "nothing was said"}')
    if "error" in told:
        raise GroupError(f"--engines {launcher}: they have not started: {told['error']}")
    return told


def _wait(
    keeper: subprocess.Popen[bytes], launcher: str, file: str, count: int, progress: Callable[[str], None]
) -> None:
    client = attached.connect(file)
    try:
        while len(client.ids) < count:
            progress(f"ddip: {len(client.ids)} of {count} engines of {launcher} are there; stop ends them")
            _said(keeper, launcher)
            time.sleep(0)
    finally:
        client.close(linger=0)


def hold(file: str) -> bool:
    """Keep such a cluster, until `give_back`; returns False if it is gone."""
    keeper = _keepers.get(file)
    if keeper is None or keeper.poll() is not None:
        return False
    _holds[file] += 1
    return True


def give_back(file: str) -> None:
    """One who wanted it does not any more; ends one that nobody wants."""
    if file in _holds:
        _holds[file] -= 1
        if not _holds[file]:
            del _holds[file]
            _end(_keepers.pop(file))


def _end(keeper: subprocess.Popen[bytes]) -> None:
    """Have it end its cluster, and wait for that."""
    assert keeper.stdin is not None and keeper.stdout is not None
    with contextlib.suppress(OSError):
        keeper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(END_SECONDS)
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
