"""Read current values of variables on ranks without waiting for their cells.

notebook                      rank
take_peek, on the       -->   pickled in a separate thread   rank/objects/rank_peek.py
control channel
                        <--   small objects
read, or part_of_peek         large objects: memory that a rank beside the notebook shares, else in parts
drop_peek               -->   drops the pickled objects; says where it is if it was too slow
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

from ddip.errors import CellError, RequestFailed, RequestInterrupted, TransferError, ranks_text
from ddip.group import stopping
from ddip.group.members.ranks import Ranks
from ddip.group.objects import transfer
from ddip.group.objects.part_size import FIRST, PartSize
from ddip.group.objects.transfer import Fetched, Transferred
from ddip.output.area import notify
from ddip.output.progress import Report
from ddip.output.tables.tables import size_text
from ddip.protocol import on_rank
from ddip.protocol.location import StackLocation
from ddip.protocol.objects import pickling
from ddip.protocol.objects.pickling import Pickled
from ddip.protocol.on_rank import R, RemoteCall
from ddip.protocol.reports import Peeked

SECONDS = 5.0
"""Default limit of the time that a rank may take to pickle, and to send a part of a large object."""
WHERE_SECONDS = 1.0
"""Time that a rank that was too slow may take to report its location."""
INSIDE = "inside {inside} during the pull; a tensor that it writes to may be half-written"
_numbers = itertools.count(1)


def fetch_snapshots(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], seconds: float, progress: Report
) -> tuple[list[dict[str, Any]], Transferred]:
    """Return the current objects `names` of each of the ranks `of`, in order, and what was transferred.

    Waits at most `seconds` for an answer; errors and remarks: see ``Group.peek_all``.
    """
    all_fetched = fetch_pickled(ranks, names, of, seconds, progress, transfer.known_names())
    values = [transfer.unpickle_values(fetched) for fetched in all_fetched]
    return values, transfer.report_transfer(names, all_fetched)


def fetch_pickled(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], seconds: float, progress: Report, known: str
) -> list[Fetched]:
    """Return the current objects `names` as each of the ranks `of` has pickled them.

    `known`: the receiver's names, as for ``transfer.fetch_variables``.
    """
    with stopping.note_presses():
        request = _Peek(ranks, names, seconds, progress, known)
        try:
            return request.fetch(of)
        finally:
            request.drop()


class _Peek:
    """One request for current values."""

    def __init__(self, ranks: Ranks, names: Sequence[str], seconds: float, progress: Report, known: str) -> None:
        self._ranks, self._names, self._seconds, self._progress = ranks, list(names), seconds, progress
        self._known = known
        self._number = next(_numbers)
        self._pending: set[int] = set()
        """The ranks that may still hold pickled objects of this request."""

    def fetch(self, of: Sequence[int]) -> list[Fetched]:
        """Fetch the names as pickled by each of the ranks `of`, and report tensors that may be half written."""
        self._progress(f"ddip: {ranks_text(of)} {'packs' if len(of) == 1 else 'pack'} {', '.join(self._names)}")
        self._pending.update(of)
        most = FIRST // (max(1, len(self._names)) * len(of))
        replies = self._ask_ranks(dict.fromkeys(of, on_rank.take_peek(self._number, self._names, most, self._known)))
        for rank, reply in replies.items():
            if not dict(reply["sizes"]).keys() - reply["values"].keys():
                self._pending.discard(rank)
            if reply["inside"]:
                notify(f"rank {rank} was {INSIDE.format(inside=reply['inside'])}")
        return [Fetched(rank, replies[rank], self._receive_values(rank, replies[rank])) for rank in of]

    def drop(self) -> dict[int, dict[str, Any] | None]:
        """Make the ranks drop their pickled objects; return by rank where those are that still pickle.

        Ranks that do not answer have None.
        """
        pending, self._pending = self._pending, set()
        live = [rank for rank in self._ranks.live if rank in pending]
        call = on_rank.drop_peek(self._number)
        return self._ranks.call_on_control_channel(live, call, WHERE_SECONDS) if live else {}

    def _ask_ranks(self, calls: Mapping[int, RemoteCall[R]]) -> dict[int, R]:
        """Make a call on the control channel of each rank; raise the errors that ``Group.peek`` documents."""
        self._ensure_none_ended(calls)
        members, futures = self._ranks.members, {}
        for rank, call in calls.items():
            try:
                futures[rank] = self._ranks.cluster.call_on_control_channel(members[rank].engine, call)
            except KeyError:  # it has just ended
                self._ensure_none_ended(calls)
                raise
        with stopping.note_presses() as button:
            button.wait_for(futures.values(), self._seconds, lambda: self._ensure_can_answer(futures))
            if button.pressed:
                button.take()
                raise RequestInterrupted("nothing was pulled: pulling was interrupted")
        late = [rank for rank, future in futures.items() if not future.done()]
        if late:
            raise self._late_error(late)
        answers = {rank: future.result() for rank, future in futures.items()}
        failed = {rank: answer for rank, answer in answers.items() if "ok" not in answer}
        if failed:
            texts = [f"rank {rank}: {answer['error']}: {answer['message']}" for rank, answer in failed.items()]
            raise TransferError(f"nothing was pulled: {'; '.join(texts)}")
        return {rank: answer["ok"] for rank, answer in answers.items()}

    def _ensure_can_answer(self, futures: Mapping[int, Any]) -> None:
        self._ranks.cluster.ensure_controller()
        self._ensure_none_ended([rank for rank, future in futures.items() if not future.done()])

    def _ensure_none_ended(self, ranks: Sequence[int] | Mapping[int, object]) -> None:
        ended = {rank: self._ranks.describe_end(rank) for rank in self._ranks.ended if rank in ranks}
        if ended:
            raise RequestFailed(f"pulling failed: {CellError(ended, self._ranks.repair_text)}", ended)

    def _late_error(self, late: Sequence[int]) -> Exception:
        """Return the error for ranks `late`, which have not answered in time; it says where they are."""
        locations = self.drop()
        places = {rank: self._place_text(rank, locations.get(rank)) for rank in late}
        self._ensure_none_ended(late)
        if stopped := self._ranks.cluster.stopped():
            return TransferError(f"nothing was pulled: {stopped}")
        texts = [f"rank {rank} has not answered within {self._seconds:g} s: {places[rank]}" for rank in late]
        return TransferError(f"nothing was pulled: {'; '.join(texts)}; -t SECONDS waits longer")

    def _place_text(self, rank: int, pickling_at: dict[str, Any] | None) -> str:
        """Describe where a late rank is: `pickling_at`, or for None its main thread.

        `pickling_at`: the location of its pickling.
        """
        names = ", ".join(self._names)
        place = (
            self._ranks.stack_locations_from_outside([rank])[rank]
            if pickling_at is None
            else StackLocation(**pickling_at)
        )
        if place is None:
            return "it does not respond to signals"
        if place.state == "finished":
            return "it was about to"
        if place == StackLocation():
            return f"it still pickles {names}"
        where = f"{place}: {place.source}" if place.source else str(place)
        return where if pickling_at is None else f"it pickles {names}, in {where}"

    def _receive_values(self, rank: int, reply: Peeked) -> dict[str, Pickled]:
        beside = self._ranks.is_beside(rank)
        values = {}
        for name, parts in reply["sizes"]:
            memory: bytearray | mmap.mmap | None = reply["values"].get(name)
            size = pickling.room_of(parts)
            if memory is None and beside:
                memory = transfer.read_shared(reply["paths"].get(name, ""), size)
            values[name] = Pickled.of(self._fetch_parts(rank, name, size) if memory is None else memory, parts)
        return values

    def _fetch_parts(self, rank: int, name: str, size: int) -> bytearray:
        """Fetch a pickled object of `size` bytes from a rank, one part at a time."""
        memory = bytearray()
        for begin, end in PartSize().split(size):
            self._progress(f"ddip: pulling {name} from rank {rank}, {size_text(size)}", begin / size)
            memory += self._ask_ranks({rank: on_rank.part_of_peek(self._number, name, begin, end)})[rank]
        return memory
