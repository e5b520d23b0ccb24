"""Objects -> ranks and back: all names arrive, or none does."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddip.cluster.processes.host import LocalHost
from ddip.errors import BadInput, RequestInterrupted, TransferError, ranks_text
from ddip.group import stopping
from ddip.group.members.ranks import Ranks
from ddip.group.objects import delivery, modules
from ddip.group.objects.delivery import LARGE_BESIDE, PART, reasons
from ddip.output.area import notify
from ddip.output.progress import Report
from ddip.output.tables.tables import size_text
from ddip.protocol import on_rank
from ddip.protocol.objects import pickling, shared
from ddip.protocol.objects.pickling import Loader, Pickled
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


@dataclass(frozen=True)
class Transferred:
    """What a push or pull has carried."""

    size: int = 0
    """Bytes that were sent to each rank, or that came from all."""
    moved: Sequence[str] = ()
    """Names whose tensors moved to the CPU."""
    along: Sequence[str] = ()
    """Names that nobody has asked for: functions read them, and who got these had none."""


def push(ranks: Ranks, values: Mapping[str, Any], to: Sequence[int], progress: Report) -> Transferred:
    """Put `values` into the namespaces of the ranks `to`, and what their functions read and these ranks lack.

    Raises TransferError that names what cannot be pickled here, or unpickled there; then nothing has changed.
    """

    def lacking(names: list[str]) -> list[str]:
        there = ranks.ask(to, on_rank.lacking(names))
        return [name for name in names if any(name in lacks for lacks in there)]

    told = pickling.dump_all(values, lacking, pickling.main_variables())
    if told.errors:
        raise TransferError(f"nothing was pushed: {reasons(told.errors, 'cannot be pickled')}")
    try:
        delivery.deliver(ranks, told.pickled, told.along, to, progress)
    except TransferError as error:
        hint = modules.hint(str(error), ranks)
        if not hint:
            raise
        raise TransferError(f"{error}; {hint}") from None
    for own in told.own:
        notify(f"{own}: on each rank that is ddip's variable, and the notebook's was not pushed")
    notify_shares(told.shares, "pushed")
    return Transferred(sum(pickled.size for pickled in told.pickled.values()), told.moved, told.along)


def notify_shares(shares: Iterable[str], what: str) -> None:
    """Name objects that stay behind, and whose parts have been copied: in one line each."""
    for shared_part in dict.fromkeys(shares):
        notify(f"{shared_part}, which was not {what}")


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


def fetch(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report, known: Iterable[str] = ()
) -> list[Fetched]:
    """Have each of the ranks `of` pack these variables, and take what they have packed.

    What their functions read comes along, unless it is `known` to who gets them.
    """
    with stopping.button():
        try:
            return _fetch(ranks, names, of, progress, known)
        except BaseException as error:
            ranks.tell(of, on_rank.drop())
            if isinstance(error, RequestInterrupted):
                raise RequestInterrupted(f"nothing was pulled: {error}") from None
            raise


def _fetch(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report, known: Iterable[str]
) -> list[Fetched]:
    progress(f"ddip: {ranks_text(of)} {'packs' if len(of) == 1 else 'pack'} {', '.join(names)}")
    beside = {rank: isinstance(ranks.host(rank), LocalHost) for rank in of}
    calls = {
        rank: on_rank.pack(list(names), LARGE_BESIDE if is_near else PART, is_near, list(known))
        for rank, is_near in beside.items()
    }
    replies = ranks.ask_each(calls)
    sizes = [
        {name: pickling.room_of(parts) for name, parts in reply["sizes"] if name not in reply["values"]}
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
        values = {name: Pickled.of(memories[name], parts) for name, parts in reply["sizes"]}
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
) -> tuple[list[dict[str, Any]], Transferred]:
    """The objects `names` of each of the ranks `of`, in order.

    What their functions read, and the notebook lacks, becomes variables of the notebook.
    """
    all_fetched = fetch(ranks, names, of, progress, known_names())
    values = [unpack(fetched) for fetched in all_fetched]
    return values, transferred(names, all_fetched)


def known_names() -> list[str]:
    """Variables of the notebook, which need not come along with functions."""
    here = pickling.main_variables()
    return [name for name in list(here) if not name.startswith("_") and not pickling.lacks(here, name)]


def transferred(names: Sequence[str], all_fetched: Sequence[Fetched]) -> Transferred:
    """Return what has come, and name what stays behind."""
    notify_shares((share for fetched in all_fetched for share in fetched.reply["shares"]), "pulled")
    moved = [name for name in names if any(name in fetched.reply["moved"] for fetched in all_fetched)]
    along = dict.fromkeys(name for fetched in all_fetched for name in fetched.reply["along"])
    return Transferred(sum(fetched.size for fetched in all_fetched), moved, [*along])


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
    """The objects themselves; what came along with them is set in the notebook."""
    pickled, values = forward(fetched, "pulled"), dict[str, Any]()
    loader, here = Loader(pickled), pickling.main_variables()
    before = {name: here[name] for name in fetched.reply["along"] if name in here}
    for name in pickled:
        try:
            values[name] = loader.load(name)
        except (Exception, SystemExit) as error:  # a script must not end by what it pulls
            for brought in fetched.reply["along"]:
                here.pop(brought, None)
            here.update(before)
            if DDP.encode() in bytes(pickled[name].parts[0]) and "process group" in str(error):
                is_ddp = fetched.reply["wrappers"].get(name) == DDP
                raise TransferError(f"nothing was pulled: {_unwrap(name, is_ddp)}") from None
            errors = {name: f"{type(error).__name__}: {error}"}
            raise TransferError(
                f"nothing was pulled: {reasons(errors, 'cannot be unpickled in the notebook')}"
            ) from None
        if name in fetched.reply["along"]:  # the next may have code that reads it
            pickling.bring(here, {name: values.pop(name)})
    return values


def _unwrap(name: str, itself: bool) -> str:
    """What to do where the notebook has no process group for the DDP that `name` is, or holds."""
    if itself:
        cure = f"type `plain = {name}.module` in a %%dip cell, then %dipull plain"
        return f"{name} is a {DDP}, which lives on ranks only: {cure}"
    return f"{name} holds a {DDP}, which lives on ranks only: put its .module there instead, in a %%dip cell"
