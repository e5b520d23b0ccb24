"""Find the address and interface by which each host of a group talks to the others, from routes, not names.

A host's name may resolve to 127.0.1.1, to nothing, or to another host's address, and a host may have several networks.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Sequence
from dataclasses import dataclass

from ddip.cluster.processes import on_host
from ddip.cluster.processes.host import Host, HostLost
from ddip.errors import GroupError
from ddip.group.members import host_facts as host_module

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Network:
    """Address and interface of one host in a group."""

    address: str
    interface: str

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"


def of_hosts(hosts: Sequence[Host]) -> list[Network]:
    """Return the network of each of `hosts`, which have ranks of one group; the first is rank 0's.

    Raises GroupError if one of them has no route to the first.
    """
    if len(hosts) == 1:
        return [Network(LOOPBACK, host_module.loopback_name())]
    first, *others = hosts
    known = next((host.address for host in others if _is_usable(host.address)), on_host.ELSEWHERE)
    address = first.address if _is_usable(first.address) else _find_route(first, known).address
    ways = [_find_route(host, address) for host in others]
    back = _find_route(first, ways[0].address)
    if back.address != address:  # the first host has several networks, and reached the notebook by another one
        ways = [_find_route(host, back.address) for host in others]
    return [back, *ways]


def _is_usable(address: str) -> bool:
    """Return whether other hosts can reach `address`, that is, it is set and not a loopback address."""
    return bool(address) and not address.startswith("127.") and address != "::1"


def _find_route(host: Host, to: str) -> Network:
    name = host.name or "this machine"
    try:
        address, interface = host.ask(on_host.find_route, to)
    except (HostLost, concurrent.futures.TimeoutError) as error:
        raise GroupError(str(error)) from None
    if not address or not _is_usable(address):
        raise GroupError(f"{name} has no route to {to}, the address of another host of the group")
    return Network(address, interface)
