"""Hosts that are reached by the engines of somebody else's ipyparallel cluster, which stays as it is.

Its engines do not become ranks: one of them on each host starts our agent there, as ssh does on other hosts, and what
notebook and agent say to each other goes by the controller of that cluster (``near_end.py``, ``far_end.py``).
"""

from __future__ import annotations

import ast
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as NoAnswer
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddip.cluster import folder, ssh
from ddip.errors import GroupError

if TYPE_CHECKING:
    from ipyparallel import Client

GONE = "no controller answers there"
ANSWER_SECONDS = 10.0
"""How long a controller, or an engine, may take to answer."""
WHERE = (
    "__import__('json').dumps([__import__('socket').gethostname(), __import__('sys').executable, "
    "[__import__('os').readlink(path) if 'ns' in path else open(path).read() for path in "
    "('/proc/sys/kernel/random/boot_id', '/proc/self/ns/net') if __import__('os').path.lexists(path)]])"
)
"""What an engine is asked: its host, its Python, and what no other host has."""


@dataclass(frozen=True)
class Seat:
    """A host of a cluster."""

    name: str
    engines: tuple[int, ...]
    python: str
    """That its engines run with."""


@dataclass(frozen=True)
class Attachment:
    """A cluster as it was found."""

    file: str
    """For clients of it."""
    seats: tuple[Seat, ...]
    n: int | None
    """How many ranks were asked for; None: as many as there are engines."""

    def ensure_enough(self) -> None:
        """Raise GroupError if there are not so many engines."""
        have = sum(len(seat.engines) for seat in self.seats)
        if self.n is not None and self.n > have:
            raise GroupError(
                f"-n {self.n}: that cluster has {have} engine{'s' * (have != 1)}; leave out -n to have all"
            )

    def counts(self) -> list[tuple[Seat, int]]:
        """How many ranks each host has: as many as there are engines, or as were asked for, in the order of hosts."""
        left = sum(len(seat.engines) for seat in self.seats) if self.n is None else self.n
        counts = []
        for seat in self.seats:
            count = min(left, len(seat.engines))
            left -= count
            if count:
                counts.append((seat, count))
        return counts


class Attached:
    """The way to hosts of a cluster: one process a host here, which speaks with one engine there."""

    def __init__(self, attachment: Attachment, python: str, setup: str) -> None:
        self._attachment, self._python, self._setup = attachment, python, setup

    def command(self, number: int, name: str) -> list[str]:
        """What starts the agent of host `number`."""
        seat = self._attachment.seats[number]
        python = self._python or ("" if self._setup else seat.python)
        engines = json.dumps(seat.engines)
        ours = [sys.executable, "-P", "-m", "ddip.cluster.near_end"]
        return [*ours, self._attachment.file, engines, python, self._setup]

    def why_lost(self, name: str, said: str) -> str:
        """What to tell the user."""
        if GONE in said:
            last = said.strip().rpartition("\n")[2]
            return f"{name}: {last}; start that cluster again, then type %makedip -r"
        python = next((seat.python for seat in self._attachment.seats if seat.name == name), "")
        reason = ssh.reason(name, said, self._python, self._setup)
        return reason if self._python or self._setup else f"{reason} (the Python of its engines is {python})"


def connect(file: str, heard: Callable[[dict[str, Any]], None] = lambda message: None) -> Client:
    """A client of the cluster whose connection file this is. Raises GroupError."""
    with folder.left_out():
        from ddip.cluster import ipp_private

    try:
        return ipp_private.LinkClient(file, heard, ANSWER_SECONDS)
    except (OSError, ValueError, KeyError, TimeoutError, NoAnswer) as error:
        raise GroupError(f"{file}: {GONE} ({str(error).strip() or 'no answer'})") from None


def ask(client: Client, engines: Sequence[int], expression: str) -> list[Any]:
    """The value of `expression` in each of these engines, whatever they run meanwhile. Raises GroupError."""
    from ddip.cluster import ipp_private

    content = {"code": "", "silent": True, "user_expressions": {"ddip": expression}}
    try:
        asked = [ipp_private.control(client, engine, "execute_request", content) for engine in engines]
    except KeyError as error:
        raise GroupError(f"engine {error} of that cluster has just ended; try again") from None
    values, deadline = [], time.monotonic() + ANSWER_SECONDS
    for engine, answer in zip(engines, asked, strict=True):
        try:
            value = answer.result(max(0.1, deadline - time.monotonic()))["user_expressions"]["ddip"]
        except NoAnswer:
            raise GroupError(f"engine {engine} of that cluster has not answered for {ANSWER_SECONDS:g} s") from None
        except KeyError:
            raise GroupError(f"engine {engine} of that cluster takes no requests of this kind") from None
        if value["status"] != "ok":
            raise GroupError(f"engine {engine} of that cluster: {value.get('ename')}: {value.get('evalue')}")
        values.append(ast.literal_eval(value["data"]["text/plain"]))
    return values


def look(file: str, name: str, n: int | None) -> Attachment:
    """Where the engines of a cluster are, in the order of their ids. Raises GroupError."""
    with _closing(connect(file)) as client:
        engines = sorted(client.ids)
        if not engines:
            raise GroupError(f"-c {name}: that cluster has no engines yet; start some, such as with ipcluster engines")
        seats: dict[str, list[Any]] = {}
        for engine, answer in zip(engines, ask(client, engines, WHERE), strict=True):
            host, python, ids = json.loads(answer)
            seats.setdefault(json.dumps([host, ids]), [host, python, []])[2].append(engine)
    return Attachment(file, tuple(_named(seats.values())), n)


def _named(seats: Any) -> Iterator[Seat]:
    """Hosts that call themselves the same get numbers."""
    taken: dict[str, int] = {}
    for host, python, engines in seats:
        taken[host] = taken.get(host, 0) + 1
        yield Seat(host if taken[host] == 1 else f"{host}#{taken[host]}", tuple(engines), python)


@contextlib.contextmanager
def _closing(client: Client) -> Iterator[Client]:
    try:
        yield client
    finally:
        client.close(linger=0)
