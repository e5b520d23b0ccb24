"""Start ipyparallel clusters with an ipyparallel launcher, and end each once no group is attached to it."""

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
"""Time that a launcher may take to end its engines."""
_keepers: dict[str, subprocess.Popen[bytes]] = {}
"""The keeper of each cluster, by the cluster's connection file."""
_holds: dict[str, int] = {}
"""Number of users of each cluster, by its connection file."""


def check_launcher(launcher: str) -> None:
    """Raise BadInput if ipyparallel has no such launcher; a name with a dot is accepted as a user's class."""
    names = sorted(entry.name for entry in importlib.metadata.entry_points(group=GROUP))
    if launcher not in names and "." not in launcher:
        raise BadInput(f"--engines {launcher}: ipyparallel has no such launcher; type one of {', '.join(names)}")


def start_cluster(launcher: str, profile: str, n: int | None, progress: Callable[[str], None]) -> str:
    """Start a cluster with ipyparallel's `launcher`, wait for its engines, and return its connection file.

    `profile`: IPython profile that configures the launcher; `n`: number of engines, None for the profile's. The caller
    must `give_back` the cluster. Raises GroupError or RequestInterrupted, and leaves nothing behind then.
    """
    with folder.left_out():
        import ipyparallel  # noqa: F401
    keeper = subprocess.Popen(
        [sys.executable, "-P", "-m", "ddip.cluster.ipyparallel.engines_keeper"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        bufsize=0,  # select sees no line that Python has buffered
        start_new_session=True,
    )
    assert keeper.stdin is not None
    try:
        asked = {"launcher": launcher, "profile": profile, "n": n, "id": f"ddip-{os.getpid()}-{uuid.uuid4().hex[:8]}"}
        keeper.stdin.write(json.dumps(asked).encode() + b"\n")
        keeper.stdin.flush()
        progress(f"ddip: starting engines with {launcher}")
        answer: dict[str, str] = {}
        while not answer:
            answer = _read_answer(keeper, launcher)
        file, count = answer["file"], int(answer["n"])
        _wait_for_engines(keeper, launcher, file, count, progress)
    except BaseException as error:
        _end_keeper(keeper)
        if isinstance(error, KeyboardInterrupt):
            raise RequestInterrupted(
                "the start was interrupted; its engines were ended, and there is no group"
            ) from None
        raise
    _keepers[file], _holds[file] = keeper, 1
    return file


def _read_answer(keeper: subprocess.Popen[bytes], launcher: str) -> dict[str, str]:
    """Wait up to LOOK_SECONDS for a line from the keeper, and return it; empty if none came.

    Raises GroupError if the keeper reports an error.
    """
    assert keeper.stdout is not None
    if not select.select([keeper.stdout], [], [], LOOK_SECONDS)[0]:
        return {}
    answer: dict[str, str] = json.loads(keeper.stdout.readline() or b'{"error": "it gave no reason"}')
    if "error" in answer:
        raise GroupError(f"--engines {launcher}: the engines did not start: {answer['error']}")
    return answer


def _wait_for_engines(
    keeper: subprocess.Popen[bytes], launcher: str, file: str, count: int, progress: Callable[[str], None]
) -> None:
    """Wait until `count` engines are registered; raise GroupError if the keeper reports an error."""
    client = attached.connect_client(file)
    try:
        while len(client.ids) < count:
            progress(f"ddip: {len(client.ids)} of {count} engines of {launcher} are up; stop ends them")
            _read_answer(keeper, launcher)
            time.sleep(0)
    finally:
        client.close(linger=0)


def hold_cluster(file: str) -> bool:
    """Keep the cluster with this connection file until one more `give_back`.

    Returns False if ddip has not started it, or if it has ended.
    """
    keeper = _keepers.get(file)
    if keeper is None or keeper.poll() is not None:
        return False
    _holds[file] += 1
    return True


def give_back(file: str) -> None:
    """Give up one hold on the cluster with this connection file; end it after the last hold.

    Waits for its end. Does nothing for a cluster that ddip has not started.
    """
    if file in _holds:
        _holds[file] -= 1
        if not _holds[file]:
            del _holds[file]
            _end_keeper(_keepers.pop(file))


def _end_keeper(keeper: subprocess.Popen[bytes]) -> None:
    """Close the keeper's stdin, which makes it end its cluster; kill it if it still runs after END_SECONDS."""
    assert keeper.stdin is not None and keeper.stdout is not None
    with contextlib.suppress(OSError):
        keeper.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        keeper.wait(END_SECONDS)
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
