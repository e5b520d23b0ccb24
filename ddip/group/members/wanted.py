"""The group that somebody wants, where it can be: looked at before anything is touched."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddip import apps
from ddip.cluster import devices, folder, limits
from ddip.cluster.processes.host import Host
from ddip.errors import BadInput
from ddip.group.members import placement
from ddip.group.members.placement import GroupSpec, HostHas, HostRequest, Request


def resolve(request: Request, hosts: Sequence[Host], there: int) -> GroupSpec:
    """The group that `request` describes, on `hosts`, or on this machine; `there`: how many ranks there are already.

    Raises BadInput or GroupError.
    """
    folder.ensure_ready()
    apps.find(request.app)
    gpus = [host.facts["gpus"] for host in hosts] or [devices.gpu_names()]
    names = [host.name for host in hosts] or [""]
    has = [HostHas(name, len(its)) for name, its in zip(names, gpus, strict=True)]
    spec = placement.resolve_on(request, has, os.environ.get(placement.SHARES) == "1")
    for number, its in enumerate(gpus):
        devices.ensure_one_slice([its[gpu] for gpu in spec.visible(number)])
    limits.ensure_room(spec.size, there)
    return spec


def ensure_same_hosts(request: Request, old: Request) -> None:
    """Raise BadInput if `request` is for other hosts than a group that `old` made: no engine can go there."""
    names, there = [host.name for host in request.hosts], [host.name for host in old.hosts]
    if request.reach.attached is not None:
        request.reach.attached.ensure_enough()
    if names != there or request.reach.asked != old.reach.asked:
        where = ",".join(there) or "this machine"
        raise BadInput(f"the group is on {where}; to start afresh on other hosts, or in another way, type -r, too")


def replaced_hosts(hosts: Sequence[HostRequest], old: Request, lost: Sequence[bool]) -> list[int]:
    """Numbers of the hosts in whose place `hosts` name others; those of the group that `old` made, some of them `lost`.

    Raises BadInput.
    """
    if not hosts:
        return []
    typed, there = ",".join(map(str, hosts)), ",".join(map(str, old.hosts)) or "this machine"
    if old.reach.jobs:
        raise BadInput(f"--hosts {typed}: Slurm says which nodes the group is on; type %makedip --repair alone")
    if len(hosts) != len(old.hosts):
        raise BadInput(f"--hosts {typed}: the group is on {there}; type as many, with others in place of those lost")
    other = [number for number, host in enumerate(hosts) if host.name != old.hosts[number].name]
    for number, host in enumerate(hosts):
        former = old.hosts[number]
        if number in other and not lost[number]:
            raise BadInput(f"--hosts {typed}: {former.name} is not lost, and keeps its place")
        if host.count is not None and host.count != former.count:
            raise BadInput(f"--hosts {typed}: a repair does not change how many ranks there are; type {former}")
    return other


def folders_notice(hosts: Sequence[Host]) -> str:
    """What to say where ranks of some hosts do not begin in the notebook's folder; empty where all do."""
    names: dict[str, list[str]] = {}
    for host in hosts:
        if host.missing:
            where = f"{host.missing}, ranks begin in {host.facts['directory']}"
            names.setdefault(where, []).append(host.name)
    told = "; ".join(f"{', '.join(those)}: {where}" for where, those in names.items())
    return f"{told}; --cd FOLDER names another" if told else ""
