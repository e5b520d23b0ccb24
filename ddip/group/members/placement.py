"""Who is which rank, on which device: pure functions, no processes."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from ddip.cluster.reach import Reach
from ddip.errors import BadInput
from ddip.protocol.rank_spec import has_nccl

CPU = "cpu"
SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Variable that has NCCL 2.30 put several ranks on one GPU."""


@dataclass(frozen=True)
class HostRequest:
    """A host that somebody asked for, as ssh knows it."""

    name: str
    count: int | None = None
    """Ranks on it; None: not said."""

    def __str__(self) -> str:
        return self.name if self.count is None else f"{self.name}:{self.count}"


ALL: Literal["all"] = "all"
"""All GPUs of a host."""


@dataclass(frozen=True)
class Request:
    """What somebody asked for; None: not said."""

    n: int | None = None
    gpus: tuple[int, ...] | Literal["all"] | None = None
    backend: str | None = None
    app: str | None = None
    hosts: tuple[HostRequest, ...] = ()
    """None: the machine that the notebook is on."""
    reach: Reach = Reach()
    """How the hosts are reached."""

    def after(self, old: Request) -> Request:
        """This request to a group that `old` made: the app stays unless another is named, where neither ranks nor
        GPUs nor hosts are asked for, they and the backend stay too, and hosts stay unless others are named."""
        app = self.app or old.app
        same = self.reach.asked == old.reach.asked
        elsewhere = bool(self.hosts) or (self.reach.finds and not same)
        hosts, reach = (self.hosts, self.reach) if elsewhere else (old.hosts, old.reach)
        if self.n is None and self.gpus is None and not elsewhere:
            return Request(old.n, old.gpus, self.backend or old.backend, app, hosts, reach)
        if not elsewhere:  # the counts of hosts that were asked for before are over
            hosts = tuple(HostRequest(host.name) for host in hosts)
        if not elsewhere and reach.attached is not None and self.n is not None:  # of the whole cluster
            attached = replace(reach.attached, n=self.n)
            hosts = tuple(HostRequest(seat.name, count) for seat, count in attached.counts())
            return Request(None, self.gpus, self.backend, app, hosts, replace(reach, attached=attached))
        return Request(self.n, self.gpus, self.backend, app, hosts, reach)


@dataclass(frozen=True)
class HostHas:
    """What a host has for ranks."""

    name: str
    """For messages; empty for the machine that the notebook is on."""
    gpus: int


@dataclass(frozen=True)
class GroupSpec:
    """A group as somebody asked for it: one entry a rank."""

    gpus: tuple[int | None, ...]
    """GPU of each rank as its host counts GPUs, or None for the CPU."""
    backend: str
    notice: str = ""
    """What the user should be told about it; may be empty."""
    on: tuple[int, ...] = ()
    """Number of each rank's host, rising; empty: all are on host 0."""

    def host(self, rank: int) -> int:
        """Number of the host that `rank` is on."""
        return self.on[rank] if self.on else 0

    @property
    def hosts(self) -> list[int]:
        """Numbers of the hosts that have ranks."""
        return sorted(set(self.on)) or [0]

    def ranks_on(self, host: int) -> list[int]:
        """The ranks of a host; its ``LOCAL_RANK`` is a rank's place among them."""
        return [rank for rank in range(self.size) if self.host(rank) == host]

    @property
    def size(self) -> int:
        return len(self.gpus)

    @property
    def on_gpus(self) -> bool:
        return self.gpus[0] is not None

    def device_name(self, rank: int) -> str:
        """``cpu`` or ``GPU 2``: for messages to users."""
        return CPU if self.gpus[rank] is None else f"GPU {self.gpus[rank]}"

    def describe(self, hosts: Sequence[HostRequest] = ()) -> str:
        """Ranks, devices and backend in one line; on `hosts`, or this machine."""
        where = "GPU " + ", ".join(map(str, self.gpus)) if self.on_gpus else "the CPU"
        of = f" of {', '.join(host.name for host in hosts)}" if hosts else ""
        return f"{self.size} rank{'s' * (self.size > 1)} on {where}{of}, {self.backend}"

    def visible(self, host: int = 0) -> tuple[int, ...]:
        """The GPUs that ranks on `host` are to see, in this order: ``cuda:LOCAL_RANK`` is then a rank's own GPU."""
        gpus = [self.gpus[rank] for rank in self.ranks_on(host)]
        return tuple(dict.fromkeys(gpu for gpu in gpus if gpu is not None))

    def device(self, rank: int) -> str:
        """torch's name of the rank's device, as the rank counts devices."""
        gpu = self.gpus[rank]
        return CPU if gpu is None else f"cuda:{self.visible(self.host(rank)).index(gpu)}"


def parse_count(typed: str) -> int:
    """The N of ``-n N``."""
    if not typed.isdecimal() or int(typed) < 1:
        raise BadInput(f"-n {typed}: type a number of ranks, 1 or more, such as -n 2")
    return int(typed)


def parse_gpus(words: Sequence[str], available: int, host: str = "") -> list[int]:
    """The GPUs of ``-g all``, ``-g 0,2,3`` or ``-g 3 1``, in the order given; a GPU may come twice.

    `available` are on the `host`; empty: this machine.
    """
    typed, machine = "-g " + " ".join(words), host or "this machine"
    have = f"{machine} has GPU 0 to {available - 1}" if available > 1 else f"{machine} has only GPU 0"
    if not available:
        where, instead = (f"on {host}", "-n 2 instead") if host else ("here", "%makedip -n 2")
        raise BadInput(f"{typed}: there is no GPU {where}; type {instead} for two ranks on the CPU")
    items = [item for word in words for item in word.split(",") if item]
    if items == [ALL]:
        return list(range(available))
    for item in items:
        if not item.isdecimal():
            raise BadInput(f"{typed}: {item!r} is no GPU; type numbers, such as -g 0,1, or -g all")
        if int(item) >= available:
            raise BadInput(f"{typed}: there is no GPU {int(item)}; {have}")
    if not items:
        raise BadInput(f"{typed}: type numbers, such as -g 0,1, or -g all")
    return [int(item) for item in items]


def parse_ranks(words: Sequence[str], world_size: int, option: str) -> list[int]:
    """Ranks out of ``0,2``, ``0 2``, ``1-3`` or ``all``, in the order typed, each once."""
    typed = f"{option} " + " ".join(words)
    last = world_size - 1
    have = f"this group has ranks 0 to {last}" if last else "this group has only rank 0"
    ranks: dict[int, None] = {}
    for item in [item for word in words for item in word.split(",") if item]:
        first, _, end = item.partition("-")
        if item == "all":
            ranks |= dict.fromkeys(range(world_size))
        elif first.isdecimal() and (not end or end.isdecimal()) and not item.endswith("-"):
            for rank in range(int(first), int(end or first) + 1):
                if rank > last:
                    raise BadInput(f"{typed}: there is no rank {rank}; {have}")
                ranks[rank] = None
        else:
            raise BadInput(f"{typed}: {item!r} is no rank; {have}: type {option} 0, {option} 0,1 or {option} all")
    if not ranks:
        raise BadInput(f"{typed}: no rank; {have}")
    return list(ranks)


def check_ranks(ranks: object, world_size: int, what: str) -> list[int]:
    """The `ranks` that a program has given as `what`; raises BadInput unless each is a rank of the group, once."""
    last = world_size - 1
    have = f"this group has ranks 0 to {last}" if last else "this group has only rank 0"
    if isinstance(ranks, (str, bytes)) or not isinstance(ranks, Iterable):
        raise BadInput(f"{what}={ranks!r}: give a list of ranks, such as [0]; {have}")
    given, found = list(ranks), []
    typed = f"{what}={given!r}"
    for rank in given:
        if isinstance(rank, bool) or not hasattr(rank, "__index__"):
            raise BadInput(f"{typed}: {rank!r} is no rank; {have}")
        number = operator.index(rank)
        if not 0 <= number <= last:
            raise BadInput(f"{typed}: there is no rank {number}; {have}")
        if number in found:
            raise BadInput(f"{typed}: rank {number} is there twice")
        found.append(number)
    return found


def parse_hosts(typed: str) -> tuple[HostRequest, ...]:
    """The hosts of ``--hosts h1:4,h2:4``, in the order given."""
    hosts = []
    for item in filter(None, typed.split(",")):
        name, colon, count = item.rpartition(":")
        if colon and not count.isdecimal() and re.fullmatch(r"[\w.@-]+", name):
            raise BadInput(f"--hosts {typed}: {item!r}: after the colon comes the number of ranks, such as {name}:4")
        if not colon or not count.isdecimal():
            name, count = item, ""
        if not re.fullmatch(r"[\w.%@\[\]:+-]+", name) or name.startswith("-") or count == "0":
            raise BadInput(
                f"--hosts {typed}: {item!r} is no host; type names as ssh knows them, such as --hosts h1:4,h2:4"
            )
        hosts.append(HostRequest(name, int(count) if count else None))
    names = [host.name for host in hosts]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise BadInput(f"--hosts {typed}: {twice[0]} is there twice; type it once, with the number of all its ranks")
    if not hosts:
        raise BadInput(f"--hosts {typed}: type names as ssh knows them, such as --hosts h1:4,h2:4")
    return tuple(hosts)


def resolve(request: Request, available: int, nccl_shares: bool = False) -> GroupSpec:
    """The group that is asked for, on a machine with `available` GPUs. `nccl_shares`: it may be told to share a GPU."""
    return resolve_on(request, [HostHas("", available)], nccl_shares)


def resolve_on(request: Request, hosts: Sequence[HostHas], nccl_shares: bool = False) -> GroupSpec:
    """The same on `hosts`, in this order."""
    counts = [host.count for host in request.hosts] or [None] * len(hosts)
    placed = [_place(request, count, host) for count, host in zip(counts, hosts, strict=True)]
    on_gpus = {gpus[0] is not None: host for gpus, host in zip(placed, hosts, strict=True)}
    if len(on_gpus) > 1:
        with_gpus, without = on_gpus[True].name or "this machine", on_gpus[False].name or "this machine"
        raise BadInput(f"{with_gpus} has GPUs and {without} none: type -n for ranks on the CPU of each, or other hosts")
    gpus = tuple(gpu for one in placed for gpu in one)
    on = tuple(number for number, one in enumerate(placed) for _ in one) if len(hosts) > 1 else ()
    backend = request.backend
    if False in on_gpus:
        if backend is not None and has_nccl(backend):
            raise BadInput(f"-b {backend}: nccl needs GPUs; leave out -b, and ranks on the CPU use gloo")
        return GroupSpec(gpus, backend or "gloo", on=on)
    if any(len(set(one)) < len(one) for one in placed):
        if backend is not None and has_nccl(backend) and not nccl_shares:
            raise BadInput(
                f"-b {backend}: two ranks share a GPU, which nccl does only with {SHARES}=1 in the environment of the "
                "notebook (NCCL 2.30 and later; for tests, it is slow); leave out -b, and they use gloo"
            )
        if backend is None:
            return GroupSpec(gpus, "gloo", "two ranks share a GPU, which nccl does not do: the backend is gloo", on)
    return GroupSpec(gpus, backend or "cpu:gloo,cuda:nccl", on=on)


def _place(request: Request, count: int | None, host: HostHas) -> tuple[int | None, ...]:
    """The GPU of each rank on one `host`, of which `count` were asked for there."""
    n, gpus, available = request.n, request.gpus, host.gpus
    if gpus is not None:
        chosen = tuple(parse_gpus([ALL] if isinstance(gpus, str) else list(map(str, gpus)), available, host.name))
        for option, asked in ((f"-n {n}", n), (f"{host.name}:{count}", count)):
            if asked is not None and asked != len(chosen):
                raise BadInput(
                    f"{option} and -g with {len(chosen)} GPUs: leave out {'-n' if asked is n else 'the number'}, "
                    "there is one rank on each GPU of -g"
                )
        return chosen
    if n is not None and count is not None and n != count:
        raise BadInput(f"-n {n} and {host.name}:{count}: leave out one of them; -n is the number of ranks on each host")
    if n is None and count is not None and available:
        if count > available:
            has = f"{host.name} has {available} GPU{'s' * (available > 1)}"
            raise BadInput(f"{host.name}:{count}: {has}; type -n {count} for ranks on the CPU of each host")
        return tuple(range(count))
    if n is None and count is None and available:
        return tuple(range(available))
    return (None,) * parse_count(str(next((asked for asked in (n, count) if asked is not None), 2)))


@dataclass(frozen=True)
class DeviceBinding:
    """What an existing engine was started for: the GPUs it sees (none: it never touched one), and its local rank."""

    visible: tuple[int, ...]
    gpu: int | None
    host: int = 0
    """Number of the host that it is on."""


def keep(berths: Sequence[DeviceBinding], new: GroupSpec) -> list[int | None]:
    """For each rank of the `new` group the index of the engine that can be it, or None where a new engine is needed.

    An engine can stay where its device stays: its tensors are there, and a process cannot change the GPUs it sees.
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


def parse_source(typed: Sequence[str] | None, size: int) -> tuple[int | None, list[str]]:
    """``--from 0 model opt``: the rank and the names; raises BadInput."""
    if typed is None:
        return None, []
    what = f"--from {' '.join(typed)}"
    if not typed[0].isdecimal() or int(typed[0]) >= size:
        which = f"type a rank from 0 to {size - 1} and names of its variables"
        raise BadInput(f"{what}: {which}, such as --from 0 model opt")
    names = list(typed[1:])
    if not names or not all(name.isidentifier() for name in names):
        raise BadInput(f"{what}: type names of variables of rank {typed[0]}, such as --from {typed[0]} model opt")
    return int(typed[0]), names
