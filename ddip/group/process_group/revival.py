"""Restore objects of the former process group after a rebuild, and report those that must be recreated.

New ranks also get the process settings that cells have changed on the others: directory, environment, ``sys.path``,
settings of torch; and random numbers that are the same on all others.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddip.errors import RequestFailed, RequestInterrupted, ranks_text
from ddip.group.members.members import Member
from ddip.group.members.ranks import Ranks
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.output.area import inform, notify
from ddip.protocol import on_rank
from ddip.protocol.reports import LostObjects

AGAIN = "the group was rebuilt; "
SAME = "unchanged"
"""Word in the names of settings that are copied only between ranks on the same host."""
RANDOM = "random numbers"
"""Word in the names of states of random number generators, which are copied only if several ranks agree on them."""
OWN_RANDOM = (
    "{ranks} drew new random numbers at the start: if all ranks shall draw the same, set the seed again on all, as in "
    "%%dip: torch.manual_seed(...)"
)
RPC_IS_LEFT = "RPC still knows the former ranks: type %makedip -r before you use it again"
SHOWN_NAMES = 8
KEPT = "with rank 0's parameters and buffers on every rank"


def revive_objects(ranks: Ranks, manager: ProcessGroupManager, lost_objects: LostObjects) -> None:
    """Revive the DDP wrappers of the former group, and print which other objects must be recreated.

    `lost_objects`: the objects that ended with the former group. Raises RequestFailed or RequestInterrupted; the group
    must then be rebuilt.
    """
    revived = 0
    if lost_objects["wrappers"]:
        try:
            answers = ranks.ask(range(len(ranks.members)), on_rank.revive_wrappers(), release=manager.release)
        except (RequestFailed, RequestInterrupted):
            manager.healthy = False
            raise
        revived = answers[0]
        manager.has_revived |= revived > 0
    if any(lost_objects.values()):
        names = ranks.call_on_control_channel(range(len(ranks.members)), on_rank.forget_lost_objects())
        variables = sorted({name for of_rank in names.values() for name in of_rank or ()})
        text = AGAIN + _revival_text(revived, lost_objects["wrappers"] - revived, lost_objects, variables)
        is_complete = revived == lost_objects["wrappers"] and not (
            lost_objects["meshes"] or lost_objects["subgroups"] or lost_objects["rpc"]
        )
        if is_complete:
            inform(text)
        else:
            notify(text)


class NewRanks:
    """The ranks that were added to a running group: they lack the variables of earlier cells."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._engines: set[int] = set()
        self._without_settings: set[int] = set()
        """Engines that lack the process settings that cells have changed on the others."""
        self.compared: set[str] | None = None
        """Paths of the optimizers and the like that new ranks have created, and that have been compared with those of
        the others; None: no comparison is due."""

    def set_members(self, members: list[Member]) -> None:
        """Set the group's members; those not in the group before count as new, unless the group was empty."""
        if self._ranks.members:
            new = {member.engine for member in members} - {member.engine for member in self._ranks.members}
            self._engines |= new
            self._without_settings |= new
            self.compared = set() if new else self.compared
        self._ranks.members = members

    @property
    def ranks(self) -> list[int]:
        """The numbers of the new ranks."""
        return self._ranks_of(self._engines)

    @property
    def lack_settings(self) -> bool:
        """True if some ranks have yet to be given the others' process settings."""
        return bool(self._without_settings)

    def carry_settings(self) -> None:
        """Give the new ranks the process settings that cells have changed on the others.

        Raises RequestFailed or RequestInterrupted.
        """
        carry_settings(self._ranks, self._ranks_of(self._without_settings))
        self._without_settings.clear()

    def _ranks_of(self, engines: set[int]) -> list[int]:
        return [rank for rank, member in enumerate(self._ranks.members) if member.engine in engines]


def carry_settings(ranks: Ranks, new: Sequence[int]) -> None:
    """Copy changed process settings to the ranks `new`, as far as the other ranks agree on them.

    Prints those that could not be copied. Raises RequestFailed or RequestInterrupted.
    """
    kept = [rank for rank in range(len(ranks.members)) if rank not in new]
    if not kept or not new:
        return
    first, *others = ranks.ask_soon(dict.fromkeys(kept, on_rank.find_changed_settings()))
    is_shared = {name: all(other.get(name) == value for other in others) for name, value in first.items()}
    agreed = {name: value for name, value in first.items() if is_shared[name] and (others or RANDOM not in name)}
    random = [name for name in agreed if RANDOM in name]
    names = {name for settings in (first, *others) for name in settings if SAME not in name and RANDOM not in name}
    differing = sorted(names - agreed.keys())
    source = ranks.members[kept[0]].binding.host
    elsewhere = {name: value for name, value in agreed.items() if SAME not in name}
    calls = {
        rank: on_rank.take_over_settings(agreed if ranks.members[rank].binding.host == source else elsewhere)
        for rank in new
    }
    for rank, answer in zip(calls, ranks.ask_soon(calls), strict=True):
        for what, error in answer:
            if error:
                notify(f"rank {rank} could not copy {what} from rank {kept[0]}: {error}")
    if random:
        inform(f"{ranks_text(new)} got {' and '.join(random)} from {ranks_text(kept)}, which all had the same")
    elif not others and f"torch's {RANDOM}" in first:
        notify(OWN_RANDOM.format(ranks=ranks_text(new)))
    if differing:
        what = ", ".join(name.removeprefix("$") for name in differing)
        notify(f"{what} differed on {ranks_text(kept)}, so ddip did not set it on {ranks_text(new)}")


def _revival_text(revived: int, lost_wrappers: int, lost_objects: LostObjects, variables: Sequence[str]) -> str:
    """Describe revived wrappers, and objects that must be recreated, for a message.

    `variables`: names of the variables with wrappers that must be recreated, as far as they are known.

    >>> nothing = LostObjects(wrappers=0, meshes=0, subgroups=0, rpc=False)
    >>> _revival_text(0, 1, nothing, [])
    'the wrapper (DDP, FSDP) that was made before must be recreated'
    >>> _revival_text(0, 1, nothing, ["model"])
    'the wrapper in model (DDP, FSDP) that was made before must be recreated'
    >>> _revival_text(2, 0, {**nothing, "subgroups": 1}, [])
    "2 DDP wrappers were rebuilt, with rank 0's parameters and buffers on every rank; subgroups that were made before \
must be recreated"
    >>> _revival_text(0, 2, {**nothing, "meshes": 1, "subgroups": 1}, ["critic", "model"])
    'wrappers in critic, model (DDP, FSDP), device meshes and subgroups that were made before must be recreated'
    >>> _revival_text(0, 0, {**nothing, "rpc": True}, [])
    'RPC still knows the former ranks: type %makedip -r before you use it again'
    """
    parts = []
    if revived:
        parts.append(f"{'the DDP wrapper was' if revived == 1 else f'{revived} DDP wrappers were'} rebuilt, {KEPT}")
    more = f" and {len(variables) - SHOWN_NAMES} more" if len(variables) > SHOWN_NAMES else ""
    names = f"in {', '.join(variables[:SHOWN_NAMES])}{more} " if variables else ""
    wrapper = "other wrapper" if revived else "wrapper"
    others = [
        name
        for name, count in (("device meshes", lost_objects["meshes"]), ("subgroups", lost_objects["subgroups"]))
        if count
    ]
    if lost_wrappers == 1 and not others:
        parts.append(f"the {wrapper} {names}(DDP, FSDP) that was made before must be recreated")
    elif lost_wrappers or others:
        *first, last = [*([f"{wrapper}s {names}(DDP, FSDP)"] if lost_wrappers else []), *others]
        what = f"{', '.join(first)} and {last}" if first else last
        parts.append(f"{what} that were made before must be recreated")
    if lost_objects["rpc"]:
        parts.append(RPC_IS_LEFT)
    return "; ".join(parts)
