"""What the ranks had made in their former group, when they have formed another: what goes on, and what is lost."""

from __future__ import annotations

from collections.abc import Sequence

from ddip.errors import RequestFailed, RequestInterrupted
from ddip.group.process_group import ProcessGroupManager
from ddip.group.ranks import Ranks
from ddip.output.area import notify
from ddip.protocol import on_rank
from ddip.protocol.reports import Going, OptimizerState

AGAIN = "the group was formed again; "
KEPT = "with rank 0's parameters and buffers on every rank"
STEPS = "the state of {names} differs between the ranks, whose numbers of steps differed: load that of rank 0 on all"


def go_on(ranks: Ranks, manager: ProcessGroupManager, going: Going) -> None:
    """Have the DDP wrappers of the former group go on in this one, and say so, and what must be made again.

    Raises RequestFailed or RequestInterrupted; the group must be formed again then.
    """
    revived, optimizers = 0, list[list[OptimizerState]]()
    if going["wrappers"]:
        try:
            answers = ranks.ask(range(len(ranks.members)), on_rank.revive(), release=manager.release)
        except (RequestFailed, RequestInterrupted):
            manager.healthy = False
            raise
        revived, optimizers = answers[0]["wrappers"], [answer["optimizers"] for answer in answers]
    text = _text(revived, going["wrappers"] - revived, going)
    if text:
        notify(AGAIN + text)
        ranks.call_on_control_channel(range(len(ranks.members)), on_rank.forget_gone())
    names = _different(optimizers)
    if names:
        notify(STEPS.format(names=" and ".join(names)))


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
    'RPC was shut down: call init_rpc again'
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
        parts.append("RPC was shut down: call init_rpc again")
    return "; ".join(parts)


def _different(optimizers: Sequence[Sequence[OptimizerState]]) -> list[str]:
    """Names of the optimizers of all ranks, each in the same order, whose states differ.

    Those that divide the parameters among the ranks (ZeRO) have the right to.
    """
    names = []
    for ours in zip(*optimizers, strict=False):
        same_parameters = all(one["parameters"] == ours[0]["parameters"] for one in ours)
        if same_parameters and any(one["state"] != ours[0]["state"] for one in ours):
            names.append(ours[0]["name"])
    return list(dict.fromkeys(names))
