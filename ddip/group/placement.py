"""Who is which rank, on which device: pure functions, no processes."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ddip.errors import BadInput
from ddip.protocol.rank_spec import has_nccl

CPU = "cpu"
SHARES = "NCCL_MULTI_RANK_GPU_ENABLE"
"""Variable that has NCCL 2.30 put several ranks on one GPU."""


@dataclass(frozen=True)
class Request:
    """What somebody asked for; None: not said."""

    n: int | None = None
    gpus: tuple[int, ...] | None = None
    backend: str | None = None
    app: str | None = None

    def after(self, old: Request) -> Request:
        """This request to a group that `old` made: the app stays unless another is named, and where neither ranks nor
        GPUs are asked for, they and the backend stay too."""
        app = self.app or old.app
        if self.n is None and self.gpus is None:
            return Request(old.n, old.gpus, self.backend or old.backend, app)
        return Request(self.n, self.gpus, self.backend, app)


@dataclass(frozen=True)
class GroupSpec:
    """A group as somebody asked for it: one entry a rank."""

    gpus: tuple[int | None, ...]
    """GPU of each rank as the notebook counts GPUs, or None for the CPU."""
    backend: str
    notice: str = ""
    """What the user should be told about it; may be empty."""

    @property
    def size(self) -> int:
        return len(self.gpus)

    @property
    def on_gpus(self) -> bool:
        return self.gpus[0] is not None

    def device_name(self, rank: int) -> str:
        """``cpu`` or ``GPU 2``: for messages to users."""
        return CPU if self.gpus[rank] is None else f"GPU {self.gpus[rank]}"

    @property
    def visible(self) -> tuple[int, ...]:
        """The GPUs that its ranks shall see, in this order: ``cuda:LOCAL_RANK`` is then a rank's own GPU."""
        return tuple(dict.fromkeys(gpu for gpu in self.gpus if gpu is not None))

    def device(self, rank: int) -> str:
        """torch's name of the rank's device, as the rank counts devices."""
        gpu = self.gpus[rank]
        return CPU if gpu is None else f"cuda:{self.visible.index(gpu)}"


def parse_count(typed: str) -> int:
    """The N of ``-n N``."""
    if not typed.isdecimal() or int(typed) < 1:
        raise BadInput(f"-n {typed}: type a number of ranks, 1 or more, such as -n 2")
    return int(typed)


def parse_gpus(words: Sequence[str], available: int) -> list[int]:
    """The GPUs of ``-g all``, ``-g 0,2,3`` or ``-g 3 1``, in the order given; a GPU may come twice."""
    typed = "-g " + " ".join(words)
    have = f"this machine has GPU 0 to {available - 1}" if available > 1 else "this machine has only GPU 0"
    if not available:
        raise BadInput(f"{typed}: there is no GPU here; type %makedip -n 2 for two ranks on the CPU")
    items = [item for word in words for item in word.split(",") if item]
    if items == ["all"]:
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
    """Ranks out of ``0,2``, ``0 2``, ``1-3`` or ``all``, in rising order."""
    typed = f"{option} " + " ".join(words)
    last = world_size - 1
    have = f"this group has ranks 0 to {last}" if last else "this group has only rank 0"
    ranks: set[int] = set()
    for item in [item for word in words for item in word.split(",") if item]:
        first, _, end = item.partition("-")
        if item == "all":
            ranks.update(range(world_size))
        elif first.isdecimal() and (not end or end.isdecimal()) and not item.endswith("-"):
            for rank in range(int(first), int(end or first) + 1):
                if rank > last:
                    raise BadInput(f"{typed}: there is no rank {rank}; {have}")
                ranks.add(rank)
        else:
            raise BadInput(f"{typed}: {item!r} is no rank; {have}: type {option} 0, {option} 0,1 or {option} all")
    if not ranks:
        raise BadInput(f"{typed}: no rank; {have}")
    return sorted(ranks)


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


def resolve(request: Request, available: int, nccl_shares: bool = False) -> GroupSpec:
    """The group that is asked for, on a machine with `available` GPUs. `nccl_shares`: it may be told to share a GPU."""
    n, gpus, backend = request.n, request.gpus, request.backend
    if gpus is not None:
        parse_gpus([str(gpu) for gpu in gpus], available)
        if n is not None and n != len(gpus):
            raise BadInput(f"-n {n} and -g with {len(gpus)} GPUs: leave out -n, there is one rank on each GPU of -g")
    elif n is None and available:
        gpus = tuple(range(available))
    if gpus is None:
        if backend is not None and has_nccl(backend):
            raise BadInput(f"-b {backend}: nccl needs GPUs; leave out -b, and ranks on the CPU use gloo")
        return GroupSpec((None,) * parse_count(str(2 if n is None else n)), backend or "gloo")
    if len(set(gpus)) < len(gpus):
        if backend is not None and has_nccl(backend) and not nccl_shares:
            raise BadInput(
                f"-b {backend}: two ranks share a GPU, which nccl does only with {SHARES}=1 in the environment of the "
                "notebook (NCCL 2.30 and later; for tests, it is slow); leave out -b, and they use gloo"
            )
        if backend is None:
            return GroupSpec(gpus, "gloo", "two ranks share a GPU, which nccl does not do: the backend is gloo")
    return GroupSpec(gpus, backend or "cpu:gloo,cuda:nccl")


@dataclass(frozen=True)
class DeviceBinding:
    """What an existing engine was started for: the GPUs it sees (none: it never touched one), and its local rank."""

    visible: tuple[int, ...]
    gpu: int | None


def keep(berths: Sequence[DeviceBinding], new: GroupSpec) -> list[int | None]:
    """For each rank of the `new` group the index of the engine that can be it, or None where a new engine is needed.

    An engine can stay where its device stays: its tensors are there, and a process cannot change the GPUs it sees.
    """
    free = dict(enumerate(berths))
    chosen: list[int | None] = []
    for rank, gpu in enumerate(new.gpus):
        position = rank if gpu is None else new.visible.index(gpu)
        fit = next(
            (
                i
                for i, b in free.items()
                if b.gpu == gpu and (gpu is None or b.visible[position : position + 1] == (gpu,))
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
