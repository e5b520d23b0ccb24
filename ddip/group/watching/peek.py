"""What ranks hold at this moment, while their cells run: asked beside these, so that nothing waits for a cell to end.

notebook                    rank
take, on the control  -->   pickled in a thread of its own   rank/objects/rank_peek.py
channel
                      <--   what is small
read, or ask for part       what is large: memory that a rank beside the notebook shares, else in parts
drop                  -->   what it still has; where it is, if it was given up
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping, Sequence
from typing import Any

from ddip.cluster.processes.host import LocalHost
from ddip.errors import CellError, RequestFailed, RequestInterrupted, TransferError, ranks_text
from ddip.group import stopping
from ddip.group.members.ranks import Ranks
from ddip.group.objects import transfer
from ddip.group.objects.delivery import LARGE
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
"""How long a rank may take, if nobody says so: to pickle, and to send a part of what is large."""
WHERE_SECONDS = 1.0
"""How long it may take to tell where it is, when it was too late."""
INSIDE = "inside {inside} meanwhile: a tensor that this writes to may have arrived half written"
PART = 1 << 22
"""Bytes that travel at once; answers of others wait behind them."""
_numbers = itertools.count(1)


def peek(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], seconds: float, progress: Report
) -> tuple[list[dict[str, Any]], Transferred]:
    """Do what ``Group.peek_all`` says: the objects `names` of each of the ranks `of`, and what was carried."""
    with stopping.button():
        one = _Peek(ranks, names, seconds, progress)
        try:
            all_fetched = one.fetch(of)
        finally:
            one.drop()
    values = [transfer.unpack(fetched) for fetched in all_fetched]
    return values, transfer.transferred(names, all_fetched)


class _Peek:
    """One."""

    def __init__(self, ranks: Ranks, names: Sequence[str], seconds: float, progress: Report) -> None:
        self._ranks, self._names, self._seconds, self._progress = ranks, list(names), seconds, progress
        self._number = next(_numbers)
        self._pending: set[int] = set()
        """Ranks that may have something of it."""

    def fetch(self, of: Sequence[int]) -> list[Fetched]:
        """Have each of the ranks `of` pickle the names, and take what they have pickled."""
        self._progress(f"ddip: {ranks_text(of)} {'packs' if len(of) == 1 else 'pack'} {', '.join(self._names)}")
        self._pending.update(of)
        known = transfer.known_names()
        replies = self._ask(dict.fromkeys(of, on_rank.take_peek(self._number, self._names, LARGE, known)))
        for rank, reply in replies.items():
            if not dict(reply["sizes"]).keys() - reply["values"].keys():
                self._pending.discard(rank)
            self._ensure_there(rank, reply)
            if reply["inside"]:
                notify(f"rank {rank} was {INSIDE.format(inside=reply['inside'])}")
        return [Fetched(rank, replies[rank], self._values(rank, replies[rank])) for rank in of]

    def drop(self) -> dict[int, dict[str, Any] | None]:
        """Have the ranks let go of what they still have; returns where those are that still pickle."""
        pending, self._pending = self._pending, set()
        live = [rank for rank in self._ranks.live if rank in pending]
        call = on_rank.drop_peek(self._number)
        return self._ranks.call_on_control_channel(live, call, WHERE_SECONDS) if live else {}

    def _ask(self, calls: Mapping[int, RemoteCall[R]]) -> dict[int, R]:
        """Make a call beside the cell of each rank; raises what ``Group.peek`` does."""
        self._ensure_none_ended(calls)
        members, futures = self._ranks.members, {}
        for rank, call in calls.items():
            try:
                futures[rank] = self._ranks.cluster.call_on_control_channel(members[rank].engine, call)
            except KeyError:  # it has ended just now
                self._ensure_none_ended(calls)
                raise
        with stopping.button() as button:
            button.wait_for(futures.values(), self._seconds, lambda: self._ensure_can_answer(futures))
            if button.pressed:
                button.take()
                raise RequestInterrupted("nothing was pulled: pulling was interrupted")
        late = [rank for rank, future in futures.items() if not future.done()]
        if late:
            raise self._too_late(late)
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
        ended = {rank: self._ranks.end_of(rank) for rank in self._ranks.ended if rank in ranks}
        if ended:
            raise RequestFailed(f"pulling failed: {CellError(ended, self._ranks.repair_text)}", ended)

    def _too_late(self, late: Sequence[int]) -> Exception:
        """What to raise when the ranks `late` have not answered in time: it says where they are."""
        here = self.drop()
        places = {rank: self._place(rank, here.get(rank)) for rank in late}
        self._ensure_none_ended(late)
        if stopped := self._ranks.cluster.stopped():
            return TransferError(f"nothing was pulled: {stopped}")
        texts = [f"rank {rank} has not answered within {self._seconds:g} s: {places[rank]}" for rank in late]
        return TransferError(f"nothing was pulled: {'; '.join(texts)}; -t SECONDS waits longer")

    def _place(self, rank: int, pickles: dict[str, Any] | None) -> str:
        """Where it is: what it pickles with, as it tells; or its main thread, as it looks from outside."""
        names = ", ".join(self._names)
        place = self._ranks.place_from_outside(rank) if pickles is None else StackLocation(**pickles)
        if place is None:
            return "it does not even take a signal"
        if place.state == "finished":
            return "it was about to"
        if place == StackLocation():
            return f"it still pickles {names}"
        where = f"{place}: {place.source}" if place.source else str(place)
        return where if pickles is None else f"it pickles {names}, in {where}"

    def _ensure_there(self, rank: int, reply: Peeked) -> None:
        if reply["missing"] and reply["busy"]:
            what = f"rank {rank} has no variable {', '.join(reply['missing'])} yet"
            raise TransferError(
                f"nothing was pulled: {what}; it has one as soon as its cell has assigned it, unless that is a local "
                "variable of a function"
            )

    def _values(self, rank: int, reply: Peeked) -> dict[str, Pickled]:
        beside = isinstance(self._ranks.host(rank), LocalHost)
        values = {}
        for name, parts in reply["sizes"]:
            memory: bytearray | mmap.mmap | None = reply["values"].get(name)
            size = pickling.room_of(parts)
            if memory is None and beside:
                memory = transfer.read(reply["paths"].get(name, ""), size)
            values[name] = Pickled.of(self._parts(rank, name, size) if memory is None else memory, parts)
        return values

    def _parts(self, rank: int, name: str, size: int) -> bytearray:
        """What it has, one part after the other."""
        here = bytearray()
        while len(here) < size:
            self._progress(f"ddip: pulling {name} from rank {rank}, {size_text(size)}", len(here) / size)
            call = on_rank.part_of_peek(self._number, name, len(here), min(size, len(here) + PART))
            here += self._ask({rank: call})[rank]
        return here
