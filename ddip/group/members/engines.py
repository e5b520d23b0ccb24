"""Provide an engine for each rank: keep those that fit a changed group, and start the others."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddip import apps
from ddip.cluster import folder, limits
from ddip.cluster.cluster_api import EngineSpec
from ddip.cluster.processes.on_host import Facts
from ddip.errors import BadInput, GroupError
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
"""Time that a rank may take to report the capabilities of its torch."""
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # on an error or a timeout (10 minutes by default): do nothing
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no second watchdog for a watchdog that hangs in CUDA
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",  # an error of a CUDA kernel belongs to the cell, not to the watchdog
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",  # the dump would wait minutes for those of the other ranks
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
}
"""Environment variables that keep torch's watchdog from ending ranks; the user's own settings take precedence."""


class Engines:
    """The engines of a group's cluster."""

    def __init__(self, ranks: Ranks, progress: Report) -> None:
        self._ranks = ranks
        self._progress = progress
        self._reported_off: set[str] = set()
        """Features and mechanisms that were reported to the user as off."""

    def complete(self, spec: GroupSpec, app: str | None, deadline: float) -> list[Member]:
        """Return all members of the group of `spec` in rank order, after starting the engines that it lacks.

        `app`: name of its app, whose packages the engines may import in advance. `deadline` is on ``time.monotonic``.
        Raises GroupError; the caller must then end engines that it has started.
        """
        members = self._ranks.members
        kept = placement.match_engines([member.binding for member in members], spec)
        new = [rank for rank, index in enumerate(kept) if index is None]
        with limits.explain_errors():
            started = dict(zip(new, self._start_engines(new, spec, app, deadline), strict=True))
        return [members[index] if index is not None else started[rank] for rank, index in enumerate(kept)]

    def replace(self, replaced: Sequence[int], spec: GroupSpec, app: str | None, deadline: float) -> list[Member]:
        """Return the members, with new engines for the ranks `replaced`; raises as `complete` does."""
        members = list(self._ranks.members)
        with limits.explain_errors():
            started = self._start_engines(replaced, spec, app, deadline)
        for rank, member in zip(replaced, started, strict=True):
            members[rank] = member
        return members

    def check_torch(self, spec: GroupSpec) -> None:
        """Raise BadInput if the ranks' torch cannot do what `spec` needs.

        Does nothing if no rank answers in time.
        """
        answers = self._ranks.call_on_control_channel(self._ranks.live, on_rank.make_hello(), seconds=HELLO_SECONDS)
        hello = next((answer for answer in answers.values() if answer is not None), None)
        if hello is not None:
            _check_torch(spec, hello)

    def _start_engines(self, ranks: Sequence[int], spec: GroupSpec, app: str | None, deadline: float) -> list[Member]:
        """Start new engines for `ranks` of `spec`, wait for them, and return their members in order.

        Other arguments as in `complete`. Raises GroupError, or BadInput if their torch cannot do what `spec` needs.
        """
        folder.ensure_ready()
        if not ranks:
            self.check_torch(spec)
            return []
        cluster, kept = self._ranks.cluster, spec.size - len(ranks)
        if not cluster.connected:
            self._progress("ddip: starting the controller", 0.0)

        def report_started(up: int) -> None:
            self._progress(f"ddip: {kept + up} of {spec.size} engines are up", 0.1 + 0.8 * up / len(ranks))

        preloaded = [apps.find_module(app)] if app else []
        environments = {number: _rank_environment(spec, number, cluster.hosts[number].facts) for number in spec.hosts}
        wanted = [EngineSpec(spec.host(rank), environments[spec.host(rank)]) for rank in ranks]
        hellos = cluster.start(wanted, preloaded, deadline, report_started)
        _check_version([*hellos.values()])
        _check_torch(spec, next(iter(hellos.values())))
        self._report_features_off([*hellos.values()])
        return [
            Member(engine, hello["pid"], hello["host"], _binding_of(spec, rank))
            for rank, (engine, hello) in zip(ranks, hellos.items(), strict=True)
        ]

    def _report_features_off(self, hellos: Sequence[Hello]) -> None:
        """Print once which mechanisms and features are off on new ranks.

        Features are off if torch lacks private names that they need.
        """
        native = [name for name in switches.LOST if any(name in hello["native_off"] for hello in hellos)]
        self._ranks.can_unblock = self._ranks.can_unblock and switches.SOCKETS not in native
        if new := self._unreported(native):
            notify(f"DDIP_NATIVE or a failed self-test turned off: {'; '.join(switches.LOST[name] for name in new)}")
        off: dict[str, list[str]] = {}
        for by_library in (self._ranks.cluster.off, *(hello["off"] for hello in hellos)):
            for library, features in by_library.items():
                off.setdefault(library, []).extend(features)
        for library, names in off.items():
            if new := self._unreported(names):
                notify(compat.describe_off(library, new))

    def _unreported(self, off: Sequence[str]) -> list[str]:
        new = [name for name in dict.fromkeys(off) if name not in self._reported_off]
        self._reported_off.update(new)
        return new


def _binding_of(spec: GroupSpec, rank: int) -> DeviceBinding:
    host = spec.host(rank)
    return DeviceBinding(spec.visible(host), spec.gpus[rank], host)


def threads_per_rank(cores: int, ranks: int) -> int | None:
    """Return the number of CPU threads per rank on a host with `cores` cores; None if the user sets it."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, cores // max(1, ranks))


def _rank_environment(spec: GroupSpec, number: int, facts: Facts) -> dict[str, str]:
    """Return environment variables to set before torch loads on host `number`, which has these `facts`.

    They set the number of threads, the GPUs that ranks see, NCCL options and the notebook's switches.
    """
    environment, ranks = switches.find_variables(), spec.ranks_on(number)
    threads = threads_per_rank(facts["cores"], len(ranks))
    if threads is not None:
        environment |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads))
    visible = spec.visible(number)
    if has_nccl(spec.backend):
        variables = _nccl_variables(shared=len(visible) < len(ranks))
        environment.update({name: value for name, value in variables.items() if name not in os.environ})
    if spec.on_gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(facts["gpus"][gpu] for gpu in visible)
    return environment


def _nccl_variables(shared: bool) -> dict[str, str]:
    """Return the NCCL options that ddip sets unless the user has; `shared`: ranks share a GPU.

    ddip itself unblocks a waiting rank, so torch's watchdog must not end its process before that.
    """
    variables = dict(WATCHDOG)
    if shared:  # as the NCCL documentation requires
        variables |= {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}
    return variables


def _check_version(hellos: Sequence[Hello]) -> None:
    """Raise GroupError if an engine runs another ddip version than the notebook."""
    mismatched = [hello for hello in hellos if hello.get("version", 0) != on_rank.VERSION]
    if mismatched:
        where, version = f"pid {mismatched[0]['pid']} on {mismatched[0]['host']}", mismatched[0].get("version", 0)
        problem = f"{where} uses version {version} of ddip's protocol, and the notebook version {on_rank.VERSION}"
        raise GroupError(f"{problem}; install the same ddip for both, and restart")


def _check_torch(spec: GroupSpec, hello: Hello) -> None:
    """Raise BadInput if the torch that `hello` describes cannot do what `spec` needs."""
    for backend in backends_of(spec.backend):
        if backend not in hello["backends"]:
            available = ", ".join(hello["backends"])
            raise BadInput(f"-b {spec.backend}: torch {hello['torch']} has no backend {backend!r}; it has {available}")
    if spec.on_gpus and not hello["cuda"]:
        raise BadInput(f"torch {hello['torch']} was built without CUDA; install a CUDA build, or type -n {spec.size}")
