"""Pickled objects on their way to ranks: over the network once a host, and in the memory of each host once.

small                       in one message to each rank
large   beside the notebook the notebook writes it into memory that the ranks read            protocol/shared.py
        on another host     in parts to one rank there, which writes it into such memory; the others of its host read it
        where that fails    in parts to each rank

What is large travels in loads. Memory that ranks read lives until they have let go of all that is in it, so each large
object has a load of its own; small ones share one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from ddip.cluster.host import LocalHost
from ddip.errors import RequestInterrupted, TransferError, ranks_text
from ddip.group import stopping
from ddip.group.ranks import Ranks
from ddip.output.progress import Report
from ddip.output.sizes import size_text
from ddip.protocol import on_rank, shared
from ddip.protocol.pickling import Pickled
from ddip.protocol.reports import Place
from ddip.protocol.shared import SharedBytes

PART = 1 << 24
"""Bytes of an object that travel at once."""
LARGE = 1 << 21
"""More bytes than that, all objects together, do not travel in one message to each rank: less is there sooner so."""
LARGE_ELSEWHERE = 1 << 20
"""The same where several ranks of another host get them: their network may be slow."""
Load: TypeAlias = "Mapping[str, Pickled]"
"""What travels together, by name."""


def deliver(ranks: Ranks, packed: Load, to: Sequence[int], progress: Report) -> None:
    """Put pickled objects into the namespaces of the ranks `to`: all of them, or none."""
    with stopping.button() as button:
        try:
            delivery = _Delivery(ranks, packed, to, progress, button)
            if delivery.is_large:
                errors = ranks.ask(to, on_rank.stage(delivery.carry()))
            else:
                small = bytearray().join(pickled.joined() for pickled in packed.values())
                errors = ranks.ask(to, on_rank.stage(_places([packed]), small))
            staged(dict(zip(to, errors, strict=True)))
        except BaseException as error:
            ranks.tell(to, on_rank.drop())
            if isinstance(error, RequestInterrupted):
                raise RequestInterrupted(f"nothing was pushed: {error}") from None
            raise
        ranks.ask(to, on_rank.commit(), stoppable=False)


def _loads(packed: Load) -> list[Load]:
    """What travels together: each large object by itself, all others in one."""
    large = [name for name, pickled in packed.items() if pickled.size > LARGE]
    rest = {name: pickled for name, pickled in packed.items() if name not in large}
    return [*([rest] if rest else []), *({name: packed[name]} for name in large)]


def _places(loads: Sequence[Load]) -> dict[str, Place]:
    """Where each object lies."""
    places: dict[str, Place] = {}
    for number, load in enumerate(loads):
        begin = 0
        for name, pickled in load.items():
            places[name] = (number, begin, pickled.sizes)
            begin += pickled.room
    return places


class _Delivery:
    """One, of what is large."""

    def __init__(
        self, ranks: Ranks, packed: Load, to: Sequence[int], progress: Report, button: stopping.Button
    ) -> None:
        self._ranks, self._packed, self._button = ranks, packed, button
        self._progress = progress
        self._beside, self._elsewhere = self._by_host(to)
        self._whole, self._done = sum(pickled.room for pickled in packed.values()), 0
        self._rounds = 1
        """How often all of it is sent, or written."""
        self._sends_again = False

    @property
    def is_large(self) -> bool:
        """Is it too large for one message to each rank?"""
        return self._whole > (LARGE_ELSEWHERE if any(len(its) > 1 for its in self._elsewhere) else LARGE)

    def carry(self) -> dict[str, Place]:
        """Have all of it in the memory of the ranks; returns where each object lies there."""
        self._rounds = bool(self._beside) + bool(self._elsewhere)
        loads = _loads(self._packed)
        for number, load in enumerate(loads):
            missed = self._lay_beside(self._beside, number, load) if self._beside else []
            missed += self._send_once_a_host(self._elsewhere, number, load) if self._elsewhere else []
            if missed:
                self._rounds += not self._sends_again
                self._sends_again = True
                self._send(dict.fromkeys(missed, False), number, load)
        return _places(loads)

    def _by_host(self, to: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """The ranks that are beside the notebook, and those of each other host."""
        by_host: dict[int, list[int]] = {}
        for rank in to:
            by_host.setdefault(self._ranks.members[rank].binding.host, []).append(rank)
        beside = [host for host in by_host if isinstance(self._ranks.cluster.hosts[host], LocalHost)]
        here = [rank for host in beside for rank in by_host.pop(host)]
        return here, list(by_host.values())

    def _lay_beside(self, ranks: list[int], number: int, load: Load) -> list[int]:
        """Returns the ranks that cannot read what was written."""
        try:
            memory = SharedBytes(self._ranks.cluster.run_folder)
        except OSError:
            return ranks
        with memory:
            try:
                for part in self._parts(load):
                    self._ensure_wanted()
                    memory.write(part)
            except OSError:  # there is no room
                return ranks
            return self._attach(dict.fromkeys(ranks, memory.path), number, load)

    def _send_once_a_host(self, hosts: Sequence[Sequence[int]], number: int, load: Load) -> list[int]:
        """Returns the ranks that cannot read what the first of their host has got."""
        paths = self._send({its[0]: len(its) > 1 for its in hosts}, number, load)
        return self._attach({rank: paths[its[0]] for its in hosts for rank in its[1:]}, number, load)

    def _send(self, ranks: Mapping[int, bool], number: int, load: Load) -> dict[int, str]:
        """In parts to each of `ranks`, where others of its host are to read it, or not; returns where they can."""
        answers: list[str] = []
        for part in self._parts(load):
            data = b"".join(part)
            calls = {rank: on_rank.add(number, data, not answers, share) for rank, share in ranks.items()}
            answers = self._ranks.ask_each(calls)
        return dict(zip(ranks, answers, strict=True))

    def _attach(self, paths: Mapping[int, str], number: int, load: Load) -> list[int]:
        """Have ranks read what is at these paths, where there is one; returns those that cannot."""
        room = sum(pickled.room for pickled in load.values())
        calls = {rank: on_rank.attach(number, path, room) for rank, path in paths.items() if path}
        there = dict(zip(calls, self._ranks.ask_each(calls), strict=True)) if calls else {}
        return [rank for rank in paths if not there.get(rank)]

    def _parts(self, load: Load) -> Iterator[list[memoryview]]:
        """All of it, one object after the other, in parts of the same size; each is told of before it is taken."""
        name = ""

        def pieces() -> Iterator[memoryview]:
            nonlocal name
            for name in load:
                yield from load[name].pieces()

        for part in shared.portions(pieces(), PART):
            share = self._done / (self._whole * self._rounds)
            self._progress(f"ddip: pushing {name}, {size_text(self._packed[name].size)}", share)
            self._done += sum(piece.nbytes for piece in part)
            yield part

    def _ensure_wanted(self) -> None:
        if self._button.pressed:
            self._button.take()
            raise RequestInterrupted("pushing was interrupted")


def staged(errors_by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Raise TransferError if a rank could not unpickle what was pushed."""
    errors = {
        name: f"{error} ({_where(errors_by_rank, name)})"
        for rank in errors_by_rank
        for name, error in errors_by_rank[rank].items()
    }
    if errors:
        raise TransferError(f"nothing was pushed: {reasons(errors, 'cannot be unpickled there')}")


def _where(errors_by_rank: Mapping[int, Mapping[str, str]], name: str) -> str:
    return ranks_text([rank for rank, errors in errors_by_rank.items() if name in errors])


def reasons(errors: Mapping[str, str], what: str) -> str:
    """What each name suffers from, in one line."""
    return "; ".join(f"{name} {what}: {error}" for name, error in errors.items())
