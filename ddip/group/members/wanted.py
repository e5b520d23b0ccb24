"""Check a requested group against the hosts that it needs, before anything is started or changed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ddip import apps
from ddip.cluster import devices, folder, limits
from ddip.cluster.processes.host import Host
from ddip.errors import BadInput
from ddip.group.members import placement
from ddip.group.members.placement import GroupSpec, HostDevices, HostRequest, Request


def resolve_spec(request: Request, hosts: Sequence[Host], running: int) -> GroupSpec:
    """Choose the devices of the requested group on `hosts`, check that it can run there, and return its GroupSpec.

    `hosts`: connected hosts; if there are none, the group is on this machine. `running`: number of ranks that this
    group already has, which the check of this machine's limits does not count again. Starts and changes nothing.
    Raises BadInput if the request does not fit the devices or the installed apps, and GroupError if the working folder
    was removed or a limit of this machine is too low.
    """
    folder.ensure_ready()
    apps.find_module(request.app)
    gpus = [host.facts["gpus"] for host in hosts] or [devices.gpu_names()]
    names = [host.name for host in hosts] or [""]
    offers = [HostDevices(name, len(on_host)) for name, on_host in zip(names, gpus, strict=True)]
    spec = placement.place_group(request, offers, os.environ.get(placement.SHARES) == "1")
    for number, on_host in enumerate(gpus):
        devices.ensure_one_slice([on_host[gpu] for gpu in spec.visible(number)])
    limits.ensure_room(spec.size, running)
    return spec


def ensure_same_hosts(request: Request, old: Request) -> None:
    """Raise BadInput if `request` needs other hosts than `old`, as engines cannot move between hosts.

    Raises GroupError if the ipyparallel cluster of `request` has too few engines.
    """
    names, old_names = [host.name for host in request.hosts], [host.name for host in old.hosts]
    if request.reach.attached is not None:
        request.reach.attached.ensure_enough()
    if names != old_names or request.reach.asked != old.reach.asked:
        where = ",".join(old_names) or "this machine"
        raise BadInput(f"the group runs on {where}; add -r to restart it on other hosts or in another way")


def replaced_hosts(hosts: Sequence[HostRequest], old: Request, lost: Sequence[bool]) -> list[int]:
    """Return the numbers of the hosts of `old` in whose place `hosts` names others.

    There are none if `hosts` is empty. `lost`: whether each host of `old` is lost. Raises BadInput if `hosts` replaces
    one that is not, changes a number of ranks, has another length, or if Slurm chose the hosts.
    """
    if not hosts:
        return []
    typed, current = ",".join(map(str, hosts)), ",".join(map(str, old.hosts)) or "this machine"
    if old.reach.jobs:
        raise BadInput(f"--hosts {typed}: Slurm says which nodes the group is on; type %makedip --repair alone")
    if len(hosts) != len(old.hosts):
        raise BadInput(
            f"--hosts {typed}: the group is on {current}; type as many hosts, with new ones in place of the lost ones"
        )
    replaced = [number for number, host in enumerate(hosts) if host.name != old.hosts[number].name]
    for number, host in enumerate(hosts):
        former = old.hosts[number]
        if number in replaced and not lost[number]:
            raise BadInput(f"--hosts {typed}: {former.name} is not lost; a repair replaces lost hosts only")
        if host.count is not None and host.count != former.count:
            raise BadInput(f"--hosts {typed}: a repair does not change the number of ranks; type {former}")
    return replaced


def folders_notice(hosts: Sequence[Host]) -> str:
    """Return a notice if ranks on some hosts do not start in the notebook's folder; else an empty text."""
    names: dict[str, list[str]] = {}
    for host in hosts:
        if host.missing:
            where = f"{host.missing}, ranks start in {host.facts['directory']}"
            names.setdefault(where, []).append(host.name)
    folders = "; ".join(f"{', '.join(listed)}: {where}" for where, listed in names.items())
    return f"{folders}; --cd FOLDER names another" if folders else ""
