"""Find the address and interface by which each host of a group talks to the others, and which hosts cannot.

Addresses come from routes, not names: a host's name may resolve to 127.0.1.1, to nothing, or to another host's address,
and a host may have several networks. In a partition, the notebook still reaches all hosts, but some of them cannot open
connections to others. Hosts that try each other show this, whatever their ranks do.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from ddip.cluster.processes import on_host
from ddip.cluster.processes.host import NEEDED_SECONDS, Host, HostLost, wait_for
from ddip.errors import GroupError

LOOPBACK = "127.0.0.1"
MOST_GAPS = 4
"""Number of pairs of hosts that a message names."""
OPEN = (
    "the hosts of a group must reach each other at all ports from 1024 on; open the firewall between them, or name "
    "another network with GLOO_SOCKET_IFNAME in the notebook"
)


@dataclass(frozen=True)
class Network:
    """Address and interface of one host in a group."""

    address: str
    interface: str

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"


def loopback_name() -> str:
    """Return the name of the loopback interface."""
    return "lo" if sys.platform == "linux" else "lo0"


def of_hosts(hosts: Sequence[Host]) -> list[Network]:
    """Return the network of each of `hosts`, in order, which have ranks of one group.

    The first host is rank 0's. Asks the hosts, and waits. Raises GroupError if one of them has no route to the first.
    """
    if len(hosts) == 1:
        return [Network(LOOPBACK, loopback_name())]
    first, *others = hosts
    known = next((host.address for host in others if _is_usable(host.address)), on_host.ELSEWHERE)
    address = first.address if _is_usable(first.address) else _find_route(first, known).address
    ways = [_find_route(host, address) for host in others]
    back = _find_route(first, ways[0].address)
    if back.address != address:  # the first host has several networks, and reached the notebook by another one
        ways = [_find_route(host, back.address) for host in others]
    return [back, *ways]


@dataclass(frozen=True)
class Gap:
    """A host that cannot connect to another one; both as name and address."""

    source: str
    target: str
    why: str


@dataclass(frozen=True)
class Partition:
    """Hosts of a group that cannot reach each other."""

    gaps: Sequence[Gap]
    since: float
    """Time of the first try that failed, in seconds since the epoch."""

    def __str__(self) -> str:
        noticed = time.strftime("%H:%M:%S", time.localtime(self.since))
        return f"{gaps_text(self.gaps)}, since {noticed} or earlier: {OPEN}"


def gaps_text(gaps: Sequence[Gap]) -> str:
    """Describe `gaps` for a message; two in opposite directions become one clause.

    >>> both = Gap("h1, 10.0.0.1", "h2, 10.0.0.2", "no answer"), Gap("h2, 10.0.0.2", "h1, 10.0.0.1", "no answer")
    >>> gaps_text(both)
    'h1, 10.0.0.1, and h2, 10.0.0.2, cannot reach each other (no answer)'
    >>> gaps_text(both[1:])
    'h2, 10.0.0.2, cannot reach h1, 10.0.0.1 (no answer)'
    """
    pairs = [(gap.source, gap.target) for gap in gaps]
    clauses = []
    for gap in gaps:
        if (gap.target, gap.source) not in pairs:
            clauses.append(f"{gap.source}, cannot reach {gap.target} ({gap.why})")
        elif gap.source < gap.target:
            clauses.append(f"{gap.source}, and {gap.target}, cannot reach each other ({gap.why})")
    more = [f"and {len(clauses) - MOST_GAPS} more pairs of hosts"] if len(clauses) > MOST_GAPS else []
    return "; ".join([*clauses[:MOST_GAPS], *more])


def find_gaps(
    hosts: Sequence[Host], networks: Sequence[Network], seconds: float, answer_seconds: float = NEEDED_SECONDS
) -> list[Gap]:
    """Have each of `hosts` try to connect to all others for `seconds`, and return each pair that failed.

    Raises HostLost if a host does not answer the notebook within `answer_seconds`, and RuntimeError or OSError if one
    cannot open a port.
    """
    names = [f"{host.name or 'this machine'}, {own.address}" for host, own in zip(hosts, networks, strict=True)]
    opened: list[Future[int]] = []
    found: dict[int, Future[list[str]]] = {}
    try:
        opened += (host.begin(on_host.open_port, own.address) for host, own in zip(hosts, networks, strict=True))
        ports = [wait_for(host, port, answer_seconds) for host, port in zip(hosts, opened, strict=True)]
        targets = [(own.address, port) for own, port in zip(networks, ports, strict=True)]
        for number in sorted(
            range(len(hosts)), key=lambda number: not hosts[number].name
        ):  # this machine's call blocks
            others = [*targets[:number], *targets[number + 1 :]]
            found[number] = hosts[number].begin(on_host.try_connections, others, seconds)
        gaps = []
        for number, host in enumerate(hosts):
            reasons: list[str] = wait_for(host, found[number], answer_seconds)
            other_names = [*names[:number], *names[number + 1 :]]
            gaps += [Gap(names[number], other, why) for other, why in zip(other_names, reasons, strict=True) if why]
        return gaps
    finally:
        for host, port in zip(hosts, opened, strict=False):
            port.add_done_callback(partial(_release_port, host))  # also of a late answer


def _release_port(host: Host, port: Future[int]) -> None:
    if port.exception() is None:
        host.begin(on_host.release_port, port.result())


def _is_usable(address: str) -> bool:
    """Return whether other hosts can reach `address`, that is, it is set and not a loopback address."""
    return bool(address) and not address.startswith("127.") and address != "::1"


def _find_route(host: Host, to: str) -> Network:
    name = host.name or "this machine"
    try:
        address, interface = wait_for(host, host.begin(on_host.find_route, to))
    except HostLost as error:
        raise GroupError(str(error)) from None
    if not address or not _is_usable(address):
        raise GroupError(f"{name} has no route to {to}, the address of another host of the group")
    return Network(address, interface)
