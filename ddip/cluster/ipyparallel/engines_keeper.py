"""Starts a cluster with a launcher of ipyparallel's, and ends it when stdin ends: the group is gone, or the notebook.

Run as ``python -P -m ddip.cluster.ipyparallel.engines_keeper``; one line of JSON on stdin says what to start,
one on stdout says ``{"file": ..., "n": 4}``, or ``{"error": ...}``, which may come later, too.

ipyparallel's controller has processes of its own, which go on where it is killed before it has told anybody of them. So
on Linux what is left without a parent becomes this process's child, and ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import sys
from pathlib import Path

import psutil
from ipyparallel import Cluster
from ipyparallel.cluster import launcher

from ddip.cluster.ipyparallel.launchers import Launcher

LOOK_SECONDS = 0.5
PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    """Entry point."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ipyparallel ends the cluster then
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    asked = json.loads(sys.stdin.readline())
    told = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # launchers may print
    more = {"n": asked["n"]} if asked["n"] else {}
    launcher.LocalProcessLauncher.get_output = Launcher.get_output  # which takes bytes that are not UTF-8
    cluster = Cluster(
        engines=asked["launcher"], profile=asked["profile"], cluster_id=asked["id"], delay=0, log_level=40, **more
    )
    try:
        cluster.start_cluster_sync()
        file = os.path.join(cluster.profile_dir, "security", f"ipcontroller-{asked['id']}-client.json")
        _say(told, file=file, n=sum(engines.n for engines in cluster.engines.values()))
        while not select.select([0], [], [], LOOK_SECONDS)[0]:
            if all(engines.state == "after" for engines in cluster.engines.values()):
                _say(told, error="its engines have ended")
                select.select([0], [], [])
    except Exception as error:
        _say(told, error=f"{type(error).__name__}: {error}")
    finally:
        cluster.stop_cluster_sync()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for left in Path(cluster.profile_dir).glob(f"*/*{asked['id']}*"):  # logs, and what was there for its engines
            left.unlink(missing_ok=True)


def _say(where: object, **message: object) -> None:
    print(json.dumps(message), file=where, flush=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
