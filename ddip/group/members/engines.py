"""Engines for ranks: which of them stay when a group changes, and new ones where there is none."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddip import apps
from ddip.cluster import folder, limits
from ddip.cluster.cluster_api import EngineSpec
from ddip.cluster.processes.on_host import Facts
from ddip.errors import BadInput, GroupError
from ddip.group.members import host_facts as host
from ddip.group.members import placement
from ddip.group.members.members import Member
from ddip.group.members.placement import DeviceBinding, GroupSpec
from ddip.group.members.ranks import Ranks
from ddip.output.area import notify
from ddip.output.progress import Report
from ddip.protocol import compat, on_rank, switches
from ddip.protocol.rank_spec import backends_of, has_nccl
from ddip.protocol.reports import Hello

HELLO_SECONDS = 2.0
"""How long a rank may take to tell what its torch can do."""
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # on a timeout, 10 minutes as a rule, or an error: do nothing
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # a watchdog that hangs in CUDA is not watched itself
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # an error of a kernel is the cell's, not the watchdog's
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # it would wait for minutes that the others write down where they are
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Variables that have torch's watchdog end no rank; set where the user has not."""


class Engines:
    """The engines of a group's cluster."""

    def __init__(self, ranks: Ranks, progress: Report) -> None:
        self._ranks = ranks
        self._progress = progress
        self._told_off: set[str] = set()
        """Features and mechanisms of which the user knows that they are off."""

    def complete(self, spec: GroupSpec, app: str | None, deadline: float) -> list[Member]:
        """All members of the group of `spec` in rank order; until `deadline` on ``time.monotonic``.

        Raises GroupError; engines that were started before stay then, for the caller to end.
        """
        members = self._ranks.members
        kept = placement.keep([member.binding for member in members], spec)
        new = [rank for rank, index in enumerate(kept) if index is None]
        with limits.named():
            started = dict(zip(new, self._start(new, spec, app, deadline), strict=True))
        return [members[index] if index is not None else started[rank] for rank, index in enumerate(kept)]

    def replace(self, gone: Sequence[int], spec: GroupSpec, app: str | None, deadline: float) -> list[Member]:
        """The present members with new engines for the ranks `gone`; raises as `complete` does."""
        members = list(self._ranks.members)
        with limits.named():
            started = self._start(gone, spec, app, deadline)
        for rank, member in zip(gone, started, strict=True):
            members[rank] = member
        return members

    def check_torch(self, spec: GroupSpec) -> None:
        """Raise BadInput if the ranks' torch cannot do what `spec` needs."""
        answers = self._ranks.call_on_control_channel(self._ranks.live, on_rank.hello(), seconds=HELLO_SECONDS)
        hello = next((answer for answer in answers.values() if answer is not None), None)
        if hello is not None:
            _check_torch(spec, hello)

    def _start(self, ranks: Sequence[int], spec: GroupSpec, app: str | None, deadline: float) -> list[Member]:
        """New engines for `ranks`."""
        folder.ensure_ready()
        if not ranks:
            self.check_torch(spec)
            return []
        cluster, here = self._ranks.cluster, spec.size - len(ranks)
        if not cluster.connected:
            self._progress("ddip: starting the controller", 0.0)

        def tell(up: int) -> None:
            self._progress(f"ddip: {here + up} of {spec.size} engines are up", 0.1 + 0.8 * up / len(ranks))

        also = [apps.find(app)] if app else []
        environments = {number: _environment(spec, number, cluster.hosts[number].facts) for number in spec.hosts}
        wanted = [EngineSpec(spec.host(rank), environments[spec.host(rank)]) for rank in ranks]
        hellos = cluster.start(wanted, also, deadline, tell)
        _check_version([*hellos.values()])
        _check_torch(spec, next(iter(hellos.values())))
        self._note_what_is_off([*hellos.values()])
        return [
            Member(engine, hello["pid"], hello["host"], _binding(spec, rank))
            for rank, (engine, hello) in zip(ranks, hellos.items(), strict=True)
        ]

    def _note_what_is_off(self, hellos: Sequence[Hello]) -> None:
        """Print once what new ranks lack: mechanisms that were turned off, and features without their private names."""
        native = [name for name in switches.LOST if any(name in hello["native_off"] for hello in hellos)]
        self._ranks.can_unblock = self._ranks.can_unblock and switches.SOCKETS not in native
        if new := self._new_of(native):
            notify(f"off by DDIP_NATIVE or a self-test: {'; '.join(switches.LOST[name] for name in new)}")
        off: dict[str, list[str]] = {}
        for told in (self._ranks.cluster.off, *(hello["off"] for hello in hellos)):
            for library, features in told.items():
                off.setdefault(library, []).extend(features)
        for library, named in off.items():
            if new := self._new_of(named):
                notify(compat.describe_off(library, new))

    def _new_of(self, off: Sequence[str]) -> list[str]:
        new = [name for name in dict.fromkeys(off) if name not in self._told_off]
        self._told_off.update(new)
        return new


def _binding(spec: GroupSpec, rank: int) -> DeviceBinding:
    host = spec.host(rank)
    return DeviceBinding(spec.visible(host), spec.gpus[rank], host)


def _environment(spec: GroupSpec, number: int, facts: Facts) -> dict[str, str]:
    """Return the variables to set before torch loads on the host of this `number`.

    That is: threads, the GPUs that the ranks see, and the notebook's switches.
    """
    environment, ranks = switches.find_variables(), spec.ranks_on(number)
    if "OMP_NUM_THREADS" not in os.environ:
        threads = str(host.threads(facts["cores"], len(ranks)))
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads)
    visible = spec.visible(number)
    if has_nccl(spec.backend):
        told = _nccl(shared=len(visible) < len(ranks))
        environment.update({name: value for name, value in told.items() if name not in os.environ})
    if spec.on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(facts["gpus"][gpu] for gpu in visible)
    return environment


def _nccl(shared: bool) -> dict[str, str]:
    """What nccl is told where the user has not: a rank that waits is freed by ddip, and its process must not be ended
    by a watchdog of torch's meanwhile. `shared`: several ranks have the same GPU."""
    told = dict(WATCHDOG)
    if shared:  # as NCCL asks for
        told |= {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
    return told


def _check_version(hellos: Sequence[Hello]) -> None:
    """Raise GroupError if the ddip of an engine is another than the notebook's."""
    others = [hello for hello in hellos if hello.get("version", 0) != on_rank.VERSION]
    if others:
        where, version = f"pid {others[0]['pid']} on {others[0]['host']}", others[0].get("version", 0)
        what = f"{where} speaks version {version} of ddip's protocol"
        raise GroupError(f"{what}, the notebook version {on_rank.VERSION}; install the same ddip for both, and restart")


def _check_torch(spec: GroupSpec, hello: Hello) -> None:
    """Raise BadInput if the torch that `hello` tells of cannot do what `spec` needs."""
    for backend in backends_of(spec.backend):
        if backend not in hello["backends"]:
            has = ", ".join(hello["backends"])
            raise BadInput(f"-b {spec.backend}: torch {hello['torch']} has no backend {backend!r}; it has {has}")
    if spec.on_gpus and not hello["cuda"]:
        raise BadInput(f"torch {hello['torch']} was built without CUDA; install a CUDA build, or type -n {spec.size}")
