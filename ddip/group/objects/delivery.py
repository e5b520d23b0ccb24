"""Pickled objects on their way to ranks: over the network once a host, and in the memory of each host once.

small                       in one message to each rank
large   beside the notebook the notebook writes it into memory that the ranks read, and one message to each says where
        on another host     in parts to one rank there, which writes it into such memory; the others of its host read it
        where that fails    in parts to each rank                                             protocol/objects/shared.py

What is large travels in loads. Memory that ranks read lives until they have let go of all that is in it, so each large
object has a load of its own; small ones share one.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from ddip.cluster.processes.host import LocalHost
from ddip.errors import RequestInterrupted, TransferError, ranks_text
from ddip.group import stopping
from ddip.group.members.ranks import Ranks
from ddip.output.progress import Report
from ddip.output.tables.tables import size_text
from ddip.protocol import on_rank
from ddip.protocol.objects import shared
from ddip.protocol.objects.pickling import Pickled
from ddip.protocol.objects.shared import SharedBytes
from ddip.protocol.on_rank import RemoteCall
from ddip.protocol.reports import Paths, Place, Put

PART = 1 << 24
"""Bytes of an object that travel at once."""
LARGE = 1 << 21
"""More bytes than that, all objects together, do not travel in one message to each rank: less is there sooner so."""
LARGE_BESIDE = 1 << 17
"""The same where all ranks are beside the notebook, which writes it once; and of an object that one of them packs."""
LARGE_ELSEWHERE = 1 << 20
"""The same where several ranks of another host get them: their network may be slow."""
Load: TypeAlias = "Mapping[str, Pickled]"
"""What travels together, by name."""
_numbers = itertools.count(1)
"""Of pushes."""


def deliver(ranks: Ranks, packed: Load, along: Sequence[str], to: Sequence[int], progress: Report) -> None:
    """Put pickled objects into the namespaces of the ranks `to`: all of them, or none.

    The names `along` replace nothing there.
    """
    number = next(_numbers)
    with stopping.button() as button:
        try:
            with contextlib.ExitStack() as held:
                delivery = _Delivery(ranks, packed, along, to, progress, button, held)
                put = delivery.put(number)
            ensure_put(put)
        except BaseException as error:
            ranks.tell(to, on_rank.drop(number))
            if isinstance(error, RequestInterrupted):
                raise RequestInterrupted(f"nothing was pushed: {error}") from None
            raise
        ranks.tell([rank for rank, its in put.items() if its["replaces"]], on_rank.settle())


def _loads(packed: Load) -> list[Load]:
    """What travels together: each large object by itself, all others in one."""
    large = [name for name, pickled in packed.items() if pickled.size > LARGE]
    rest = {name: pickled for name, pickled in packed.items() if name not in large}
    return [*([rest] if rest else []), *({name: packed[name]} for name in large)]


def _places(loads: Sequence[Load], names: Iterable[str]) -> list[Place]:
    """Where each object lies, in the order of `names`."""
    places: dict[str, Place] = {}
    for number, load in enumerate(loads):
        begin = 0
        for name, pickled in load.items():
            places[name] = (name, number, begin, pickled.sizes)
            begin += pickled.room
    return [places[name] for name in names]


def _room(load: Load) -> int:
    return sum(pickled.room for pickled in load.values())


class _Delivery:
    """One; `held` keeps what ranks read until they have read it."""

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
        self._beside, self._elsewhere = self._by_host(to)
        self._whole, self._done = sum(pickled.room for pickled in packed.values()), 0
        self._rounds = bool(self._beside) + bool(self._elsewhere)
        """How often all of it is sent, or written."""
        self._sends_again = False

    @property
    def _is_large(self) -> bool:
        """Is it too large for one message to each rank?"""
        if not self._elsewhere:
            return self._whole > LARGE_BESIDE
        return self._whole > (LARGE_ELSEWHERE if any(len(its) > 1 for its in self._elsewhere) else LARGE)

    def put(self, push: int) -> dict[int, Put]:
        """Have all of it put into the namespaces of the ranks, where it can be; returns what became of it there."""
        if not self._is_large:
            small = bytearray().join(pickled.joined() for pickled in self._packed.values())
            return self._ask(self._to, on_rank.put(push, _places([self._packed], self._packed), self._along, small))
        loads = _loads(self._packed)
        places, paths = _places(loads, self._packed), self._lay_beside(loads) if self._beside else {}
        for number, load in enumerate(loads):
            missed = [] if paths else [*self._beside]
            missed += self._send_once_a_host(self._elsewhere, number, load) if self._elsewhere else []
            self._send_again(missed, number, load)
        there = self._ask(self._beside, on_rank.put(push, places, self._along, b"", paths))
        there |= self._ask([rank for its in self._elsewhere for rank in its], on_rank.put(push, places, self._along))
        unread = [rank for rank, its in there.items() if its["unread"]]
        for number, load in enumerate(loads):
            self._send_again(unread, number, load)
        return there | self._ask(unread, on_rank.put(push, places, self._along))

    def _ask(self, ranks: Sequence[int], call: RemoteCall[Put]) -> dict[int, Put]:
        return dict(zip(ranks, self._ranks.ask(ranks, call), strict=True)) if ranks else {}

    def _by_host(self, to: Sequence[int]) -> tuple[list[int], list[list[int]]]:
        """The ranks that are beside the notebook, and those of each other host."""
        by_host: dict[int, list[int]] = {}
        for rank in to:
            by_host.setdefault(self._ranks.members[rank].binding.host, []).append(rank)
        beside = [host for host in by_host if isinstance(self._ranks.cluster.hosts[host], LocalHost)]
        here = [rank for host in beside for rank in by_host.pop(host)]
        return here, list(by_host.values())

    def _lay_beside(self, loads: Sequence[Load]) -> Paths:
        """Write it where the ranks beside the notebook read it; returns where; nothing: that cannot be."""
        paths: Paths = {}
        with contextlib.ExitStack() as laid:
            try:
                for number, load in enumerate(loads):
                    memory = laid.enter_context(SharedBytes(self._ranks.cluster.run_folder))
                    for part in self._parts(load):
                        self._ensure_wanted()
                        memory.write(part)
                    paths[number] = memory.path, _room(load)
            except OSError:  # there is no room
                return {}
            self._held.push(laid.pop_all())
        return paths

    def _send_again(self, ranks: Sequence[int], number: int, load: Load) -> None:
        """In parts to each of `ranks`, which could not read it where it is."""
        if ranks:
            self._rounds += not self._sends_again
            self._sends_again = True
            self._send(dict.fromkeys(ranks, False), number, load)

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
        calls = {rank: on_rank.attach(number, path, _room(load)) for rank, path in paths.items() if path}
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


def ensure_put(put: Mapping[int, Put]) -> None:
    """Raise TransferError if a rank could not unpickle what was pushed."""
    errors = {name: f"{error} ({_where(put, name)})" for its in put.values() for name, error in its["errors"].items()}
    if errors:
        raise TransferError(f"nothing was pushed: {reasons(errors, 'cannot be unpickled there')}")


def _where(put: Mapping[int, Put], name: str) -> str:
    return ranks_text([rank for rank, its in put.items() if name in its["errors"]])


def reasons(errors: Mapping[str, str], what: str) -> str:
    """What each name suffers from, in one line."""
    return "; ".join(f"{name} {what}: {error}" for name, error in errors.items())
