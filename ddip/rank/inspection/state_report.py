"""Report this rank's state to the notebook as comparable hashes, with the text of paths on request.

    list_snapshots    names of the cells after which the state was recorded
    hash_variables    hashes of all values now, and after the last two good cells that every rank has recorded
    describe_paths    path and value, in words, of some of them

A path takes 24 bytes. The hashes travel in ddip messages, never over the user's process group: after a fault, a
collective by ddip could be matched with one of the user's.
"""

from __future__ import annotations

import hashlib
import re
from array import array
from collections.abc import Mapping
from typing import Any

from ddip.protocol.on_rank import STEPPED_ROLES
from ddip.protocol.reports import ChangedConstant, Compared, Described
from ddip.rank.inspection.state_history import Snapshot, history
from ddip.rank.inspection.walk import Path, Walk
from ddip.rank.objects import iteration

VERSION = "#version"
MOST_AT_REST = 400
LENGTHS = ("#length", "#keys", "#members")
IN_WORDS = {
    "generator": "another position",
    "sum": "other values",
    "array": "other values",
    "text": "another text",
    "int": "another number",
}
"""Texts for values that are represented by a tuple, by the tuple's first item."""
MISSING = object()
_walk: Walk | None = None
"""Walk of the last comparison, kept until the next cell."""
_by_hash: dict[int, Path] = {}
"""Paths of that walk by their hashes."""


def list_snapshots(failed: str) -> list[str]:
    """Return the names of the cells that have a snapshot, the latest first.

    `failed` is the name of a cell that has failed on some rank, or "". Snapshots that were taken after it began are
    dropped first.
    """
    if failed:
        history.forget_since(failed)
    return history.cells


def hash_variables(cells: list[str], after_fault: bool) -> Compared:
    """Walk over the variables and return their hashes, to be compared with those of other ranks.

    `cells` names the cells with a snapshot on every rank, the latest first. `after_fault`: also report flags and empty
    containers that a failed cell left changed. The walk is kept for `describe_paths`, until `free_walk`. Raises
    TimeoutError if it takes too long.
    """
    global _walk
    last, former = (*(history.after(cell) for cell in cells), None, None)[:2]
    _walk = walk = history.walk_now(known=() if last is None else last.names)
    _by_hash.clear()
    _by_hash.update({hash_of(path.removesuffix(VERSION)): path.removesuffix(VERSION) for path in walk.values})
    at_rest = _find_changed_flags(walk, last, former) if after_fault and last is not None and former is not None else []
    return {
        "now": _pack_hashes(walk.values),
        "good": b"" if last is None else _pack_hashes(last.values),
        "former": b"" if former is None else _pack_hashes(former.values),
        "has_history": last is not None,
        "at_rest": at_rest,
        "is_cut": walk.is_cut,
    }


def free_walk() -> None:
    """Free the walk of the last comparison."""
    global _walk
    _walk = None
    _by_hash.clear()


def describe_paths(hashes: list[int]) -> dict[int, Described]:
    """Return path, value and owner by hash, for those of the path `hashes` that this rank has.

    Call it after `hash_variables`, whose walk it reads.
    """
    assert _walk is not None
    found: dict[int, Described] = {}
    sharded = {variable_of(path) for path in _walk.sharded}
    for number in hashes:
        path = _by_hash.get(number)
        if path is not None:
            value = _walk.values.get(path, MISSING)
            (owner, part), role = owner_of(path, _walk), role_at(path, _walk)
            found[number] = {
                "path": path,
                "value": None if value is MISSING else text_of(value),
                "owner": owner,
                "part": part,
                "counts": value is MISSING or is_count(path, value),
                "is_new_evidence": is_counter(path, value) or role in STEPPED_ROLES,
                "is_trained": role == "optimizer" or _is_parameter(path, _walk),
                "role": role,
                "sharded": variable_of(path) in sharded,
            }
    return found


def find_stepped_objects() -> tuple[list[Path], int]:
    """Return the paths of optimizers, schedulers and scalers, and the number of optimizer steps."""
    walk = history.walk_now(checksums=False)
    return [path for path, role in walk.roles.items() if role in STEPPED_ROLES], iteration.steps_taken


def hash_of(text: str) -> int:
    """Return a 64-bit hash of `text` that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf8", "surrogatepass"), digest_size=8).digest(), "little")


def _pack_hashes(values: Mapping[Path, Any]) -> bytes:
    """Return the hashes of path, value and version of each path, 8 bytes each; 0 means none."""
    rows: dict[Path, list[int]] = {}
    for path, value in values.items():
        is_version = path.endswith(VERSION)
        row = rows.setdefault(path.removesuffix(VERSION), [0, 0])
        row[is_version] = hash_of(repr(value))
    packed = array("Q")
    for path, row in rows.items():
        packed.extend((hash_of(path), *row))
    return packed.tobytes()


def _find_changed_flags(walk: Walk, last: Snapshot, former: Snapshot) -> list[ChangedConstant]:
    """Return flags, constants and empty containers that were equal after two good cells, and differ now.

    `walk`: the present state. `last`, `former`: snapshots after these cells. Only variables that the last good cell
    changed are considered, as the usual state of others is unknown. Variables themselves are left out, because the
    failed cell may have set them on purpose, and so are gradients and training modes.
    """
    found: list[ChangedConstant] = []
    changed_variables = {
        variable_of(path) for path, value in last.values.items() if former.values.get(path, MISSING) != value
    }
    for path, before in last.values.items():
        if not _is_flag(path, before) or former.values.get(path, MISSING) != before or re.fullmatch(r"\w+", path):
            continue
        if variable_of(path) not in changed_variables or path.endswith((".grad", ".training")):
            continue
        current = walk.values.get(path, MISSING)
        if type(current) is type(before) and current == before:
            continue
        if current is MISSING and f"{path}{VERSION}" not in walk.values and f"{path}#type" not in walk.values:
            continue  # the object itself was replaced or removed
        owner, part = owner_of(path, walk)
        text = "set" if current is MISSING else text_of(current)
        found.append({"path": path, "before": text_of(before), "now": text, "owner": owner, "part": part})
        if len(found) == MOST_AT_REST:
            break
    return found


def _is_flag(path: Path, value: Any) -> bool:
    if path.endswith(LENGTHS):
        return bool(value == 0)
    if "#" in path:
        return False
    is_text = type(value) is str and re.match(r"-?[\d.]|-?inf|nan", value) is None
    return type(value) is bool or value is None or is_text


def is_count(path: Path, value: Any) -> bool:
    """Return whether values at `path` seldom differ between ranks by design, such as counters and flags."""
    if path.endswith(LENGTHS) or path.endswith(("#type", "#left", "#line")) or type(value) in (int, bool, type(None)):
        return True
    if type(value) is tuple:
        return bool(value[:1] == ("generator",))
    return type(value) is str and re.match(r"-?[\d.]+(e-?\d+)?$|-?inf|nan|torch\.|range|slice", value) is None


def is_counter(path: Path, value: Any) -> bool:
    """Return whether `value` is a counter, enum or generator, which is evidence even at a new path."""
    if type(value) is int and "#" not in path:
        return True
    if type(value) is tuple:
        return bool(value[:1] == ("generator",))
    return type(value) is str and re.fullmatch(r"[A-Z]\w*\.[A-Z_]+", value) is not None


def _is_parameter(path: Path, walk: Walk) -> bool:
    facts = walk.values.get(f"{path}#type")
    return type(facts) is tuple and facts[-1] is True  # requires_grad


def variable_of(path: Path) -> str:
    """Return the variable, user module or process-wide generator with which `path` begins."""
    if path.startswith("<"):
        return path.partition(">")[0] + ">"
    return path.partition("#")[0].partition(".")[0].partition("[")[0]


def owner_of(path: Path, walk: Walk) -> tuple[Path, str]:
    """Return the path of the object to report for a difference at `path`, and which part of it differs."""
    base = path.partition("#")[0]
    if base.startswith("<") and type(walk.values.get(base)) is tuple:
        return base, "state"
    for root in walk.modules:
        if base.startswith(f"{root}."):
            rest = base[len(root) :]
            if re.search(r"\.(grad|_accumulated_grad|unsharded_accumulated_grad)\b", rest):
                return root, "gradients"
            if rest.endswith(".training"):
                return root, "training mode"
            if f"{base}#type" in walk.values and not re.search(r"\._\w*\b.*", rest):
                return root, "parameters and buffers"
    for root in walk.optimizers:
        if base.startswith(f"{root}.state["):
            return root, "state"
    holder = base.rpartition(".")[0] if "." in base else base.partition("[")[0]
    return (holder, "attributes") if holder else (base, "value")


def role_at(path: Path, walk: Walk) -> str:
    """Return the role in a training of the object around `path`; "" if it has none."""
    base = path.partition("#")[0]
    if base.startswith("<") and type(walk.values.get(base)) is tuple:
        return "generator"
    if any(base.startswith(f"{root}.") for root in walk.modules):
        return "module"
    holders = (root for root in walk.roles if base == root or base.startswith((f"{root}.", f"{root}[")))
    holder = max(holders, key=len, default="")
    return walk.roles.get(holder, "")


def text_of(value: Any) -> str:
    """Return a recorded value as text for a message."""
    if type(value) is tuple:
        kind = value[0] if value else ""
        return IN_WORDS.get(kind, repr(value))
    return str(value) if type(value) is str and re.match(r"-?[\d.]", value) else repr(value)
