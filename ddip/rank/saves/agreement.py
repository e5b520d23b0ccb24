"""Let the ranks agree on a step of a save or load: what is equal on all of them, and whether one has failed."""

from __future__ import annotations

import functools
import hashlib
import itertools
import operator
import os
import pickle
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn.parameter import is_lazy

from ddip.protocol.text import escape_surrogates
from ddip.rank.inspection import kinds
from ddip.rank.inspection.state_report import VERSION
from ddip.rank.inspection.walk import Walk, variables_of
from ddip.rank.objects.checksum import BytesSum
from ddip.rank.saves import content_digest, save_folder
from ddip.rank.saves.content_digest import Fingerprints
from ddip.rank.saves.save_pickler import draws_own_part
from ddip.sharded import contents
from ddip.sharded.copies import from_all

T = TypeVar("T")
EQUAL_BUT_FOR_BUFFERS = "equal but for buffers"
HOOKS = re.compile(r"\._\w*hooks\w*(\[|#order)")
"""Part of a path to a hook; ``fully_shard`` adds them in an order that differs between ranks."""


class AgreedError(Exception):
    """The reason why a save or load failed, the same on all ranks; nothing has changed."""


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
    failures = from_all(failure)
    first = next(filter(None, failures), "")
    if first:
        where = "" if failures.count(first) == len(failures) else f" (on rank {failures.index(first)})"
        raise AgreedError(f"{first}{where}") from cause
    return result  # type: ignore[return-value]


def ensure_visible(version: str) -> None:
    """Raise AgreedError on all ranks if one does not see the folder of a version. A collective.

    If rank 0 does not see it any more either, another session has removed it.
    """
    if all(from_all(os.path.isdir(version))):
        return
    text = save_folder.NOT_SHARED if from_all(os.path.isdir(version))[0] else save_folder.IN_USE
    raise AgreedError(text.format(folder=os.path.dirname(version)))


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
    return line if type(found) in (ValueError, LookupError, pickle.PicklingError) else f"{type(found).__name__}: {line}"


def digest_variables(variables: Mapping[str, Any], prints: Fingerprints) -> Digests:
    """Return the digests of `variables`, with `prints` of the memory of their tensors.

    The rank of a sampler does not count if a load sets it, nor the index of a device. A variable that cannot be
    compared has no digest.
    """
    found = Digests({}, {}, [])
    for name, value in variables_of(variables).items():
        try:
            _add_digests(found, name, value, prints)
        except Exception:
            found.variables.pop(name, None)
    return found


def _add_digests(found: Digests, name: str, variable: Any, prints: Fingerprints) -> None:
    summarize = functools.partial(content_digest.digest_of_items, prints=prints)
    walk = Walk({name: variable}, keep=True, process_wide=False, summarize=summarize).finish()
    if walk.sharded:
        found.sharded.append(name)
    if walk.is_cut:
        return
    values, buffers = hashlib.blake2b(digest_size=16), hashlib.blake2b(digest_size=16)
    extra = ((path, _content_of(value, path in walk.unseen, prints)) for path, value in _sorted_items(walk.objects))
    for path, value in itertools.chain(_sorted_items(walk.values), extra):
        if path.endswith(VERSION) or HOOKS.search(path) or _is_of_rank(path, walk):
            continue
        if path.endswith("#type") and type(value) is tuple and len(value) == 4:  # dtype, shape, device, gradient
            value = (*value[:2], value[2].partition(":")[0], value[3])
        is_buffer = walk.links.get(path.partition("#")[0], ("", "", ""))[1] == "_buffers"
        digest = buffers if is_buffer else values
        digest.update(f"{path}={value!r}\n".encode("utf8", "surrogatepass"))
    found.variables[name], found.buffers[name] = values.hexdigest(), buffers.hexdigest()


def _sorted_items(items: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return sorted(items.items(), key=operator.itemgetter(0))


def _content_of(value: Any, is_unseen: bool, prints: Fingerprints) -> Any:
    """Return facts about contents of an object that a walk does not visit; None if there are none.

    `is_unseen`: whether the walk could not visit all parts.
    """
    if isinstance(value, torch.Tensor):
        if is_lazy(value) or kinds.local_part(value) is not None:
            return None
        if not kinds.is_strided(value) or value.is_quantized:
            return content_digest.digest_of(value, prints)
        place = int(value.storage_offset()), value.stride(), value.is_conj(), value.is_neg()
        return prints.of(value.untyped_storage()), *place
    if isinstance(value, (types.FunctionType, type)):
        return content_digest.code_of(value)
    array = kinds.array_of(value, kinds.mro_of(type(value)))
    if array is not None and not is_unseen:
        return BytesSum(array).finish()
    return content_digest.digest_of(value, prints) if is_unseen else None


def _is_of_rank(path: str, walk: Walk) -> bool:
    holder, _, name = path.rpartition(".")
    return name in contents.OF_THE_GROUP and draws_own_part(walk.objects.get(holder))


def classify_variables(names: Collection[str], ranks: Sequence[Digests], imports: Collection[str]) -> dict[str, str]:
    """Classify `names` as ``equal``, ``equal but for buffers``, ``sharded`` or ``per rank``.

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
            has_equal_buffers = len({digests.buffers.get(name) for digests in ranks}) == 1
            found[name] = "equal" if has_equal_buffers else EQUAL_BUT_FOR_BUFFERS
    return found
