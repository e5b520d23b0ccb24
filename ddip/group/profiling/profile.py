"""Profile a cell: prepare the ranks before it, and collect, write and show their results after it."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ddip.errors import BadInput, RequestFailed, RequestInterrupted
from ddip.group.members.ranks import Ranks
from ddip.group.objects.part_size import PartSize
from ddip.group.profiling import stragglers, traces
from ddip.output.area import CellOutputArea, notify
from ddip.output.tables.profile_report import Profile
from ddip.protocol import on_rank
from ddip.protocol.reports import ProfileReport

DEFAULT = "ddip_profile/%Y%m%d-%H%M%S"
"""Default folder, as a format of ``time.strftime``."""
TRACE = "rank_{}.pt.trace.json.gz"
"""File name that TensorBoard expects. Holistic Trace Analysis takes any ``*.json`` or ``*.gz`` file for a rank's."""
MERGED = "all_ranks.perfetto-trace"
PINGS = 8


def folder_for(typed: str) -> Path:
    """Create the folder for the traces if missing, delete an earlier profile in it, and return it.

    `typed` empty: a new folder in the current directory. Raises BadInput if nothing can be written there.
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
    """The profile of one cell; `result` is set when the cell has ended."""

    def __init__(self, ranks: Ranks, folder: Path) -> None:
        self.result: Profile | None = None
        self._ranks = ranks
        self.folder = folder

    @contextlib.contextmanager
    def around(self, ranks: Sequence[int], stuck: Callable[[], Sequence[int]]) -> Iterator[None]:
        """Profile the cell that runs on `ranks` inside this context.

        However the cell ends, the records of its ranks are collected and shown below the notebook's cell, except for
        ranks that are `stuck` then. Raises RequestInterrupted, or GroupError if the controller ends; if the cell has
        failed, only the cell's error. `result` stays None if there is no profile.
        """
        self.prepare(ranks)
        try:
            yield
        except BaseException:
            with contextlib.suppress(RequestInterrupted, Exception):  # the cell's own error takes precedence
                self.finish(ranks, stuck())
            raise
        self.finish(ranks, stuck())

    def prepare(self, ranks: Sequence[int]) -> None:
        """Make `ranks` profile their next cell, and wait until they are ready; ignore a failed rank.

        Raises RequestInterrupted or GroupError; an empty folder is removed then.
        """
        try:
            self._ranks.ask(ranks, on_rank.prepare_profile())
        except RequestFailed:  # the cell will also fail, or the profile will say why it lacks a rank
            return
        except BaseException:
            self._remove_empty()
            raise

    def finish(
        self, ranks: Sequence[int], stuck: Sequence[int], show: Callable[[dict[str, str]], object] | None = None
    ) -> None:
        """Collect the profiles of `ranks` except the `stuck` ones, write them, set `result`, and show it.

        `show` gets a MIME bundle; by default, the profile appears below the notebook's cell. Waits for the ranks.
        """
        reports, missing = self._collect_reports(ranks, stuck)
        offsets = self._clock_offsets(list(reports))
        merged = self._merge_traces(reports, offsets)
        found = stragglers.compute_waits(reports, offsets, len(self._ranks.members))
        self.result = Profile(
            found.ranks, found.collectives, found.waited_for, missing, self.folder if reports else None, merged
        )
        if not reports:
            self._remove_empty()
        (show or CellOutputArea().show)(self.result._repr_mimebundle_())

    def _trace_path(self, rank: int) -> Path:
        return self.folder / TRACE.format(rank)

    def _collect_reports(
        self, ranks: Sequence[int], stuck: Sequence[int]
    ) -> tuple[dict[int, ProfileReport], dict[int, str]]:
        """Return the reports of `ranks` by rank, and the reason for each rank without one.

        The traces are in the folder then. `stuck` ranks are not asked.
        """
        missing: dict[int, str] = {}
        for rank in ranks:
            if rank in self._ranks.ended:
                missing[rank] = "its process has ended"
            elif rank in stuck:
                missing[rank] = "it still runs the cell"
        reports: dict[int, ProfileReport] = {}
        waiting = [rank for rank in ranks if rank not in missing]
        while waiting:
            calls = {
                rank: on_rank.collect_profile(str(self._trace_path(rank)) if self._ranks.is_beside(rank) else "")
                for rank in waiting
            }
            try:
                reports = dict(zip(waiting, self._ranks.ask_each(calls, together=False), strict=True))
                break
            except RequestFailed as error:
                failed = {rank: str(why) for rank, why in error.by_rank.items()} or dict.fromkeys(waiting, str(error))
                missing |= failed
                waiting = [rank for rank in waiting if rank not in failed]
        faults = {rank: report["fault"] for rank, report in reports.items() if report["fault"]}
        good = {rank: report for rank, report in reports.items() if not report["fault"]}
        for rank in [rank for rank in good if not self._ranks.is_beside(rank)]:
            try:
                self._fetch_trace(rank, good[rank]["size"])
            except (OSError, RequestFailed) as error:
                faults[rank] = f"its trace did not arrive: {error}"
                del good[rank]
        return good, dict(sorted({**missing, **faults}.items()))

    def _fetch_trace(self, rank: int, size: int) -> None:
        """Fetch the trace of a rank on another host, `size` bytes, and write it to the folder."""
        with self._trace_path(rank).open("wb") as file:
            for begin, end in PartSize().split(size):
                file.write(self._ranks.ask([rank], on_rank.trace_part(begin, end), size=end - begin)[0])
        self._ranks.ask([rank], on_rank.trace_part(0, 0))

    def _clock_offsets(self, ranks: Sequence[int]) -> dict[int, int]:
        """Return how far each rank's clock is ahead of the notebook's, in nanoseconds; 0 on the same host."""
        of_hosts: dict[int, int] = {}
        for rank in ranks:
            host = self._ranks.members[rank].binding.host
            if host not in of_hosts:
                of_hosts[host] = 0 if self._ranks.is_beside(rank) else clock_offset(self._ping_clock(rank))
        return {rank: of_hosts[self._ranks.members[rank].binding.host] for rank in ranks}

    def _ping_clock(self, rank: int) -> list[tuple[int, int, int]]:
        found = []
        for _ in range(PINGS):
            sent = time.time_ns()
            clock = self._ranks.call_on_control_channel([rank], on_rank.read_clock(), seconds=1.0)[rank]
            if clock is not None:
                found.append((sent, clock, time.time_ns()))
        return found

    def _merge_traces(self, reports: Mapping[int, ProfileReport], offsets: Mapping[int, int]) -> Path | None:
        if not reports:
            return None
        begin = min(report["begin"] - offsets[rank] for rank, report in reports.items())
        merged = self.folder / MERGED
        try:
            traces.merge_files({rank: self._trace_path(rank) for rank in reports}, offsets, begin, merged)
        except (OSError, ValueError) as error:
            notify(f"the traces could not be merged into {merged}: {error}")
            return None
        return merged

    def _remove_empty(self) -> None:
        """Remove the folder if it is empty."""
        with contextlib.suppress(OSError):
            self.folder.rmdir()


def clock_offset(pings: Sequence[tuple[int, int, int]]) -> int:
    """Return how far another clock is ahead, estimated from the fastest of `pings`; 0 if there are none.

    Each ping has our clock before, the other clock, and our clock after, in the same unit.

    >>> clock_offset([(0, 5_100, 200), (1_000, 6_050, 1_010)])
    5045
    """
    if not pings:
        return 0
    sent, clock, received = min(pings, key=lambda ping: ping[2] - ping[0])
    return clock - (sent + received) // 2
