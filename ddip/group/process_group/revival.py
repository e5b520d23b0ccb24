"""What the ranks had made in their former group, when they have formed another: what goes on, and what is lost.

A new rank gets what cells have changed in the process of the others: directory, environment, ``sys.path``, settings of
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ddip.errors import RequestFailed, RequestInterrupted, ranks_text
from ddip.group.members.members import Member
from ddip.group.members.ranks import Ranks
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.output.area import notify
from ddip.protocol import on_rank
from ddip.protocol.reports import Going

AGAIN = "the group was formed again; "
SAME = "unchanged"
"""In the name of a setting that only ranks on the same host are to have."""
MOST_NAMES = 12
"""Settings that are named in the line of a repair."""
RPC_IS_LEFT = "RPC still knows the former ranks: type %makedip -r before you use it again"
KEPT = "with rank 0's parameters and buffers on every rank"


def go_on(ranks: Ranks, manager: ProcessGroupManager, going: Going) -> None:
    """Have the DDP wrappers of the former group go on in this one, and say so, and what must be made again.

    Raises RequestFailed or RequestInterrupted; the group must be formed again then.
    """
    revived = 0
    if going["wrappers"]:
        try:
            answers = ranks.ask(range(len(ranks.members)), on_rank.revive(), release=manager.release)
        except (RequestFailed, RequestInterrupted):
            manager.healthy = False
            raise
        revived = answers[0]
    text = _text(revived, going["wrappers"] - revived, going)
    if text:
        notify(AGAIN + text)
        ranks.call_on_control_channel(range(len(ranks.members)), on_rank.forget_gone())


class NewRanks:
    """The ranks that changes and repairs have added to a group: they lack the variables of former cells."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._engines: set[int] = set()
        self._bare: set[int] = set()
        """Engines that lack what cells have changed in the processes of the others."""
        self.carried = ""
        """What the ranks that the last change or repair has added have got of that, in words."""

    def take(self, members: list[Member]) -> None:
        """Make `members` the group's from here on; those that were not there before are new, if any were."""
        if self._ranks.members:
            new = {member.engine for member in members} - {member.engine for member in self._ranks.members}
            self._engines |= new
            self._bare |= new
        self._ranks.members = members

    @property
    def ranks(self) -> list[int]:
        """Their numbers."""
        return self._numbers(self._engines)

    @property
    def lack_settings(self) -> bool:
        """Have some still to get what cells have changed in the processes of the others?"""
        return bool(self._bare)

    def carry_settings(self) -> None:
        """Give them what cells have changed in the processes of the others."""
        self.carried = carry_settings(self._ranks, self._numbers(self._bare))
        self._bare.clear()

    def _numbers(self, engines: set[int]) -> list[int]:
        return [rank for rank, member in enumerate(self._ranks.members) if member.engine in engines]


def carry_settings(ranks: Ranks, new: Sequence[int]) -> str:
    """Give the ranks `new` the settings of the process that cells have changed on the others, as these agree.

    Returns what was set, in words, and prints what was not.
    """
    kept = [rank for rank in range(len(ranks.members)) if rank not in new]
    if not kept or not new:
        return ""
    first, *others = ranks.ask_soon(dict.fromkeys(kept, on_rank.find_changed_settings()))
    agreed = {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}
    differing = sorted({name for one in (first, *others) for name in one if name not in agreed and SAME not in name})
    source = ranks.members[kept[0]].binding.host
    elsewhere = {name: value for name, value in agreed.items() if SAME not in name}
    calls = {
        rank: on_rank.take_over_settings(agreed if ranks.members[rank].binding.host == source else elsewhere)
        for rank in new
    }
    told = dict(zip(calls, ranks.ask_soon(calls), strict=True))
    for rank, answer in told.items():
        for what, error in answer:
            if error:
                notify(f"rank {rank} could not take {what} from rank {kept[0]}: {error}")
    if differing:
        what = ", ".join(name.removeprefix("$") for name in differing)
        notify(f"{what}: different on {ranks_text(kept)}, and not set on {ranks_text(new)}")
    texts = list(dict.fromkeys(what for answer in told.values() for what, error in answer if not error))
    return f"{_listed(texts)} as on rank {kept[0]}" if texts else ""


def _listed(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - MOST_NAMES} more"] if len(texts) > MOST_NAMES else []
    *first, last = [*texts[:MOST_NAMES], *more]
    return f"{', '.join(first)} and {last}" if first else last


def _text(revived: int, lost: int, going: Going) -> str:
    """
    >>> nothing = Going(wrappers=0, meshes=0, subgroups=0, rpc=False)
    >>> _text(0, 1, nothing)
    'the wrapper (DDP, FSDP) that was made before must be made again'
    >>> _text(2, 0, {**nothing, "subgroups": 1})
    "2 DDP wrappers go on, with rank 0's parameters and buffers on every rank; subgroups that were made before must be \
made again"
    >>> _text(0, 2, {**nothing, "meshes": 1, "subgroups": 1})
    'wrappers (DDP, FSDP), device meshes and subgroups that were made before must be made again'
    >>> _text(0, 0, {**nothing, "rpc": True})
    'RPC still knows the former ranks: type %makedip -r before you use it again'
    """
    parts = []
    if revived:
        parts.append(f"{'the DDP wrapper goes' if revived == 1 else f'{revived} DDP wrappers go'} on, {KEPT}")
    wrapper = "other wrapper" if revived else "wrapper"
    others = [name for name, count in (("device meshes", going["meshes"]), ("subgroups", going["subgroups"])) if count]
    if lost == 1 and not others:
        parts.append(f"the {wrapper} (DDP, FSDP) that was made before must be made again")
    elif lost or others:
        *first, last = [*([f"{wrapper}s (DDP, FSDP)"] if lost else []), *others]
        what = f"{', '.join(first)} and {last}" if first else last
        parts.append(f"{what} that were made before must be made again")
    if going["rpc"]:
        parts.append(RPC_IS_LEFT)
    return "; ".join(parts)
