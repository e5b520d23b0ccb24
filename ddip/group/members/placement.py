"""Assign ranks to hosts, devices and engines, and parse such requests: pure functions, no processes."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddip.cluster.reach import THIS_MACHINE, Reach
from ddip.errors import BadInput
from ddip.protocol.rank_spec import has_nccl

CPU = "cpu"
SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Environment variable that lets NCCL 2.30 or later put several ranks on one GPU."""


@dataclass(frozen=True)
class HostRequest:
    """A requested host.

    Raises
    ------
    BadInput
        If `count` is less than 1.
    """

    name: str
    """Name of the host for ``ssh``; ``localhost`` is the notebook's machine."""
    count: int | None = None
    """Number of ranks on the host. None means the number that the request sets for each host, by default one per GPU,
    or two on a host without GPUs."""

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise BadInput(f"{self}: type a number of ranks, 1 or more, such as {self.name}:4")

    def __str__(self) -> str:
        return self.name if self.count is None else f"{self.name}:{self.count}"


ALL: Literal["all"] = "all"
"""All GPUs of a host."""


@dataclass(frozen=True)
class Request:
    """A requested group, for `Group.change` and `Group.restart`.

    The attributes are those parameters of `Group` that have the same names. An attribute that is None is unspecified.
    """

    n: int | None = None
    """Number of ranks on the CPU of each host."""
    gpus: tuple[int, ...] | Literal["all"] | None = None
    """GPU of each rank on each host, in rank order."""
    backend: str | None = None
    """Backend of ``torch.distributed``."""
    app: str | None = None
    """Name of the framework adapter to prepare on every rank."""
    hosts: tuple[HostRequest, ...] = ()
    """Hosts of the group; if empty, the notebook's machine, or the present hosts of a group that changes."""
    reach: Reach = Reach()
    """Settings for how ddip finds and connects to the hosts."""

    def after(self, old: Request) -> Request:
        """Complete this request to change a group that was made by the request `old`.

        The app and the hosts stay unless others are named. If no ranks, GPUs or hosts are requested, ranks and GPUs
        also stay, and so does the backend unless another is named.
        """
        app = self.app or old.app
        same_reach = self.reach.asked == old.reach.asked
        elsewhere = bool(self.hosts) or (self.reach.finds and not same_reach)
        hosts, reach = (self.hosts, self.reach) if elsewhere else (old.hosts, old.reach)
        if self.n is None and self.gpus is None and not elsewhere:
            return Request(old.n, old.gpus, self.backend or old.backend, app, hosts, reach)
        if not elsewhere:  # the rank counts per host of the old request no longer apply
            hosts = tuple(HostRequest(host.name) for host in hosts)
        if not elsewhere and reach.attached is not None and self.n is not None:  # then `n` is for the whole cluster
            attached = replace(reach.attached, n=self.n)
            hosts = tuple(HostRequest(seat.name, count) for seat, count in attached.counts())
            return Request(None, self.gpus, self.backend, app, hosts, replace(reach, attached=attached))
        return Request(self.n, self.gpus, self.backend, app, hosts, reach)


@dataclass(frozen=True)
class HostDevices:
    """The devices that a host offers to ranks."""

    name: str
    """Its name in messages; empty for the notebook's machine."""
    gpus: int


@dataclass(frozen=True)
class GroupSpec:
    """The devices and hosts of a group's ranks: one entry per rank."""

    gpus: tuple[int | None, ...]
    """GPU of each rank as its host counts GPUs, or None for the CPU."""
    backend: str
    notice: str = ""
    """Message about it to the user; may be empty."""
    on: tuple[int, ...] = ()
    """Number of each rank's host, in ascending order; empty: all are on host 0."""

    def host(self, rank: int) -> int:
        """Return the number of the host that `rank` is on."""
        return self.on[rank] if self.on else 0

    @property
    def hosts(self) -> list[int]:
        """The numbers of the hosts that have ranks."""
        return sorted(set(self.on)) or [0]

    def ranks_on(self, host: int) -> list[int]:
        """Return the ranks on a host; a rank's index in this list is its ``LOCAL_RANK``."""
        return [rank for rank in range(self.size) if self.host(rank) == host]

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.gpus)

    @property
    def on_gpus(self) -> bool:
        """True if the ranks have GPUs; all have one, or none."""
        return self.gpus[0] is not None

    def device_name(self, rank: int) -> str:
        """Return the name of the rank's device for messages: ``cpu``, or for example ``GPU 2``."""
        return CPU if self.gpus[rank] is None else f"GPU {self.gpus[rank]}"

    def describe(self, hosts: Sequence[HostRequest] = ()) -> str:
        """Describe ranks, devices and backend in one line; empty `hosts`: this machine."""
        devices = "GPU " + ", ".join(map(str, self.gpus)) if self.on_gpus else "the CPU"
        hosts_text = f" of {', '.join(host.name for host in hosts)}" if hosts else ""
        return f"{self.size} rank{'s' * (self.size > 1)} on {devices}{hosts_text}, {self.backend}"

    def visible(self, host: int = 0) -> tuple[int, ...]:
        """Return the GPUs to make visible to ranks on `host`, each once; the Nth is ``cuda:N`` there."""
        gpus = [self.gpus[rank] for rank in self.ranks_on(host)]
        return tuple(dict.fromkeys(gpu for gpu in gpus if gpu is not None))

    def device(self, rank: int) -> str:
        """Return torch's name of the rank's device, as seen by the rank: ``cpu``, or for example ``cuda:0``."""
        gpu = self.gpus[rank]
        return CPU if gpu is None else f"cuda:{self.visible(self.host(rank)).index(gpu)}"


def parse_count(typed: str) -> int:
    """Parse the N of ``-n N``; raise BadInput if it is not a positive number."""
    if not typed.isdecimal() or int(typed) < 1:
        raise BadInput(f"-n {typed}: type a number of ranks, 1 or more, such as -n 2")
    return int(typed)


def parse_gpus(words: Sequence[str], available: int, host: str = "") -> list[int]:
    """Parse ``-g all``, ``-g 0,2,3`` or ``-g 3 1`` into GPUs in the order given; a GPU may come twice.

    `available`: number of GPUs on `host`; empty: this machine. Raises BadInput.
    """
    typed, machine = "-g " + " ".join(words), host or "this machine"
    range_text = f"{machine} has GPU 0 to {available - 1}" if available > 1 else f"{machine} has only GPU 0"
    if not available:
        location, instead = (f"on {host}", "-n 2 instead") if host else ("here", "%makedip -n 2")
        raise BadInput(f"{typed}: there is no GPU {location}; type {instead} for two ranks on the CPU")
    items = [item for word in words for item in word.split(",") if item]
    if items == [ALL]:
        return list(range(available))
    for item in items:
        if not item.isdecimal():
            raise BadInput(f"{typed}: {item!r} is not a GPU; type numbers, such as -g 0,1, or -g all")
        if int(item) >= available:
            raise BadInput(f"{typed}: there is no GPU {int(item)}; {range_text}")
    if not items:
        raise BadInput(f"{typed}: type numbers, such as -g 0,1, or -g all")
    return [int(item) for item in items]


def check_ranks(ranks: object, world_size: int, what: str) -> list[int]:
    """Return `ranks`, an argument named `what`, as a list; raise BadInput unless all are distinct ranks."""
    last = world_size - 1
    range_text = f"this group has ranks 0 to {last}" if last else "this group has only rank 0"
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise BadInput(f"{what}={ranks!r}: give a list of ranks, such as [0]; {range_text}")
    values, checked = list(ranks), []
    typed = f"{what}={values!r}"
    for rank in values:
        if isinstance(rank, bool) or not hasattr(rank, "__index__"):
            raise BadInput(f"{typed}: {rank!r} is not a rank; {range_text}")
        number = operator.index(rank)
        if not 0 <= number <= last:
            raise BadInput(f"{typed}: there is no rank {number}; {range_text}")
        if number in checked:
            raise BadInput(f"{typed}: rank {number} is listed twice")
        checked.append(number)
    return checked


def parse_hosts(typed: str) -> tuple[HostRequest, ...]:
    """Parse ``--hosts h1:4,h2:4`` into hosts in the order given; raise BadInput."""
    hosts = []
    for item in filter(None, typed.split(",")):
        if item.count(":") > 1 and "[" not in item:
            raise BadInput(f"--hosts {typed}: type an IPv6 address in brackets, such as [fd00::1]:4")
        name, colon, count = item.rpartition(":")
        if colon and not count.isdecimal() and re.fullmatch(r"[\w.@-]+", name):
            raise BadInput(f"--hosts {typed}: {item!r}: type the number of ranks after the colon, such as {name}:4")
        if not colon or not count.isdecimal():
            name, count = item, ""
        if not re.fullmatch(r"[\w.%@\[\]:+-]+", name) or name.startswith("-"):
            raise BadInput(
                f"--hosts {typed}: {item!r} is not a host; type names as ssh knows them, such as --hosts h1:4,h2:4"
            )
        hosts.append(HostRequest(name, int(count) if count else None))
    names = [host.name for host in hosts]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise BadInput(f"--hosts {typed}: {twice[0]} is listed twice; type it once, with the total number of its ranks")
    here = [name for name in names if name in THIS_MACHINE]
    if len(here) > 1:
        raise BadInput(
            f"--hosts {typed}: {here[0]} and {here[1]} are both this machine; type one of them, with the total number "
            "of its ranks"
        )
    if not hosts:
        raise BadInput(f"--hosts {typed}: type names as ssh knows them, such as --hosts h1:4,h2:4")
    return tuple(hosts)


def place_group(request: Request, hosts: Sequence[HostDevices], nccl_shares: bool = False) -> GroupSpec:
    """Choose device, backend and host of each rank of `request`, on `hosts` in this order.

    Raises BadInput. `hosts` has one entry per requested host, or the notebook's machine alone. `nccl_shares`: nccl may
    share a GPU between ranks.
    """
    counts = [host.count for host in request.hosts] or [None] * len(hosts)
    placed = [_place_on_host(request, count, host) for count, host in zip(counts, hosts, strict=True)]
    on_gpus = {gpus[0] is not None: host for gpus, host in zip(placed, hosts, strict=True)}
    if len(on_gpus) > 1:
        with_gpus, without = on_gpus[True].name or "this machine", on_gpus[False].name or "this machine"
        raise BadInput(
            f"{with_gpus} has GPUs and {without} has none; type -n for ranks on the CPUs of both, or choose other hosts"
        )
    gpus = tuple(gpu for on_host in placed for gpu in on_host)
    on = tuple(number for number, on_host in enumerate(placed) for _ in on_host) if len(hosts) > 1 else ()
    backend = request.backend
    if False in on_gpus:
        if backend is not None and has_nccl(backend):
            raise BadInput(f"-b {backend}: nccl needs GPUs; leave out -b to use gloo on the CPU")
        return GroupSpec(gpus, backend or "gloo", on=on)
    if any(len(set(on_host)) < len(on_host) for on_host in placed):
        if backend is not None and has_nccl(backend) and not nccl_shares:
            raise BadInput(
                f"-b {backend}: two ranks share a GPU, which nccl supports only with {SHARES}=1 in the environment of "
                "the notebook (NCCL 2.30 and later; slow, for tests); leave out -b to use gloo"
            )
        if backend is None:
            return GroupSpec(
                gpus, "gloo", "two ranks share a GPU, which nccl does not support: the backend is gloo", on
            )
    return GroupSpec(gpus, backend or "cpu:gloo,cuda:nccl", on=on)


def _place_on_host(request: Request, count: int | None, host: HostDevices) -> tuple[int | None, ...]:
    """Return the GPU of each rank on `host`, or None for the CPU; `count`: ranks requested for this host.

    Raises BadInput if that contradicts `request`, or the host lacks a GPU.
    """
    n, gpus, available = request.n, request.gpus, host.gpus
    if gpus is not None:
        chosen = tuple(parse_gpus([ALL] if isinstance(gpus, str) else list(map(str, gpus)), available, host.name))
        for option, asked in ((f"-n {n}", n), (f"{host.name}:{count}", count)):
            if asked is not None and asked != len(chosen):
                raise BadInput(
                    f"{option} and -g with {len(chosen)} GPUs: leave out {'-n' if asked is n else 'the number'}, "
                    "because -g starts one rank on each of its GPUs"
                )
        return chosen
    if n is not None and count is not None and n != count:
        raise BadInput(f"-n {n} and {host.name}:{count}: leave out one of them; -n is the number of ranks on each host")
    if n is None and count is not None and available:
        if count > available:
            offer = f"{host.name} has {available} GPU{'s' * (available > 1)}"
            raise BadInput(f"{host.name}:{count}: {offer}; type -n {count} for ranks on the CPU of each host")
        return tuple(range(count))
    if n is None and count is None and available:
        return tuple(range(available))
    return (None,) * parse_count(str(next((asked for asked in (n, count) if asked is not None), 2)))


@dataclass(frozen=True)
class DeviceBinding:
    """The devices that an engine was started for: its own GPU, and all GPUs that it sees.

    An engine that sees no GPU has never used one.
    """

    visible: tuple[int, ...]
    gpu: int | None
    host: int = 0
    """Number of its host."""


def match_engines(berths: Sequence[DeviceBinding], new: GroupSpec) -> list[int | None]:
    """Return the index in `berths` of an engine for each rank of the `new` group; None: start another.

    `berths`: bindings of the running engines. An engine fits if its device stays the same: its tensors are there, and a
    process cannot change its visible GPUs.
    """
    free = dict(enumerate(berths))
    chosen: list[int | None] = []
    for rank, gpu in enumerate(new.gpus):
        host = new.host(rank)
        position = rank if gpu is None else new.visible(host).index(gpu)
        fit = next(
            (
                i
                for i, b in free.items()
                if b.host == host and b.gpu == gpu and (gpu is None or b.visible[position : position + 1] == (gpu,))
            ),
            None,
        )
        if fit is not None:
            del free[fit]
        chosen.append(fit)
    return chosen
