"""The notebook's side of the preload process (``preload_server.py``): start it, request forks, track its children.

This process has one preload process, started by ``ensure_process`` and used by every cluster. Libraries in it have
read the environment when they were imported: if it has changed since, a new preload process replaces this one.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from ddip.cluster.processes import processes
from ddip.cluster.processes.children import Child, Children
from ddip.guard import Guard
from ddip.protocol.text import escape_surrogates

CONTROLLER = ("ddip.cluster.processes.controller", "ipyparallel.controller.app")
"""Modules that a controller needs."""
ENGINE = (
    "ddip.rank.kernel.engine",
    "ipyparallel.engine.app",
    "torch.distributed",
    "ddip.rank.kernel.engine_app",
    "ddip.rank.kernel.kernel",
    "ddip.rank.kernel.needed",
    "ddip.rank.objects.iteration",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "ipykernel.debugger",
    "multiprocessing.forkserver",
    "tornado.platform.asyncio",
)
"""Modules that the start of an engine would import."""
BACKGROUND_PRELOAD = ("sympy", "torch.distributed.fsdp", "torch.export", "torch._dynamo")
"""Modules that DistributedDataParallel imports at its first use, in steps, so that a request waits for one at most."""
ONLY_ENGINES = "DDIP_WARM", "engine"
"""Environment variable, and its value that makes the preload process skip `BACKGROUND_PRELOAD`."""
READ_WHEN_USED = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_",
    "GLOO_",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "PYTEST_",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    "TORCHINDUCTOR_CACHE_DIR",
    ONLY_ENGINES[0],
)
"""Environment variables, or their prefixes, that may change without a new preload process.

Its children get the current values. Users change some; libraries set the others when the notebook imports them:
scikit-learn, Lightning, and torchvision and others that import torch._dynamo.
"""


START = (
    sys.executable,
    "-P",
    str(Path(__file__).with_name("boot.py")),
)
"""Command that starts a ddip process; the module and its arguments follow."""


class PreloadProcess:
    """A preload process, with the modules that it has imported and the children that it forked."""

    def __init__(self, also: Sequence[str] = ()) -> None:
        self.owner = os.getpid()
        self.environment = _read_at_import(os.environ)
        self.asleep = threading.Event()
        """Set when every module is imported or was tried, and when the process has ended."""
        self.ended = False
        self._retired = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self._children = Children(self.send, processes.kill_and_wait, self._end_if_retired)
        self._lock = threading.Lock()
        self._guard = Guard("a message of the preload process could not be used")
        ours, theirs = socket.socketpair()
        later = () if os.environ.get(ONLY_ENGINES[0]) == ONLY_ENGINES[1] else BACKGROUND_PRELOAD
        with theirs:
            self._process = subprocess.Popen(
                [
                    *module_command("ddip.cluster.processes.preload_server"),
                    notebook_name(),
                    *CONTROLLER,
                    *ENGINE,
                    *also,
                    *later,
                ],
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                env={
                    **os.environ,
                    **python_path(),
                    "DDIP_OWNER": str(self.owner),
                    "DDIP_PATH": json.dumps(_import_path()),
                    processes.MARKED: processes.MARK,
                    "SPT_NOENV": "1",  # the title leaves the environment readable from outside
                    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # no CUDA before the fork
                    "PYDEVD_DISABLE_FILE_VALIDATION": "1",
                },
                start_new_session=True,
            )
        self._link = Connection(ours.detach())
        self._reader = threading.Thread(target=self._read, name="ddip-warm", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """PID of the preload process, which may have ended."""
        return self._process.pid

    @property
    def died(self) -> bool:
        """True if it has ended while it was in use; a retired process ends with its last child."""
        return (self.ended or self._process.poll() is not None) and not self._retired

    def fits(self) -> bool:
        """Return True if it can fork for this process in its current environment."""
        good = not self.ended and self.owner == os.getpid() and self.environment == _read_at_import(os.environ)
        return good and not processes.stopped_text(self.pid)

    def fork(
        self,
        module: str,
        *,
        needs: Sequence[str] = (),
        imports: Sequence[str],
        argv: Sequence[str],
        env: Mapping[str, str],
        log: str,
    ) -> Child:
        """Request a fork that runs ``module.main()``, and return the child at once.

        The fork waits until `needs` and `imports` were tried; the process exits with the import error if one of `needs`
        failed. `env` is its whole environment, `log` an existing file, and its working directory that of this process.
        A refusal is raised by ``Child.pid`` as CannotFork.
        """
        return self._children.ask(
            module=module,
            needs=list(needs),
            imports=list(imports),
            argv=list(argv),
            env=dict(env),
            path=_import_path(),
            cwd=os.getcwd(),
            log=log,
        )

    def send(self, **message: Any) -> None:
        """Send a message to the process; it is lost if the process has ended."""
        with self._lock, contextlib.suppress(OSError):  # the process has ended, which _read reports
            self._link.send(message)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._link.recv_bytes()
                with self._guard:
                    self._handle_message(pickle.loads(message))
        with self._lock:
            self.ended = True
            self._link.close()
        self._process.wait()
        last = ""
        with self._guard, self._log as log:
            log.seek(0)
            last = "".join(f"\n  {line}" for line in log.read().decode(errors="replace").splitlines()[-12:])
        self._children.end_all(f"the preload process ended{last}")
        self.asleep.set()

    def _handle_message(self, message: dict[str, Any]) -> None:
        if message.get("warm"):
            self.asleep.set()
        else:
            self._children.heard(message)

    def _end_if_retired(self) -> None:
        if self._retired:
            self._process.kill()

    def retire(self) -> None:
        """End the process as soon as its last child has ended."""
        self._retired = True
        if not self._children and self.owner == os.getpid():
            self._process.kill()

    def close(self) -> None:
        """End the process and all its children."""
        if self.owner != os.getpid():
            return  # this process is a fork of the owner
        self._process.kill()
        self._reader.join()


_current: PreloadProcess | None = None
"""The preload process that the next start uses."""
_current_lock = threading.Lock()


def ensure_process(also: Sequence[str] = ()) -> PreloadProcess:
    """Return the preload process that fits the environment; start one if there is none, without waiting.

    One that fits no longer ends with its last child. `also`: further modules that a new process imports.
    """
    global _current
    with _current_lock:
        if _current is None or not _current.fits():
            if _current is not None:
                _current.retire()
            _current = PreloadProcess(also)
            atexit.unregister(end_process)
            atexit.register(end_process)
        return _current


def give_up() -> None:
    """Stop using the preload process, which does not answer; the next `ensure_process` starts another."""
    global _current
    with _current_lock:
        if _current is not None:
            _current.retire()
            _current = None


def end_process() -> None:
    """Kill the preload process, if there is one, and thereby its children."""
    global _current
    with _current_lock:
        if _current is not None:
            _current.close()
            _current = None


def can_fork() -> bool:
    """Return True if ranks can be forked on this system."""
    return sys.platform == "linux"


def notebook_name() -> str:
    """Return the name of the notebook, or of this process, for the titles of ddip's processes."""
    session = os.environ.get("JPY_SESSION_NAME")  # Jupyter Server: path of the notebook
    return escape_surrogates(Path(session).name) if session else f"pid {os.getpid()}"


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_WHEN_USED)}


def module_command(module: str) -> list[str]:
    """Return the command that runs ``main()`` of a ddip `module` in a new process; its arguments follow."""
    return [*START, module]


def python_path() -> dict[str, str]:
    """Return PYTHONPATH for ddip's processes, without empty entries, which mean the working directory.

    ``engine.py`` restores the user's value, kept in DDIP_PYTHONPATH, for processes that a cell starts.
    """
    theirs = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, theirs.split(os.pathsep))), "DDIP_PYTHONPATH": theirs}


def _import_path() -> list[str]:
    """Return ``sys.path`` with absolute folders, so that it is valid in any working directory."""
    return [os.path.abspath(entry) for entry in sys.path]
