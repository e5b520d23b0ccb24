"""Let the ranks agree on a step of a save or load: what is equal on all of them, and whether one has failed."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from ddip.protocol.text import escape_surrogates
from ddip.rank.inspection.state_history import history
from ddip.rank.inspection.state_report import VERSION, variable_of
from ddip.rank.inspection.walk import Walk
from ddip.sharded import contents

T = TypeVar("T")
HOOKS = re.compile(r"\._\w*hooks\w*\[")
"""Part of a path to a hook; ``fully_shard`` adds them in an order that differs between ranks."""


class AgreedError(Exception):
    """The reason why a save or load failed, the same on all ranks; nothing has changed."""


def gather_objects(value: T) -> list[T]:
    """Return the values of all ranks; a collective."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def do_on_all(step: Callable[[], T]) -> T:
    """Do `step` on each rank, and return its result; a collective.

    If it fails on any rank, all ranks raise AgreedError with the reason of the first. A reason that ddip gives itself
    is a ValueError or LookupError.
    """
    result, failure, cause = None, "", None
    try:
        result = step()
    except Exception as error:
        failure, cause = reason_text(error), error
    failures = gather_objects(failure)
    first = next(filter(None, failures), "")
    if first:
        where = "" if failures.count(first) == len(failures) else f" (on rank {failures.index(first)})"
        raise AgreedError(f"{first}{where}") from cause
    return result  # type: ignore[return-value]


@dataclass
class Digests:
    """Digests of this rank's variables, which are equal on ranks where the variables are."""

    variables: dict[str, str]
    """Digest of each variable's values, without the buffers of modules."""
    buffers: dict[str, str]
    """Digest of the buffers in each variable."""
    sharded: list[str]
    """Names of variables with a part of a sharded tensor."""


def reason_text(error: BaseException) -> str:
    """Return the reason of an error in one line, such as the system's, which torch replaces by its own."""
    root: BaseException | None = error
    while root is not None and not isinstance(root, OSError):
        root = root.__cause__ or root.__context__
    found = root or error
    line = escape_surrogates(str(found).partition("\n")[0])
    return line if type(found) in (ValueError, LookupError) else f"{type(found).__name__}: {line}"


def digest_variables() -> Digests:
    """Return the digests of this rank's variables.

    A sampler's rank does not count, nor the index of a device. There are no digests if there are too many objects.
    """
    walk = history.walk_now(keep=True)
    variables, buffers = dict[str, Any](), dict[str, Any]()
    for path in () if walk.is_cut else sorted(walk.values):
        if path.endswith(VERSION) or HOOKS.search(path) or _is_of_rank(path, walk):
            continue
        value = walk.values[path]
        if path.endswith("#type") and type(value) is tuple and len(value) == 4:  # dtype, shape, device, gradient
            value = (*value[:2], value[2].partition(":")[0], value[3])
        is_buffer = walk.links.get(path.partition("#")[0], ("", "", ""))[1] == "_buffers"
        hashes = buffers if is_buffer else variables
        digest = hashes.setdefault(variable_of(path), hashlib.blake2b(digest_size=16))
        digest.update(f"{path}={value!r}\n".encode("utf8", "surrogatepass"))
    return Digests(
        {name: digest.hexdigest() for name, digest in variables.items()},
        {name: digest.hexdigest() for name, digest in buffers.items()},
        sorted({variable_of(path) for path in walk.sharded}),
    )


def _is_of_rank(path: str, walk: Walk) -> bool:
    holder, _, name = path.rpartition(".")
    return name in contents.OF_THE_GROUP and walk.roles.get(holder) == "sampler"


def classify_variables(names: Collection[str], ranks: Sequence[Digests], imports: Collection[str]) -> dict[str, str]:
    """Return ``equal``, ``sharded`` or ``per rank`` for each of `names`; ``equal but for buffers`` for a module.

    `ranks`: the digests of all ranks; `imports`: names of imported modules.
    """
    found = {}
    for name in names:
        of_ranks = {digests.variables.get(name, "") for digests in ranks}
        if name not in imports and (len(of_ranks) > 1 or "" in of_ranks):
            found[name] = "per rank"
        elif any(name in digests.sharded for digests in ranks):
            found[name] = "sharded"
        else:
            found[name] = "equal" if len({d.buffers.get(name) for d in ranks}) == 1 else "equal but for buffers"
    return found
