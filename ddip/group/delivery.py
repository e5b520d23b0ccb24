"""Pickled objects on their way to ranks: over the network once a host, and in the memory of each host once.

small                       in one message to each rank
large   beside the notebook the notebook writes it into memory that the ranks read            protocol/shared.py
        on another host     in parts to one rank there, which writes it into such memory; the others of its host read it
        where that fails    in parts to each rank
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from ddip.cluster.host import LocalHost
from ddip.errors import RequestInterrupted, TransferError, ranks_text
from ddip.group import stopping
from ddip.group.ranks import Ranks
from ddip.output.progress import Report
from ddip.output.sizes import size_text
from ddip.protocol import on_rank
from ddip.protocol.shared import SharedBytes

PART = 1 << 24
"""Bytes of an object that travel at once."""
LARGE = 1 << 21
"""More bytes than that, all objects together, do not travel in one message to each rank: less is there sooner so."""
LARGE_ELSEWHERE = 1 << 20
"""The same where several ranks of another host get them: their network may be slow."""
Packed: TypeAlias = "Mapping[str, bytes | bytearray]"


def deliver(ranks: Ranks, packed: Packed, to: Sequence[int], progress: Report) -> None:
    """Put pickled objects into the namespaces of the ranks `to`: all of them, or none."""
    with stopping.button() as button:
        try:
            delivery = _Delivery(ranks, packed, to, progress, button)
            if delivery.is_large:
                places = delivery.carry()
                errors = ranks.ask(to, on_rank.stage({}, places))
            else:
                errors = ranks.ask(to, on_rank.stage(dict(packed), {}))
            staged(dict(zip(to, errors, strict=True)))
        except BaseException as error:
            ranks.tell(to, on_rank.drop())
            if isinstance(error, RequestInterrupted):
                raise RequestInterrupted(f"nothing was pushed: {error}") from None
            raise
        ranks.ask(to, on_rank.commit(), stoppable=False)


class _Delivery:
    """One, of what is large."""

    def __init__(
        self, ranks: Ranks, packed: Packed, to: Sequence[int], progress: Report, button: stopping.Button
    ) -> None:
        self._ranks, self._packed, self._button = ranks, packed, button
        self._progress = progress
        self._beside, self._elsewhere = self._by_host(to)
        self._whole, self._done = sum(map(len, packed.values())), 0
        self._rounds = 1
        """How often all of it is sent, or written."""

    @property
    def is_large(self) -> bool:
        """Is it too large for one message to each rank?"""
        return self._whole > (LARGE_ELSEWHERE if any(len(its) > 1 for its in self._elsewhere) else LARGE)

    def carry(self) -> dict[str, tuple[int, int]]:
        """Have all of it in the memory of the ranks; returns where each object begins and ends there."""
        self._rounds = bool(self._beside) + bool(self._elsewhere)
        missed = self._lay_beside(self._beside) if self._beside else []
        missed += self._send_once_a_host(self._elsewhere) if self._elsewhere else []
        if missed:
            self._rounds += 1
            self._send(dict.fromkeys(missed, False))
        ends = list(itertools.accumulate(map(len, self._packed.values()), initial=0))
        return dict(zip(self._packed, itertools.pairwise(ends), strict=True))

    def _by_host(self, to: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """The ranks that are beside the notebook, and those of each other host."""
        by_host: dict[int, list[int]] = {}
        for rank in to:
            by_host.setdefault(self._ranks.members[rank].binding.host, []).append(rank)
        beside = [host for host in by_host if isinstance(self._ranks.cluster.hosts[host], LocalHost)]
        here = [rank for host in beside for rank in by_host.pop(host)]
        return here, list(by_host.values())

    def _lay_beside(self, ranks: list[int]) -> list[int]:
        """Returns the ranks that cannot read what was written."""
        try:
            shared = SharedBytes(self._ranks.cluster.run_folder)
        except OSError:
            return ranks
        with shared:
            try:
                for part in self._parts():
                    self._ensure_wanted()
                    shared.write(part)
            except OSError:  # there is no room
                return ranks
            return self._attach(dict.fromkeys(ranks, shared.path))

    def _send_once_a_host(self, hosts: Sequence[Sequence[int]]) -> list[int]:
        """Returns the ranks that cannot read what the first of their host has got."""
        paths = self._send({its[0]: len(its) > 1 for its in hosts})
        return self._attach({rank: paths[its[0]] for its in hosts for rank in its[1:]})

    def _send(self, ranks: Mapping[int, bool]) -> dict[int, str]:
        """In parts to each of `ranks`, where others of its host shall read it, or not; returns where they can."""
        answers: list[str] = []
        for number, part in enumerate(self._parts()):
            data = bytes(part)
            calls = {rank: on_rank.add(data, number == 0, share) for rank, share in ranks.items()}
            answers = self._ranks.ask_each(calls)
        return dict(zip(ranks, answers, strict=True))

    def _attach(self, paths: Mapping[int, str]) -> list[int]:
        """Have ranks read what is at these paths, where there is one; returns those that cannot."""
        calls = {rank: on_rank.attach(path, self._whole) for rank, path in paths.items() if path}
        there = dict(zip(calls, self._ranks.ask_each(calls), strict=True)) if calls else {}
        return [rank for rank in paths if not there.get(rank)]

    def _parts(self) -> Iterator[bytes | memoryview]:
        """All of it, one object after the other, in parts of the same size; each is told of before it is taken."""
        pieces: list[memoryview] = []
        for name, data in self._packed.items():
            left = memoryview(data)
            while left:
                if not pieces:
                    share = self._done / (self._whole * self._rounds)
                    self._progress(f"ddip: pushing {name}, {size_text(len(data))}", share)
                room = PART - sum(map(len, pieces))
                pieces.append(left[:room])
                left = left[room:]
                if sum(map(len, pieces)) == PART:
                    yield self._joined(pieces)
        if pieces:
            yield self._joined(pieces)

    def _joined(self, pieces: list[memoryview]) -> bytes | memoryview:
        """What they are together; none of them is left."""
        part = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        self._done += len(part)
        pieces.clear()
        return part

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
