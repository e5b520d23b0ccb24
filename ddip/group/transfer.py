"""Objects -> ranks and back: all names arrive, or none does."""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ddip.errors import BadInput, RequestInterrupted, TransferError
from ddip.group import delivery, modules, stopping
from ddip.group.delivery import PART, reasons
from ddip.group.ranks import Ranks
from ddip.output.progress import Report
from ddip.output.sizes import size_text
from ddip.protocol import on_rank, pickling
from ddip.protocol.rank_spec import STANDING_VARIABLES
from ddip.protocol.reports import Packed

DDP = "DistributedDataParallel"
FSDP = (
    "{name} is a model of FSDP, which lives on ranks only: gather its state dict in a %%dip cell, `state = "
    "get_model_state_dict({name}, options=StateDictOptions(full_state_dict=True, cpu_offload=True))`, both of "
    "torch.distributed.checkpoint.state_dict, then %dipull state"
)
PART_OF = re.compile(r"[^\W\d]\w*[.\[].*[\w\])]")
"""``net.module``, ``losses[0]``."""


def check_names(names: list[str], magic: str) -> None:
    """Refuse what is not the name of a variable."""
    for name in names:
        if not name.isidentifier():
            raise BadInput(f"{magic} {name}: {name!r} is not a name; {_name_instead(name, magic)}")


def _name_instead(typed: str, magic: str) -> str:
    """What to type instead of `typed`."""
    if not PART_OF.fullmatch(typed):
        return f"type names of variables, such as {magic} model"
    last = typed.rpartition(".")[2]
    name = last if last.isidentifier() else "part"
    where = " in a %%dip cell" if magic == "%dipull" else ""
    return f"type `{name} = {typed}`{where}, then {magic} {name}"


def check_own(names: Iterable[str], magic: str) -> None:
    """Refuse to copy to a rank what is its own: rank 0's number, or device, is no other rank's."""
    own = [name for name in names if name in STANDING_VARIABLES]
    if own:
        what = f"{own[0]} is each rank's own variable, which ddip sets"
        raise BadInput(
            f"{magic} {own[0]}: {what}; leave it out, or copy it by another name: notebook_{own[0]} = {own[0]}"
        )


def push(ranks: Ranks, values: Mapping[str, Any], to: Sequence[int], progress: Report) -> tuple[list[str], int]:
    """Put `values` into the namespaces of the ranks `to`.

    Returns the names whose tensors moved to the CPU, and the size of what was sent to each rank, bytes.

    Raises TransferError that names what cannot be pickled here, or unpickled there; then nothing has changed.
    """
    packed, errors, moved = pickling.dump_all(dict(values))
    if errors:
        raise TransferError(f"nothing was pushed: {reasons(errors, 'cannot be pickled')}")
    try:
        delivery.deliver(ranks, packed, to, progress)
    except TransferError as error:
        hint = modules.hint(str(error), ranks)
        if not hint:
            raise
        raise TransferError(f"{error}; {hint}") from None
    return moved, sum(map(len, packed.values()))


def fetch(ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report) -> list[Packed]:
    """What each of the ranks `of` answers to ``transfer.pack``, with all of its values."""
    with stopping.button():
        try:
            return _fetch(ranks, names, of, progress)
        except BaseException as error:
            ranks.tell(of, on_rank.drop())
            if isinstance(error, RequestInterrupted):
                raise RequestInterrupted(f"nothing was pulled: {error}") from None
            raise


def _fetch(ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report) -> list[Packed]:
    replies = ranks.ask(of, on_rank.pack(list(names), PART))
    whole, done = sum(size for reply in replies for size in reply["sizes"].values()), 0
    for rank, reply in zip(of, replies, strict=True):
        for name, size in reply["sizes"].items():
            data = bytearray()
            for begin, end in _parts(size):
                progress(f"ddip: pulling {name} from rank {rank}, {size_text(size)}", done / whole)
                data += ranks.ask([rank], on_rank.part(name, begin, end))[0]
                done += end - begin
            reply["values"][name] = data
    if whole:
        ranks.tell(of, on_rank.drop())
    return replies


def _parts(size: int) -> list[tuple[int, int]]:
    """Begin and end of each part of an object of `size` bytes."""
    return [(begin, min(size, begin + PART)) for begin in range(0, size, PART)]


def pull(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report
) -> tuple[list[dict[str, Any]], list[str], int]:
    """The objects `names` of each of the ranks `of`, in order.

    With the names whose tensors moved to the CPU, and the size of all that came, bytes.
    """
    replies = fetch(ranks, names, of, progress)
    values = [unpack(rank, reply) for rank, reply in zip(of, replies, strict=True)]
    moved = [name for name in names if any(name in reply["moved"] for reply in replies)]
    return values, moved, sum(len(data) for reply in replies for data in reply["values"].values())


def forward(rank: int, reply: Packed, what: str) -> dict[str, bytes | bytearray]:
    """The pickled objects in a rank's answer to ``transfer.pack``; raises TransferError that names what did not come.

    `what` says what was to be done with them: ``pulled``.
    """
    if reply["missing"]:
        names = ", ".join(reply["missing"])
        raise TransferError(
            f"nothing was {what}: rank {rank} has no variable {names}; type names that a %%dip cell has defined"
        )
    if reply["errors"] and what == "pulled":
        sharded = [FSDP.format(name=name) for name in reply["errors"] if reply["wrappers"].get(name, DDP) != DDP]
        if sharded:
            raise TransferError(f"nothing was pulled: {'; '.join(sharded)}")
    if reply["errors"]:
        raise TransferError(f"nothing was {what}: {reasons(reply['errors'], f'cannot be pickled on rank {rank}')}")
    return dict(reply["values"])


def unpack(rank: int, reply: Packed) -> dict[str, Any]:
    """The objects themselves."""
    values, errors, wrapped = {}, {}, []
    for name, data in forward(rank, reply, "pulled").items():
        try:
            values[name] = pickle.loads(data)
        except (Exception, SystemExit) as error:  # a script shall not end by what it pulls
            errors[name] = f"{type(error).__name__}: {error}"
            if DDP.encode() in data and "process group" in str(error):
                wrapped.append(_unwrap(name, reply["wrappers"].get(name) == DDP))
    if wrapped:
        raise TransferError(f"nothing was pulled: {'; '.join(wrapped)}")
    if errors:
        raise TransferError(f"nothing was pulled: {reasons(errors, 'cannot be unpickled in the notebook')}")
    return values


def _unwrap(name: str, itself: bool) -> str:
    """What to do where the notebook has no process group for the DDP that `name` is, or holds."""
    if itself:
        cure = f"type `plain = {name}.module` in a %%dip cell, then %dipull plain"
        return f"{name} is a {DDP}, which lives on ranks only: {cure}"
    return f"{name} holds a {DDP}, which lives on ranks only: put its .module there instead, in a %%dip cell"
