"""A cell that is profiled: what ranks are told before it, and what is collected, written and shown after it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ddip.cluster.processes.host import LocalHost
from ddip.errors import BadInput, RequestFailed, RequestInterrupted
from ddip.group.members.ranks import Ranks
from ddip.group.profiling import stragglers, traces
from ddip.output.area import CellOutputArea, notify
from ddip.output.tables.profile_report import Profile
from ddip.protocol import on_rank
from ddip.protocol.reports import ProfileReport

DEFAULT = "ddip_profile/%Y%m%d-%H%M%S"
"""The folder where none is given."""
TRACE = "rank_{}.pt.trace.json.gz"
"""As TensorBoard knows them. Holistic Trace Analysis takes any file named ``*.json`` or ``*.gz`` for a rank's."""
MERGED = "all_ranks.perfetto-trace"
PINGS = 8
PART = 1 << 24
"""Bytes of a trace that travel at once."""


def folder_for(typed: str) -> Path:
    """The folder of the traces, which is made if it is not there; what a former profile has left there goes.

    Empty: a new one beside the notebook. Raises BadInput if nothing can be written there.
    """
    folder = Path(typed or time.strftime(DEFAULT)).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        for path in (*folder.glob(TRACE.format("*")), *folder.glob(MERGED)):
            path.unlink()
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise BadInput(f"--profile {typed or folder}: {why}; type the name of a folder that can be written") from None
    return folder


class Profiling:
    """Of one cell; `result` is there when it has ended."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.result: Profile | None = None
        self._ranks = ranks
        self.folder = folder

    @contextlib.contextmanager
    def around(self, ranks: Sequence[int], stuck: Callable[[], Sequence[int]]) -> Iterator[None]:
        """While this lasts, the cell runs on `ranks`. However it ends, what they have recorded is collected, but for
        those that are `stuck` then, and shown below the notebook's cell."""
        self.prepare(ranks)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RequestInterrupted, Exception):  # the error of the cell counts
                self.finish(ranks, stuck())
            raise
        self.finish(ranks, stuck())

    def prepare(self, ranks: Sequence[int]) -> None:
        try:
            self._ranks.ask(ranks, on_rank.prepare_profile())
        except RequestFailed:  # the cell will fail, too, or the profile tells why there is none
            return
        except BaseException:
            self._remove_empty()
            raise

    def finish(
        self, ranks: Sequence[int], stuck: Sequence[int], show: Callable[[dict[str, str]], object] | None = None
    ) -> None:
        """Collect, write and show: by `show`, or below the notebook's cell."""
        reports, missing = self._collect(ranks, stuck)
        offsets = self._offsets(list(reports))
        merged = self._merge(reports, offsets)
        found = stragglers.find(reports, offsets, len(self._ranks.members))
        self.result = Profile(
            found.ranks, found.collectives, found.waited_for, missing, self.folder if reports else None, merged
        )
        if not reports:
            self._remove_empty()
        (show or CellOutputArea().show)(self.result._repr_mimebundle_())

    def _path(self, rank: int) -> Path:
        return self.folder / TRACE.format(rank)

    def _is_beside(self, rank: int) -> bool:
        """Does the rank write where the notebook reads?"""
        return isinstance(self._ranks.host(rank), LocalHost)

    def _collect(self, ranks: Sequence[int], stuck: Sequence[int]) -> tuple[dict[int, ProfileReport], dict[int, str]]:
        """The reports of those that have one, and why others have none."""
        missing: dict[int, str] = {}
        for rank in ranks:
            if rank in self._ranks.ended:
                missing[rank] = "its process has ended"
            elif rank in stuck:
                missing[rank] = "it still runs the cell"
        reports: dict[int, ProfileReport] = {}
        left = [rank for rank in ranks if rank not in missing]
        while left:
            calls = {
                rank: on_rank.collect_profile(str(self._path(rank)) if self._is_beside(rank) else "") for rank in left
            }
            try:
                reports = dict(zip(left, self._ranks.ask_each(calls, together=False), strict=True))
                break
            except RequestFailed as error:
                lost = {rank: str(why) for rank, why in error.by_rank.items()} or dict.fromkeys(left, str(error))
                missing |= lost
                left = [rank for rank in left if rank not in lost]
        faults = {rank: report["fault"] for rank, report in reports.items() if report["fault"]}
        good = {rank: report for rank, report in reports.items() if not report["fault"]}
        for rank in [rank for rank in good if not self._is_beside(rank)]:
            try:
                self._fetch(rank, good[rank]["size"])
            except (OSError, RequestFailed) as error:
                faults[rank] = f"its trace did not come: {error}"
                del good[rank]
        return good, dict(sorted({**missing, **faults}.items()))

    def _fetch(self, rank: int, size: int) -> None:
        """The trace of a rank that is elsewhere."""
        with self._path(rank).open("wb") as file:
            for begin in range(0, size, PART):
                file.write(self._ranks.ask([rank], on_rank.trace_part(begin, min(size, begin + PART)))[0])
        self._ranks.ask([rank], on_rank.trace_part(0, 0))

    def _offsets(self, ranks: Sequence[int]) -> dict[int, int]:
        """How far the clock of each rank is ahead of the notebook's, nanoseconds: 0 for those beside it."""
        of_hosts: dict[int, int] = {}
        for rank in ranks:
            host = self._ranks.members[rank].binding.host
            if host not in of_hosts:
                of_hosts[host] = 0 if self._is_beside(rank) else offset(self._pings(rank))
        return {rank: of_hosts[self._ranks.members[rank].binding.host] for rank in ranks}

    def _pings(self, rank: int) -> list[tuple[int, int, int]]:
        found = []
        for _ in range(PINGS):
            sent = time.time_ns()
            there = self._ranks.call_on_control_channel([rank], on_rank.clock(), seconds=1.0)[rank]
            if there is not None:
                found.append((sent, there, time.time_ns()))
        return found

    def _merge(self, reports: Mapping[int, ProfileReport], offsets: Mapping[int, int]) -> Path | None:
        if not reports:
            return None
        begin = min(report["begin"] - offsets[rank] for rank, report in reports.items())
        to = self.folder / MERGED
        try:
            traces.merge({rank: self._path(rank) for rank in reports}, offsets, begin, to)
        except (OSError, ValueError) as error:
            notify(f"the traces could not be put together in {to}: {error}")
            return None
        return to

    def _remove_empty(self) -> None:
        """The folder, if nobody has put anything there."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def offset(pings: Sequence[tuple[int, int, int]]) -> int:
    """How far another clock is ahead, by what it said between two moments of this one: the quickest answer counts.

    >>> offset([(0, 5_100, 200), (1_000, 6_050, 1_010)])
    5045
    """
    if not pings:
        return 0
    sent, there, came = min(pings, key=lambda ping: ping[2] - ping[0])
    return there - (sent + came) // 2
