"""With what the processes of an ipyparallel cluster of ours are started."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import Iterator
from typing import Any

from ipyparallel import Cluster as IppCluster
from traitlets.log import get_logger

from ddip.cluster.ipp_private import RankClient

HEARTBEAT_MS = 1000
MISSED_BEATS = 1_000_000_000
"""After which the Hub takes an engine for dead: never, since its parent tells when it ends. A process that was stopped
for a while, by a debugger or with the whole machine, lives and has its variables."""
WRITTEN_SECONDS = 1.0
"""How long the file of a cluster may be out of date."""


class OwnIppCluster(IppCluster):  # type: ignore[misc]
    """An ``ipyparallel.Cluster`` that writes its file once for many engines that come or go together."""

    _writing: asyncio.TimerHandle | None = None

    def update_cluster_file(self) -> None:
        """Soon; called for each engine, and ipyparallel's own writes down all of them each time."""
        if self._writing is None:
            self._writing = asyncio.get_running_loop().call_later(WRITTEN_SECONDS, self._write)

    async def write_now(self) -> None:
        """What has still to be written."""
        if self._writing is not None:
            self._writing.cancel()
            self._write()

    async def write_no_more(self) -> None:
        """Its files are removed now."""
        if self._writing is not None:
            self._writing.cancel()
        self.cluster_file = ""

    def _write(self) -> None:
        self._writing = None
        super().update_cluster_file()


def controller_arguments(encrypt: bool) -> list[str]:
    """Of the controller; with `encrypt`, all that it sends and gets is, and who has no key is refused."""
    return [
        "--IPController.transport=ipc",
        "--IPController.log_level=WARN",
        "--IPController.use_threads=True",  # two processes instead of nine
        "--IPController.db_class=ipyparallel.controller.dictdb.NoDB",  # else the Hub keeps what passes
        f"--HeartMonitor.period={HEARTBEAT_MS}",
        f"--HeartMonitor.max_heartmonitor_misses={MISSED_BEATS}",
        *(["--IPController.enable_curve=True"] if encrypt else []),
    ]


def engine_arguments(engine: int, timeout: float) -> list[str]:
    """Of an engine with this number, which is to be there within `timeout` seconds."""
    return [
        f"--IPEngine.id={engine}",
        "--IPEngine.log_level=ERROR",  # what it warns of is no news
        "--IPEngine.enable_nanny=False",
        "--HistoryManager.enabled=False",  # it keeps a database and a thread
        "--IPEngine.max_heartbeat_misses=0",  # it dies with its parent instead
        f"--IPEngine.wait_for_url_file={timeout}",
        f"--IPEngine.timeout={timeout}",
    ]


async def make_client(cluster: IppCluster, timeout: float) -> RankClient:
    """What ``ipyparallel.Cluster.connect_client`` does, with a client of our own."""
    info: Any = cluster.controller.get_connection_info()
    files = await info if inspect.isawaitable(info) else info
    with _unsigned():
        return RankClient(files["client"], cluster=cluster, timeout=timeout)


def _traitlets_log() -> logging.Logger:
    log = get_logger()
    return log if isinstance(log, logging.Logger) else log.logger


@contextlib.contextmanager
def _unsigned() -> Iterator[None]:
    """Let nobody be warned of messages that are not signed: ipyparallel signs none that are encrypted."""
    log, passes = _traitlets_log(), lambda record: "signing is disabled" not in record.getMessage()
    log.addFilter(passes)
    try:
        yield
    finally:
        log.removeFilter(passes)
