"""A host: start, inspect and end the processes of ranks there. Callers do not know which kind of host it is.

LocalHost      this machine: the preload process beside the notebook forks
RemoteHost     another machine: its agent does there what LocalHost does here     (remote_host.py, agent.py)
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from ddip.cluster.processes import links, on_host, preload_client
from ddip.cluster.processes.children import Child
from ddip.cluster.processes.on_host import Facts
from ddip.errors import GroupError

P = ParamSpec("P")
R = TypeVar("R")
ASK_SECONDS = 5.0
"""Time that a host may take to answer a question that ddip can do without."""
NEEDED_SECONDS = links.LOST_SECONDS + 5.0
"""Time that a host may take to answer a question that ddip cannot do without: if the link was cut for less than
`links.LOST_SECONDS`, the answer still comes."""


class Host(Protocol):
    """One host of a group, on which processes are started, looked at and ended."""

    name: str
    """The name that the user typed; empty for this machine."""
    lost: str
    """Reason why the host cannot be reached any more; empty while it can."""
    missing: str
    """Reason why the ranks cannot begin in the requested folder; empty if they can."""

    @property
    def silent(self) -> str:
        """Describe the host's silence, with a remedy, if its agent sends no beats any more; empty otherwise."""

    @property
    def run_folder(self) -> Path:
        """Folder on the host that only this user can enter."""

    @property
    def facts(self) -> Facts:
        """Name, hardware and software of the host."""

    @property
    def address(self) -> str:
        """Address at which the notebook reaches the host; empty for this machine."""

    def fork(
        self,
        module: str,
        *,
        needs: Sequence[str],
        imports: Sequence[str],
        argv: Sequence[str],
        env: Mapping[str, str],
        log: str,
    ) -> Child:
        """Fork a process on the host that runs ``module.main()``, once `needs` and `imports` are imported.

        Returns at once. `needs`: modules whose failed import ends the process; `argv`: its arguments. `env` is added to
        the environment of the host's processes; `log` is the name of a file in its run folder.
        """

    def begin(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a `function` of ``on_host`` on the host; the future raises HostLost if the host is lost.

        On this machine, the call is made at once, and blocks; on others, it is only sent.
        """

    def ask(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call a `function` of ``on_host`` on the host, and wait for its result.

        Raises HostLost if the host is lost or does not answer within ASK_SECONDS.
        """


class HostLost(RuntimeError):
    """The host cannot be reached any more, or does not answer."""


def wait_for(host: Host, answer: Future[R], seconds: float = NEEDED_SECONDS) -> R:
    """Wait for the `answer` of a host, and return it.

    Raises HostLost if the host is lost or does not answer within `seconds`, and the error of the call.
    """
    try:
        return answer.result(seconds)
    except concurrent.futures.TimeoutError:
        raise HostLost(host.silent or f"{host.name} has not answered for {seconds:g} s") from None


def ensure_reachable(host: Host) -> None:
    """Raise GroupError if `host` was lost while a rank started there."""
    if host.lost:
        again = "once it is reachable, type the same line again"
        raise GroupError(f"{host.name} was lost while a rank started there ({host.lost}); {again}")


class LocalHost:
    """The machine that the notebook is on."""

    name = lost = missing = address = silent = ""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder

    @property
    def facts(self) -> Facts:
        """The current facts of this machine."""
        return on_host.collect_facts()

    def fork(
        self,
        module: str,
        *,
        needs: Sequence[str],
        imports: Sequence[str],
        argv: Sequence[str],
        env: Mapping[str, str],
        log: str,
    ) -> Child:
        """Fork the process from the preload process, and return it at once; arguments as in `Host.fork`."""
        warm = preload_client.ensure_process()
        path = self.run_folder / log
        path.touch(0o600)  # a cell may print secrets
        return warm.fork(
            module,
            needs=needs,
            imports=imports,
            argv=argv,
            env={**os.environ, **env, "DDIP_OWNER": str(warm.pid)},
            log=str(path),
        )

    def begin(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call `function` at once, and return a future that is already done."""
        future: Future[R] = Future()
        future.set_result(function(*args, **kwargs))
        return future

    def ask(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function`, and return its result."""
        return function(*args, **kwargs)


def process_environment(run_folder: Path, notebook: str, mark: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that tell a cluster's processes their parameters.

    `notebook`: name for their titles; `mark`: the variable that marks them as this process's own. The processes remove
    these variables at their start, all but IPYTHONDIR.
    """
    variables: dict[str, Any] = {
        "DDIP_RUN_FOLDER": str(run_folder),
        "DDIP_NOTEBOOK": notebook,
        "SPT_NOENV": "1",
        **mark,
        **preload_client.python_path(),
    }
    if not has_ipython_folder():
        variables["IPYTHONDIR"] = str(run_folder / "ipython")
    return variables


def has_ipython_folder() -> bool:
    """Return whether IPython can write to its folder; otherwise each process would leave a temporary one."""
    folder = os.path.normpath(os.path.expanduser(os.environ.get("IPYTHONDIR") or "~/.ipython"))
    return os.access(folder if os.path.isdir(folder) else os.path.dirname(folder), os.W_OK)
