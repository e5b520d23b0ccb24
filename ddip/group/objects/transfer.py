"""Push objects to ranks and pull them back, either all of the names or none."""

from __future__ import annotations

import mmap
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddip.errors import BadInput, RequestInterrupted, TransferError, ranks_text
from ddip.group import stopping
from ddip.group.members.ranks import Ranks
from ddip.group.objects import delivery, modules
from ddip.group.objects.delivery import LARGE_BESIDE, reasons_text
from ddip.group.objects.part_size import FIRST, PartSize
from ddip.output.area import notify
from ddip.output.progress import Report
from ddip.output.tables.tables import size_text
from ddip.protocol import on_rank
from ddip.protocol.objects import pickling, shared
from ddip.protocol.objects.pickling import Loader, Pickled, PickledNames
from ddip.protocol.rank_spec import STANDING_VARIABLES
from ddip.protocol.reports import PackedObjects

DDP = "DistributedDataParallel"
DDP_REFUSES = "DDP Pickling/Unpickling are only supported"
"""Beginning of the error with which torch refuses to pickle a DDP wrapper of another group, such as a former one."""
FSDP = (
    "{name} is an FSDP model, which lives on ranks only: gather its state dict in a %%dip cell, `state = "
    "get_model_state_dict({name}, options=StateDictOptions(full_state_dict=True, cpu_offload=True))`, both of "
    "torch.distributed.checkpoint.state_dict, then %dipull state"
)
PART_OF = re.compile(r"[^\W\d]\w*[.\[].*[\w\])]")
"""A part of a variable, such as ``net.module`` or ``losses[0]``."""


def check_names(names: list[str], magic: str) -> None:
    """Raise BadInput if one of `names` is not an identifier; `magic`: the command typed, for the message."""
    for name in names:
        if not name.isidentifier():
            raise BadInput(f"{magic} {name}: {name!r} is not a name; {_name_instead(name, magic)}")


def _name_instead(typed: str, magic: str) -> str:
    """Return advice on what to type instead of `typed`."""
    if not PART_OF.fullmatch(typed):
        return f"type names of variables, such as {magic} model"
    last = typed.rpartition(".")[2]
    name = last if last.isidentifier() else "part"
    where = " in a %%dip cell" if magic == "%dipull" else ""
    return f"type `{name} = {typed}`{where}, then {magic} {name}"


def check_own(names: Iterable[str], magic: str) -> None:
    """Raise BadInput if one of `names` is each rank's own variable, such as its number or device.

    `magic`: the command typed, for the message.
    """
    own = [name for name in names if name in STANDING_VARIABLES]
    if own:
        reason = f"{own[0]} is each rank's own variable, which ddip sets"
        raise BadInput(
            f"{magic} {own[0]}: {reason}; leave it out, or copy it by another name: notebook_{own[0]} = {own[0]}"
        )


@dataclass(frozen=True)
class Transferred:
    """The size and names of one push or pull."""

    size: int = 0
    """Bytes sent to each rank, or received from all."""
    moved: Sequence[str] = ()
    """Names of objects whose tensors were moved to the CPU; of several that share tensors, the first."""
    along: Sequence[str] = ()
    """Names that were not requested, but which functions read and the receiver lacked."""


def push_values(
    ranks: Ranks, values: Mapping[str, Any], to: Sequence[int], progress: Report
) -> tuple[Transferred, Mapping[str, Pickled]]:
    """Put `values` into the namespaces of the ranks `to`, with the names that they need to run functions.

    Such names are read by functions of `values` and missing on these ranks. Returns the sizes and names, and the
    pickled objects, which use the memory of `values`. Prints a line for each object that was not pushed.
    Raises TransferError with the names that cannot be pickled in the notebook or unpickled on a rank, RequestFailed,
    and RequestInterrupted; nothing has changed then.
    """
    packed = pack_values(values, lambda names: find_lacking(ranks, names, to))
    return push_packed(ranks, packed, to, progress), packed.pickled


def find_lacking(ranks: Ranks, names: list[str], to: Sequence[int]) -> list[str]:
    """Return which of `names` one of the ranks `to` lacks."""
    lacks_by_rank = ranks.ask(to, on_rank.lacking_names(names))
    return [name for name in names if any(name in lacks for lacks in lacks_by_rank)]


def pack_values(values: Mapping[str, Any], lacking: Callable[[list[str]], Collection[str]]) -> PickledNames:
    """Pickle `values` of the notebook, with those names that functions read and `lacking` returns.

    Raises TransferError with the names that cannot be pickled.
    """
    packed = pickling.dump_all(values, lacking, pickling.main_variables())
    if packed.errors:
        raise TransferError(f"nothing was pushed: {reasons_text(packed.errors, 'cannot be pickled')}")
    return packed


def push_packed(ranks: Ranks, packed: PickledNames, to: Sequence[int], progress: Report) -> Transferred:
    """Put the objects of `packed` into the namespaces of the ranks `to`, as `push_values` does."""
    try:
        former = delivery.deliver_objects(ranks, packed.pickled, packed.along, to, progress)
    except TransferError as error:
        hint = modules.suggest_push(str(error), ranks)
        if not hint:
            raise
        raise TransferError(f"{error}; {hint}") from None
    for own in packed.own:
        notify(f"{own}: ddip sets it on each rank, so the notebook's value was not pushed")
    notify_shares(packed.shares, "pushed")
    for held in former:
        notify(held)
    size = sum(pickled.size for pickled in packed.pickled.values())
    return Transferred(size, packed.moved, packed.along)


def notify_shares(shares: Iterable[str], what: str) -> None:
    """Print each of `shares`, which describe objects that were not copied although a part was.

    `what`: the participle for the message, such as ``pushed``.
    """
    for shared_part in dict.fromkeys(shares):
        notify(f"{shared_part}, which was not {what}")


@dataclass(frozen=True)
class Fetched:
    """The objects that a rank has pickled."""

    rank: int
    reply: PackedObjects
    values: Mapping[str, Pickled]

    @property
    def size(self) -> int:
        """Size in bytes."""
        return sum(pickled.size for pickled in self.values.values())


def fetch_variables(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report, known: str = ""
) -> list[Fetched]:
    """Fetch the pickled variables `names` of each of the ranks `of`, in their order.

    Names that their functions read come along, unless they are in `known`, the receiver's names separated by spaces.
    Raises RequestFailed or RequestInterrupted; missing names and failed pickles raise nothing here, but in
    `pickled_values`.
    """
    with stopping.note_presses():
        try:
            return _fetch_packed(ranks, names, of, progress, known)
        except BaseException as error:
            ranks.tell(of, on_rank.drop_transfers())
            if isinstance(error, RequestInterrupted):
                raise RequestInterrupted(f"nothing was pulled: {error}") from None
            raise


def _fetch_packed(ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report, known: str) -> list[Fetched]:
    progress(f"ddip: {ranks_text(of)} {'packs' if len(of) == 1 else 'pack'} {', '.join(names)}")
    beside = {rank: ranks.is_beside(rank) for rank in of}
    most = FIRST // (max(1, len(names)) * max(1, len(of) - sum(beside.values())))
    calls = {
        rank: on_rank.pack_variables(list(names), LARGE_BESIDE if is_near else most, is_near, known)
        for rank, is_near in beside.items()
    }
    replies = ranks.ask_each(calls)
    part_size = PartSize()
    sizes = [
        {name: pickling.room_of(parts) for name, parts in reply["sizes"] if name not in reply["values"]}
        for reply in replies
    ]
    total, done, fetched = sum(size for by_name in sizes for size in by_name.values()), 0, []
    for rank, reply, by_name in zip(of, replies, sizes, strict=True):
        memories: dict[str, bytearray | mmap.mmap] = {**reply["values"]}
        for name, size in by_name.items():
            memory = read_shared(reply["paths"].get(name, ""), size)
            if memory is None:
                memory = bytearray()
                for begin, end in part_size.split(size):
                    progress(f"ddip: pulling {name} from rank {rank}, {size_text(size)}", (done + begin) / total)
                    memory += ranks.ask([rank], on_rank.pull_part(name, begin, end), size=end - begin)[0]
            memories[name] = memory
            done += size
        values = {name: Pickled.of(memories[name], parts) for name, parts in reply["sizes"]}
        fetched.append(Fetched(rank, reply, values))
    if total:
        ranks.tell(of, on_rank.drop_transfers())
    return fetched


def read_shared(path: str, size: int) -> bytearray | mmap.mmap | None:
    """Read `size` bytes that a rank beside the notebook shares at `path`; None if they cannot be read.

    Small memory is copied; large memory is mapped.
    """
    try:
        found = shared.map_file(path) if path else None
    except (OSError, ValueError):
        return None
    if found is None or len(found) != size:
        return None
    return bytearray(found) if size <= shared.COPIED else found


def pull_values(
    ranks: Ranks, names: Sequence[str], of: Sequence[int], progress: Report
) -> tuple[list[dict[str, Any]], Transferred]:
    """Return the objects `names` of each of the ranks `of`, in order, and what was transferred.

    Names that their functions read, and that the notebook lacks, become variables of the notebook. Raises TransferError
    if one is missing or cannot be pickled or unpickled, RequestFailed, and RequestInterrupted.
    """
    all_fetched = fetch_variables(ranks, names, of, progress, known_names())
    values = [unpickle_values(fetched) for fetched in all_fetched]
    return values, report_transfer(names, all_fetched)


def known_names() -> str:
    """Return the names of the notebook's own variables in one string, separated by spaces.

    A rank that sends a function to the notebook need not send these variables along with it. Names with a leading
    underscore are left out. In a list, ipyparallel would treat each name as a separate object.
    """
    variables = pickling.main_variables()
    return " ".join(
        name for name in list(variables) if not name.startswith("_") and not pickling.lacks_variable(variables, name)
    )


def report_transfer(names: Sequence[str], all_fetched: Sequence[Fetched]) -> Transferred:
    """Return what was transferred, and print a line for each object that was not pulled."""
    notify_shares((share for fetched in all_fetched for share in fetched.reply["shares"]), "pulled")
    moved = [name for name in names if any(name in fetched.reply["moved"] for fetched in all_fetched)]
    along = dict.fromkeys(name for fetched in all_fetched for name in fetched.reply["along"])
    return Transferred(sum(fetched.size for fetched in all_fetched), moved, [*along])


def pickled_values(fetched: Fetched, what: str) -> Mapping[str, Pickled]:
    """Return the pickled objects of a rank; raise TransferError with the names that it could not pickle.

    `what` is the participle for error messages, such as ``pulled``.
    """
    rank, reply = fetched.rank, fetched.reply
    if reply["missing"]:
        names = ", ".join(reply["missing"])
        raise TransferError(
            f"nothing was {what}: rank {rank} has no variable {names}; type names that a %%dip cell has defined"
        )
    if reply["errors"] and what == "pulled":
        sharded = [FSDP.format(name=name) for name in reply["errors"] if reply["wrappers"].get(name, DDP) != DDP]
        refused = [name for name, why in reply["errors"].items() if DDP_REFUSES in why]
        wrapped = [_unwrap_advice(name, reply["wrappers"].get(name) == DDP) for name in refused]
        if sharded or wrapped:
            raise TransferError(f"nothing was pulled: {'; '.join([*sharded, *wrapped])}")
    if reply["errors"]:
        raise TransferError(f"nothing was {what}: {reasons_text(reply['errors'], f'cannot be pickled on rank {rank}')}")
    return fetched.values


def unpickle_values(fetched: Fetched) -> dict[str, Any]:
    """Unpickle the fetched objects and return those that were requested, by name.

    Names that came along become notebook variables instead. Raises TransferError if one is missing, or cannot be
    pickled or unpickled; the notebook's variables are unchanged then.
    """
    pickled, values = pickled_values(fetched, "pulled"), dict[str, Any]()
    loader, variables = Loader(pickled), pickling.main_variables()
    before = {name: variables[name] for name in fetched.reply["along"] if name in variables}
    for name in pickled:
        try:
            values[name] = loader.load(name)
        except (Exception, SystemExit) as error:  # a pulled object must not end the script
            for brought in fetched.reply["along"]:
                variables.pop(brought, None)
            variables.update(before)
            if DDP.encode() in bytes(pickled[name].parts[0]) and "process group" in str(error):
                is_ddp = fetched.reply["wrappers"].get(name) == DDP
                raise TransferError(f"nothing was pulled: {_unwrap_advice(name, is_ddp)}") from None
            errors = {name: f"{type(error).__name__}: {error}"}
            raise TransferError(
                f"nothing was pulled: {reasons_text(errors, 'cannot be unpickled in the notebook')}"
            ) from None
        if name in fetched.reply["along"]:  # the next object may have code that reads it
            pickling.set_missing_variables(variables, {name: values.pop(name)})
    return values


def _unwrap_advice(name: str, is_wrapper: bool) -> str:
    """Return advice for an object that is or holds a DDP wrapper, which cannot live in the notebook."""
    if is_wrapper:
        advice = f"type `plain = {name}.module` in a %%dip cell, then %dipull plain"
        return f"{name} is a {DDP}, which lives on ranks only: {advice}"
    return f"{name} holds a {DDP}, which lives on ranks only: put its .module there instead, in a %%dip cell"
