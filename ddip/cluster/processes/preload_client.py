"""The notebook's end of the warm process (``preload_server.py``): start it, have it fork, hear of its children's ends.

There is one for this process, begun by ``begin`` and used by every cluster. What libraries read from the environment
when they are imported it has read at its start: when the environment has changed since, another takes its place.
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
from ddip.protocol.text import readable

CONTROLLER = ("ddip.cluster.processes.controller", "ipyparallel.controller.app")
"""What a controller needs imported."""
ENGINE = (
    "ddip.rank.kernel.engine",
    "ipyparallel.engine.app",
    "torch.distributed",
    "ddip.rank.kernel.engine_app",
    "ddip.rank.kernel.kernel",
    "ddip.rank.kernel.needed",
    "IPython.core.completerlib",
    "IPython.core.logger",
    "IPython.core.oinspect",
    "IPython.extensions.storemagic",
    "ipykernel.debugger",
    "tornado.platform.asyncio",
)
"""What an engine needs imported; all that its start would import."""
BACKGROUND_PRELOAD = ("sympy", "torch.distributed.fsdp", "torch.export", "torch._dynamo")
"""What DistributedDataParallel imports when it is first used, in steps: a request waits for one of them at most."""
ONLY_ENGINES = "DDIP_WARM", "engine"
"""A variable, and its value where the warm process leaves out `BACKGROUND_PRELOAD`."""
READ_WHEN_USED = (
    "CUDA_VISIBLE_DEVICES",
    "NCCL_",
    "GLOO_",
    "KMP_INIT_AT_FORK",
    "KMP_DUPLICATE_LIB_OK",
    "PYTEST_",
    ONLY_ENGINES[0],
)
"""Variables that nothing reads at import, or that scikit-learn and pytest set by themselves: the children get them."""


START = (
    sys.executable,
    "-P",
    str(Path(__file__).with_name("boot.py")),
)
"""What starts a process of ddip's own; a module and its arguments follow."""


class WarmProcess:
    """A warm process with what it has imported, and the children that it forked."""

    def __init__(self, also: Sequence[str] = ()) -> None:
        self.owner = os.getpid()
        self.environment = _read_at_import(os.environ)
        self.asleep = threading.Event()
        """Set when all is imported that can be imported beforehand, and when it has ended."""
        self.ended = False
        self._retired = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the process has ended
        self._children = Children(self.send, processes.kill, self._end_if_retired)
        self._lock = threading.Lock()
        self._guard = Guard("a message of the warm process could not be used")
        ours, theirs = socket.socketpair()
        later = () if os.environ.get(ONLY_ENGINES[0]) == ONLY_ENGINES[1] else BACKGROUND_PRELOAD
        with theirs:
            self._process = subprocess.Popen(
                [*command("ddip.cluster.processes.preload_server"), notebook(), *CONTROLLER, *ENGINE, *also, *later],
                stdin=theirs.fileno(),
                stdout=self._log,
                stderr=self._log,
                env={
                    **os.environ,
                    **python_path(),
                    "DDIP_OWNER": str(self.owner),
                    "DDIP_PATH": json.dumps(_path()),
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
        return self._process.pid

    def fits(self) -> bool:
        """Can it fork for this process, in the environment of now?"""
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
        """Ask for a process that runs ``module.main()`` in our directory, once `needs` and `imports` are imported.

        It ends at once if one of `needs` cannot be imported.
        """
        return self._children.ask(
            module=module,
            needs=list(needs),
            imports=list(imports),
            argv=list(argv),
            env=dict(env),
            path=_path(),
            cwd=os.getcwd(),
            log=log,
        )

    def send(self, **message: Any) -> None:
        with self._lock, contextlib.suppress(OSError):  # it ended: _read tells everybody
            self._link.send(message)

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._link.recv_bytes()
                with self._guard:
                    self._heard(pickle.loads(message))
        with self._lock:
            self.ended = True
            self._link.close()
        self._process.wait()
        last = ""
        with self._guard, self._log as log:
            log.seek(0)
            last = "".join(f"\n  {line}" for line in log.read().decode(errors="replace").splitlines()[-12:])
        self._children.end_all(f"the warm process ended{last}")
        self.asleep.set()

    def _heard(self, message: dict[str, Any]) -> None:
        if message.get("warm"):
            self.asleep.set()
        else:
            self._children.heard(message)

    def _end_if_retired(self) -> None:
        if self._retired:
            self._process.kill()

    def retire(self) -> None:
        """End it as soon as its last child has ended."""
        self._retired = True
        if not self._children and self.owner == os.getpid():
            self._process.kill()

    def close(self) -> None:
        """End it and all its children."""
        if self.owner != os.getpid():
            return  # a fork of the owner
        self._process.kill()
        self._reader.join()


_current: WarmProcess | None = None
"""The process that the next start takes."""
_choice = threading.Lock()


def begin(also: Sequence[str] = ()) -> WarmProcess:
    """The warm process that fits the environment; if there is none a new one, which imports modules `also`."""
    global _current
    with _choice:
        if _current is None or not _current.fits():
            if _current is not None:
                _current.retire()
            _current = WarmProcess(also)
            atexit.unregister(end)
            atexit.register(end)
        return _current


def give_up() -> None:
    """Use the warm process no more: it does not answer. The next `begin` starts another."""
    global _current
    with _choice:
        if _current is not None:
            _current.retire()
            _current = None


def end() -> None:
    """End the warm process, and whatever it forked."""
    global _current
    with _choice:
        if _current is not None:
            _current.close()
            _current = None


def possible() -> bool:
    """Can processes be forked here?"""
    return sys.platform == "linux"


def notebook() -> str:
    """What to call this process where people look at processes."""
    session = os.environ.get("JPY_SESSION_NAME")  # Jupyter Server: path of the notebook
    return readable(Path(session).name) if session else f"pid {os.getpid()}"


def _read_at_import(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if not name.startswith(READ_WHEN_USED)}


def command(module: str) -> list[str]:
    """What starts a process that runs ``main()`` of a `module` of ddip; its arguments follow."""
    return [*START, module]


def python_path() -> dict[str, str]:
    """The user's PYTHONPATH for ddip's own processes: all of it but empty entries, which mean the working directory.

    ``engine.py`` puts it back: what a cell starts is to find what the user has set.
    """
    theirs = os.environ.get("PYTHONPATH", "")
    return {"PYTHONPATH": os.pathsep.join(filter(None, theirs.split(os.pathsep))), "DDIP_PYTHONPATH": theirs}


def _path() -> list[str]:
    """Where this process looks for modules, wherever the reader works."""
    return [os.path.abspath(entry) for entry in sys.path]
