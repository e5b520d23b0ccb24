"""Deliver pickled objects to ranks: over the network once per host, and in each host's memory once.

small                         in one message to each rank
large   beside the notebook   written by the notebook to shared memory; one message tells each rank where it is
        on another host       sent in parts to one rank, which writes it to shared memory for the others on its host
        if sharing fails      sent in parts to each rank                                  protocol/objects/shared.py

Large objects travel in loads. Shared memory lives until ranks have dropped all objects in it, so each large object
has its own load; small objects share one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ddip.errors import RequestInterrupted, TransferError, ranks_text
from ddip.group import stopping
from ddip.group.members.ranks import Ranks
from ddip.group.objects.part_size import MOST, PartSize
from ddip.output.progress import Report
from ddip.output.tables.tables import size_text
from ddip.protocol import on_rank
from ddip.protocol.objects import shared
from ddip.protocol.objects.pickling import Pickled
from ddip.protocol.objects.shared import SharedBytes
from ddip.protocol.on_rank import RemoteCall
from ddip.protocol.reports import Paths, Place, PushResult
from ddip.protocol.text import list_names

LARGE = 1 << 21
"""Most bytes, all objects together, to send in one message to each rank, which is quicker up to this size."""
LARGE_BESIDE = 1 << 17
"""The same limit if all ranks are on the notebook's host, where large objects are written once. Such a rank also shares
the objects of this size that it packs."""
LARGE_ELSEWHERE = 1 << 20
"""The same limit for the copies to all ranks on other hosts together, as the network may be slow."""
Load: TypeAlias = "Mapping[str, Pickled]"
"""Objects that travel together, by name."""
_numbers = itertools.count(1)
"""Numbers of pushes."""


def deliver_objects(ranks: Ranks, packed: Load, along: Sequence[str], to: Sequence[int], progress: Report) -> list[str]:
    """Put pickled objects into the namespaces of the ranks `to`, either all of them or none.

    Waits for that. `packed`: pickles by name. The names `along` do not replace existing variables. Returns a line for
    each replaced model, optimizer or parameter that other variables of a rank still hold. Raises TransferError if a
    rank cannot unpickle one, RequestFailed, and RequestInterrupted; no variable has changed then.
    """
    number = next(_numbers)
    with stopping.note_presses() as button:
        try:
            with contextlib.ExitStack() as held:
                delivery = _Delivery(ranks, packed, along, to, progress, button, held)
                put = delivery.put(number)
            ensure_put(put)
            trained = {rank: result["trained"] for rank, result in put.items() if result["trained"]}
            calls = {rank: on_rank.find_push_holders(names) for rank, names in trained.items()}
            holders = ranks.ask_each(calls) if calls else []
        except BaseException as error:
            ranks.tell(to, on_rank.drop_transfers(number))
            if isinstance(error, RequestInterrupted):
                raise RequestInterrupted(f"nothing was pushed: {error}") from None
            raise
        ranks.tell([rank for rank, result in put.items() if result["replaces"]], on_rank.settle_push())
    return _describe_holders(holders)


def _describe_holders(held: Iterable[Mapping[str, Sequence[str]]]) -> list[str]:
    """Describe the variables that hold a former value.

    `held`: such variables by replaced name, for each rank.
    """
    holders, lines = dict[str, set[str]](), []
    for of_rank in held:
        for name, found in of_rank.items():
            holders.setdefault(name, set()).update(found)
    for name, held_by in holders.items():
        verb, them = ("holds", "it") if len(held_by) == 1 else ("hold", "them")
        remedy = f"create {them} again, or push {them} with {name} on one line"
        lines.append(f"{list_names(sorted(held_by))} still {verb} the former {name}: {remedy}")
    return lines


def _split_loads(packed: Load) -> list[Load]:
    """Split the objects into loads: one per large object, and one for all others."""
    large = [name for name, pickled in packed.items() if pickled.size > LARGE]
    rest = {name: pickled for name, pickled in packed.items() if name not in large}
    return [*([rest] if rest else []), *({name: packed[name]} for name in large)]


def _place_objects(loads: Sequence[Load], names: Iterable[str]) -> list[Place]:
    """Return the place of each object in the loads, in the order of `names`."""
    places: dict[str, Place] = {}
    for number, load in enumerate(loads):
        begin = 0
        for name, pickled in load.items():
            places[name] = (name, number, begin, pickled.sizes)
            begin += pickled.room
    return [places[name] for name in names]


def _room_of(load: Load) -> int:
    return sum(pickled.room for pickled in load.values())


class _Delivery:
    """One delivery of objects to ranks; `held` keeps shared memory until the ranks have read it."""

    def __init__(
        self,
        ranks: Ranks,
        packed: Load,
        along: Sequence[str],
        to: Sequence[int],
        progress: Report,
        button: stopping.Button,
        held: contextlib.ExitStack,
    ) -> None:
        self._ranks, self._packed, self._to, self._button, self._held = ranks, packed, to, button, held
        self._progress, self._along = progress, list(along)
        self._beside = [rank for rank in to if ranks.is_beside(rank)]
        self._elsewhere = list(ranks.by_host([rank for rank in to if rank not in self._beside]).values())
        self._total_bytes, self._sent_bytes = sum(pickled.room for pickled in packed.values()), 0
        self._rounds = bool(self._beside) + bool(self._elsewhere)
        """Number of times that all objects are sent or written, for the progress."""
        self._is_sent_to_each = False
        self._part_size = PartSize()

    @property
    def _is_large(self) -> bool:
        """True if the objects are too large for one message to each rank."""
        if not self._elsewhere:
            return self._total_bytes > LARGE_BESIDE
        copies = sum(map(len, self._elsewhere))
        return self._total_bytes > LARGE or self._total_bytes * copies > LARGE_ELSEWHERE

    def put(self, push: int) -> dict[int, PushResult]:
        """Ask the ranks to put the objects into their namespaces; return the result of each rank."""
        if not self._is_large:
            small = bytearray().join(pickled.joined() for pickled in self._packed.values())
            return self._ask_ranks(
                self._to, on_rank.apply_push(push, _place_objects([self._packed], self._packed), self._along, small)
            )
        loads = _split_loads(self._packed)
        places, paths = _place_objects(loads, self._packed), self._write_shared(loads) if self._beside else {}
        for number, load in enumerate(loads):
            missed = [] if paths else [*self._beside]
            missed += self._send_once_per_host(self._elsewhere, number, load) if self._elsewhere else []
            self._send_to_each(missed, number, load)
        results = self._ask_ranks(self._beside, on_rank.apply_push(push, places, self._along, b"", paths))
        results |= self._ask_ranks(
            [rank for on_host in self._elsewhere for rank in on_host], on_rank.apply_push(push, places, self._along)
        )
        unread = [rank for rank, result in results.items() if result["unread"]]
        for number, load in enumerate(loads):
            self._send_to_each(unread, number, load)
        return results | self._ask_ranks(unread, on_rank.apply_push(push, places, self._along))

    def _ask_ranks(self, ranks: Sequence[int], call: RemoteCall[PushResult]) -> dict[int, PushResult]:
        return dict(zip(ranks, self._ranks.ask(ranks, call), strict=True)) if ranks else {}

    def _write_shared(self, loads: Sequence[Load]) -> Paths:
        """Write the loads to shared memory on the notebook's host; return its paths, none if that fails."""
        paths: Paths = {}
        with contextlib.ExitStack() as written:
            try:
                for number, load in enumerate(loads):
                    memory = written.enter_context(SharedBytes(self._ranks.cluster.run_folder))
                    for part in self._iterate_parts(load, lambda: MOST):
                        self._raise_if_stopped()
                        memory.write(part)
                    paths[number] = memory.path, _room_of(load)
            except OSError:  # no space left
                return {}
            self._held.push(written.pop_all())
        return paths

    def _send_to_each(self, ranks: Sequence[int], number: int, load: Load) -> None:
        """Send the load `number` in parts to each of `ranks`, which could not read the shared memory."""
        if ranks:
            self._rounds += not self._is_sent_to_each
            self._is_sent_to_each = True
            self._send(dict.fromkeys(ranks, False), number, load)

    def _send_once_per_host(self, hosts: Sequence[Sequence[int]], number: int, load: Load) -> list[int]:
        """Send load `number` to the first rank on each host for all; return the ranks that cannot read it."""
        paths = self._send({on_host[0]: len(on_host) > 1 for on_host in hosts}, number, load)
        return self._attach_ranks({rank: paths[on_host[0]] for on_host in hosts for rank in on_host[1:]}, number, load)

    def _send(self, ranks: Mapping[int, bool], number: int, load: Load) -> dict[int, str]:
        """Send the load `number` in parts to `ranks`; the value is True to share it on the rank's host.

        Returns the path of the shared memory by rank, empty if it is not shared.
        """
        answers: list[str] = []
        for part in self._iterate_parts(load, lambda: self._part_size.size):
            data = b"".join(part)
            calls = {rank: on_rank.append_part(number, data, not answers, share) for rank, share in ranks.items()}
            with self._part_size.measure(len(data)):
                answers = self._ranks.ask_each(calls, size=len(data) * len(calls))
        return dict(zip(ranks, answers, strict=True))

    def _attach_ranks(self, paths: Mapping[int, str], number: int, load: Load) -> list[int]:
        """Attach ranks to the shared memory at these paths; return the ranks that cannot read it."""
        calls = {rank: on_rank.attach_load(number, path, _room_of(load)) for rank, path in paths.items() if path}
        attached = dict(zip(calls, self._ranks.ask_each(calls), strict=True)) if calls else {}
        return [rank for rank in paths if not attached.get(rank)]

    def _iterate_parts(self, load: Load, most: Callable[[], int]) -> Iterator[list[memoryview]]:
        """Yield the objects of a load in parts of `most()` bytes, and report progress before each part."""
        name = ""

        def iterate_pieces() -> Iterator[memoryview]:
            nonlocal name
            for name in load:
                yield from load[name].pieces()

        for part in shared.split_portions(iterate_pieces(), most):
            share = self._sent_bytes / (self._total_bytes * self._rounds)
            self._progress(f"ddip: pushing {name}, {size_text(self._packed[name].size)}", share)
            self._sent_bytes += sum(piece.nbytes for piece in part)
            yield part

    def _raise_if_stopped(self) -> None:
        if self._button.pressed:
            self._button.take()
            raise RequestInterrupted("pushing was interrupted")


def ensure_put(put: Mapping[int, PushResult]) -> None:
    """Raise TransferError if a rank could not unpickle a pushed object; `put`: the results by rank."""
    errors = {
        name: f"{error} ({_failed_ranks_text(put, name)})"
        for result in put.values()
        for name, error in result["errors"].items()
    }
    if errors:
        raise TransferError(f"nothing was pushed: {reasons_text(errors, 'cannot be unpickled there')}")


def _failed_ranks_text(put: Mapping[int, PushResult], name: str) -> str:
    return ranks_text([rank for rank, result in put.items() if name in result["errors"]])


def reasons_text(errors: Mapping[str, str], what: str) -> str:
    """Join the names and their `errors` to one line: ``NAME WHAT: ERROR; ...``."""
    return "; ".join(f"{name} {what}: {error}" for name, error in errors.items())
