"""The controller process: ipyparallel's own controller, which ends and tidies up when its owner is gone.

Run as ``python -m ddip.controller``, with the arguments of ``ipcontroller``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

from ddip.owner import Proc, clear_up, end_processes


def _watch(owner: int, folder: Path) -> None:
    """Wait for the owner, our parent, to end; then end its engines and our schedulers, remove the files, and leave."""
    while os.getppid() == owner:
        time.sleep(0.25)
    try:
        end_processes(Proc.of(child.pid) for child in psutil.Process().children())
        clear_up(folder)
    finally:
        os._exit(0)  # the main thread may be anywhere


def _schedulers_die_with_us() -> None:
    """Let no scheduler process outlive a controller that was killed."""
    if sys.platform != "linux":
        return
    import ctypes

    prctl, PR_SET_PDEATHSIG = ctypes.CDLL(None).prctl, 1
    os.register_at_fork(after_in_child=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def main() -> None:
    """Entry point."""
    owner, folder = int(os.environ.pop("DDIP_OWNER")), Path(os.environ.pop("DDIP_RUN_FOLDER"))
    threading.Thread(target=_watch, args=(owner, folder), name="ddip-owner", daemon=True).start()
    _schedulers_die_with_us()
    from ipyparallel.controller.app import IPController

    IPController.launch_instance(sys.argv[1:])


if __name__ == "__main__":
    main()
