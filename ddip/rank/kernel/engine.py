"""Entry point of a rank's engine process: watch the owner, import torch, then run an ipyparallel engine.

torch is imported before the engine registers, so that all ranks import in parallel while the controller starts. No
nanny process is needed: signals arrive on the control thread (``kernel.py``), and the notebook, which is the parent,
notifies the Hub when an engine ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import setproctitle

FORKSERVER = "ddip.rank.streams.forkserver"
"""Module that prepares the forkserver of multiprocessing, which imports it by its name."""


def die_with(owner: int) -> None:
    """End this process once its parent, the process `owner`, has ended, even if the main thread is busy."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != owner:  # the owner ended before the prctl call
            os._exit(1)
        return

    def watch_owner() -> None:
        while os.getppid() == owner:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch_owner, name="ddip-owner", daemon=True).start()


def _exit_quickly(code: int, ended_by: int = 0) -> NoReturn:
    """Exit without destroying every object, which would copy the pages shared with the preload process.

    `ended_by` is the signal that asked the process to end: its parent sees that signal instead of `code`.
    """
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    if ended_by:
        signal.signal(ended_by, signal.SIG_DFL)
        signal.raise_signal(ended_by)
    os._exit(code)


def main() -> None:
    """Run the engine until it ends; the command line is that of ``ipengine``."""
    die_with(int(os.environ.pop("DDIP_OWNER")))
    setproctitle.setproctitle(f"ddip engine ({os.environ.pop('DDIP_NOTEBOOK')})")
    os.environ.pop("SPT_NOENV", None)
    run_folder = Path(os.environ.pop("DDIP_RUN_FOLDER"))
    os.environ["PYTHONPATH"] = os.environ.pop("DDIP_PYTHONPATH")  # the user's value, for processes that cells start
    if not os.environ["PYTHONPATH"]:
        del os.environ["PYTHONPATH"]
    connection_info = os.environ.pop("IPP_CONNECTION_INFO", "")
    gc.disable()  # imports leave too little garbage to be worth a collection
    import torch.distributed  # noqa: F401

    from ddip.protocol import compat, compat_ipyparallel, compat_ipython, compat_torch, dump

    if refusal := compat.find_refusal(compat_torch.NAMES, compat_ipyparallel.ENGINE, compat_ipython.RANK_KERNEL):
        print(refusal, file=sys.stderr)  # the log, in which the notebook finds it
        _exit_quickly(1)
    from ddip.rank.kernel import needed  # noqa: F401
    from ddip.rank.kernel.engine_app import RankEngine
    from ddip.rank.native import freed
    from ddip.rank.objects import iteration
    from ddip.rank.process_group import membership
    from ddip.rank.runtime import seeds

    gc.enable()
    seeds.seed_process()
    freed.keep_freed_memory()
    membership.install_hooks()
    iteration.watch_training()
    multiprocessing.set_forkserver_preload([FORKSERVER])  # which chooses no start method; ``__main__`` may be a script
    dump.register_handler(run_folder, os.getpid())
    log = os.fdopen(os.dup(2), "w")  # ipykernel replaces descriptor 2 with a pipe
    faulthandler.enable(log)  # writes a traceback to the log if the process crashes
    RankEngine.start_log = log
    RankEngine.run_folder = run_folder
    RankEngine.connection_info = connection_info
    code: object = 1
    try:
        RankEngine.launch_instance(sys.argv[1:])
        code = 0
    except SystemExit as request:
        code = request.code
    except BaseException:  # the process exits below without Python's usual shutdown
        traceback.print_exc()
    _exit_quickly(code if isinstance(code, int) else 0 if code is None else 1, RankEngine.ended_by)
