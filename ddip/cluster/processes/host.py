"""A host: where the processes of ranks are started, looked at and ended. Nothing above knows which one it is.

LocalHost      this machine: the warm process beside the notebook forks
RemoteHost     another: the agent that runs there does what LocalHost does here     (remote_host.py, agent.py)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar

from ddip.cluster.processes import on_host, preload_client
from ddip.cluster.processes.children import Child
from ddip.cluster.processes.on_host import Facts

P = ParamSpec("P")
R = TypeVar("R")
ASK_SECONDS = 5.0
"""How long a host may take to answer; one that does not is of no use."""


class Host(Protocol):
    """One host of a group."""

    name: str
    """As it was typed; empty for this machine."""
    lost: str
    """Why nothing can reach it any more; empty while something can."""
    missing: str
    """What is the matter with the folder where its ranks were to begin; empty: they begin there."""

    @property
    def run_folder(self) -> Path:
        """A folder there that only this user can enter."""

    @property
    def facts(self) -> Facts:
        """What it is, and has."""

    @property
    def address(self) -> str:
        """By which the notebook reaches it; empty for this machine."""

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
        """Have a process there that runs ``module.main()``, once `needs` and `imports` are imported.

        `env` is added to what processes of the host have; `log` is the name of a file in its run folder.
        """

    def begin(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call a `function` of ``on_host`` there. Where the host is lost it raises HostLost."""

    def ask(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The same, and wait for what it returns, ASK_SECONDS at most; raises HostLost."""


class HostLost(RuntimeError):
    """A host cannot be reached any more, or does not answer."""


class LocalHost:
    """The machine that the notebook is on."""

    name = lost = missing = address = ""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder

    @property
    def facts(self) -> Facts:
        """Of this machine, now."""
        return on_host.facts()

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
        """Have the warm process fork it."""
        warm = preload_client.begin()
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
        """Call `function`."""
        future: Future[R] = Future()
        future.set_result(function(*args, **kwargs))
        return future

    def ask(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function`."""
        return function(*args, **kwargs)


def environment(run_folder: Path, notebook: str, mark: Mapping[str, str]) -> dict[str, str]:
    """What the processes of a cluster are told by the environment; they take it out of there."""
    told: dict[str, Any] = {
        "DDIP_RUN_FOLDER": str(run_folder),
        "DDIP_NOTEBOOK": notebook,
        "SPT_NOENV": "1",
        **mark,
        **preload_client.python_path(),
    }
    return told
