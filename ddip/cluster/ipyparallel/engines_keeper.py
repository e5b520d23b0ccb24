"""Start a cluster with an ipyparallel launcher, and end it when stdin ends, because the group or the notebook ended.

Run as ``python -P -m ddip.cluster.ipyparallel.engines_keeper``. It reads one line of JSON with the launcher, profile,
ID and number of engines, and writes ``{"file": ..., "n": 4}`` or ``{"error": ...}``; an error may also come later.

ipyparallel's controller has child processes, which survive if it is killed early. So on Linux this process adopts
orphaned descendants, and ends them with itself.
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
    """Start the cluster described on stdin, and end it when stdin ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # raises, so that the cluster is ended
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    request = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # launchers may print
    more = {"n": request["n"]} if request["n"] else {}
    launcher.LocalProcessLauncher.get_output = Launcher.get_output  # accepts bytes that are not UTF-8
    cluster = Cluster(
        engines=request["launcher"], profile=request["profile"], cluster_id=request["id"], delay=0, log_level=40, **more
    )
    try:
        cluster.start_cluster_sync()
        file = os.path.join(cluster.profile_dir, "security", f"ipcontroller-{request['id']}-client.json")
        _print_answer(answers, file=file, n=sum(engines.n for engines in cluster.engines.values()))
        while not select.select([0], [], [], LOOK_SECONDS)[0]:
            if all(engines.state == "after" for engines in cluster.engines.values()):
                _print_answer(answers, error="its engines have ended")
                select.select([0], [], [])
    except Exception as error:
        _print_answer(answers, error=f"{type(error).__name__}: {error}")
    finally:
        cluster.stop_cluster_sync()
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                process.kill()
        for leftover in Path(cluster.profile_dir).glob(f"*/*{request['id']}*"):  # logs, and files for its engines
            leftover.unlink(missing_ok=True)


def _print_answer(where: object, **message: object) -> None:
    print(json.dumps(message), file=where, flush=True)  # type: ignore[call-overload]


if __name__ == "__main__":
    main()
