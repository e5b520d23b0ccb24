"""Objects -> ranks and back: all names arrive, or none does."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddip.cluster.host import LocalHost
from ddip.errors import BadInput, RequestInterrupted, TransferError, ranks_text
from ddip.group import delivery, modules, stopping
from ddip.group.delivery import LARGE_BESIDE, PART, reasons
from ddip.group.ranks import Ranks
from ddip.output.progress import Report
from ddip.output.sizes import size_text
from ddip.protocol import on_rank, pickling, shared
from ddip.protocol.pickling import Pickled
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
    return moved, sum(pickled.size for pickled in packed.values())


@dataclass(frozen=True)
class Fetched:
    """What a rank has packed."""

    rank: int
    reply: Packed
    values: Mapping[str, Pickled]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(pickled.size for pickled in self.values.values())


def fetch(ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report) -> list[Fetched]:
    """Have each of the ranks `of` pack these variables, and take what they have packed."""
    with stopping.button():
        try:
            return _fetch(ranks, names, of, progress)
        except BaseException as error:
            ranks.tell(of, on_rank.drop())
            if isinstance(error, RequestInterrupted):
                raise RequestInterrupted(f"nothing was pulled: {error}") from None
            raise


def _fetch(ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report) -> list[Fetched]:
    progress(f"ddip: {ranks_text(of)} {'packs' if len(of) == 1 else 'pack'} {', '.join(names)}")
    beside = {rank: isinstance(ranks.host(rank), LocalHost) for rank in of}
    calls = {
        rank: on_rank.pack(list(names), LARGE_BESIDE if is_near else PART, is_near) for rank, is_near in beside.items()
    }
    replies = ranks.ask_each(calls)
    sizes = [
        {name: pickling.room_of(parts) for name, parts in reply["sizes"].items() if name not in reply["values"]}
        for reply in replies
    ]
    whole, done, fetched = sum(size for its in sizes for size in its.values()), 0, []
    for rank, reply, its in zip(of, replies, sizes, strict=True):
        memories: dict[str, bytearray | mmap.mmap] = {**reply["values"]}
        for name, size in its.items():
            here = read(reply["paths"].get(name, ""), size)
            if here is None:
                here = bytearray()
                for begin, end in _parts(size):
                    progress(f"ddip: pulling {name} from rank {rank}, {size_text(size)}", (done + begin) / whole)
                    here += ranks.ask([rank], on_rank.part(name, begin, end))[0]
            memories[name] = here
            done += size
        values = {name: Pickled.of(memories[name], parts) for name, parts in reply["sizes"].items()}
        fetched.append(Fetched(rank, reply, values))
    if whole:
        ranks.tell(of, on_rank.drop())
    return fetched


def read(path: str, size: int) -> bytearray | mmap.mmap | None:
    """What a rank beside the notebook has packed, where it is; None: it cannot be read."""
    try:
        found = shared.view(path) if path else None
    except (OSError, ValueError):
        return None
    if found is None or len(found) != size:
        return None
    return bytearray(found) if size <= shared.COPIED else found


def _parts(size: int) -> list[tuple[int, int]]:
    """Begin and end of each part of an object of `size` bytes."""
    return [(begin, min(size, begin + PART)) for begin in range(0, size, PART)]


def pull(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report
) -> tuple[list[dict[str, Any]], list[str], int]:
    """The objects `names` of each of the ranks `of`, in order.

    With the names whose tensors moved to the CPU, and the size of all that came, bytes.
    """
    all_fetched = fetch(ranks, names, of, progress)
    values = [unpack(fetched) for fetched in all_fetched]
    moved = [name for name in names if any(name in fetched.reply["moved"] for fetched in all_fetched)]
    return values, moved, sum(fetched.size for fetched in all_fetched)


def forward(fetched: Fetched, what: str) -> Mapping[str, Pickled]:
    """The pickled objects that a rank has packed; raises TransferError that names what did not come.

    `what` says what was to be done with them: ``pulled``.
    """
    rank, reply = fetched.rank, fetched.reply
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
    return fetched.values


def unpack(fetched: Fetched) -> dict[str, Any]:
    """The objects themselves."""
    values, errors, wrapped = {}, {}, []
    for name, pickled in forward(fetched, "pulled").items():
        try:
            values[name] = pickled.load()
        except (Exception, SystemExit) as error:  # a script must not end by what it pulls
            errors[name] = f"{type(error).__name__}: {error}"
            if DDP.encode() in bytes(pickled.parts[0]) and "process group" in str(error):
                wrapped.append(_unwrap(name, fetched.reply["wrappers"].get(name) == DDP))
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
