"""The engine process of one rank: watch the owner, import torch, then be an ipyparallel engine.

torch is imported before the engine registers, so that all imports run side by side while the controller starts. No
nanny process is needed: signals arrive on the control thread (``kernel.py``), and the notebook, which is the parent,
tells the Hub when an engine ends.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import NoReturn

import setproctitle


def die_with(owner: int) -> None:
    """End this process as soon as the process `owner`, our parent, is gone, whatever the main thread is doing."""
    if sys.platform == "linux":
        import ctypes

        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != owner:  # it died before we asked
            os._exit(1)
        return

    def watch() -> None:
        while os.getppid() == owner:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="ddip-owner", daemon=True).start()


def _leave(code: int) -> NoReturn:
    """Exit without taking every object apart: that would copy each page that is shared with the warm process."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def main() -> None:
    """Entry point; the arguments are those of ``ipengine``."""
    die_with(int(os.environ.pop("DDIP_OWNER")))
    setproctitle.setproctitle(f"ddip engine ({os.environ.pop('DDIP_NOTEBOOK')})")
    os.environ.pop("SPT_NOENV", None)
    run_folder = Path(os.environ.pop("DDIP_RUN_FOLDER"))
    os.environ["PYTHONPATH"] = os.environ.pop("DDIP_PYTHONPATH")  # what a cell starts is to find what the user has set
    if not os.environ["PYTHONPATH"]:
        del os.environ["PYTHONPATH"]
    connection_info = os.environ.pop("IPP_CONNECTION_INFO", "")
    gc.disable()  # imports make no garbage worth a collection
    import torch.distributed  # noqa: F401

    from ddip.protocol import compat, compat_ipyparallel, compat_ipython, compat_torch, dump

    if refusal := compat.find_refusal(compat_torch.NAMES, compat_ipyparallel.ENGINE, compat_ipython.RANK_KERNEL):
        print(refusal, file=sys.stderr)  # the log, in which the notebook finds it
        _leave(1)
    from ddip.rank.kernel import needed  # noqa: F401
    from ddip.rank.kernel.engine_app import RankEngine
    from ddip.rank.native import freed
    from ddip.rank.objects import iteration
    from ddip.rank.process_group import membership

    gc.enable()
    freed.keep()
    membership.watch()
    iteration.watch()
    dump.listen(run_folder, os.getpid())
    log = os.fdopen(os.dup(2), "w")  # ipykernel puts a pipe in place of 2
    faulthandler.enable(log)  # a crash tells in the log where it was
    RankEngine.start_log = log
    RankEngine.connection_info = connection_info
    code: object = 1
    try:
        RankEngine.launch_instance(sys.argv[1:])
        code = 0
    except SystemExit as request:
        code = request.code
    except BaseException:  # the process ends below, and leaves out Python's own end
        traceback.print_exc()
    _leave(code if isinstance(code, int) else 0 if code is None else 1)
