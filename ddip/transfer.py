"""Objects -> ranks and back: all names arrive, or none does."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddip.errors import BadInput, TransferError, ranks_text
from ddip.rank import pickling


@dataclass(frozen=True)
class Packed:
    """Pickled values by name, and the names of those whose tensors came from an accelerator."""

    values: dict[str, bytes]
    moved: list[str]


def check_names(names: list[str], magic: str) -> None:
    """Refuse what is no variable's name."""
    for name in names:
        if not name.isidentifier():
            raise BadInput(f"{magic} {name}: {name!r} is no variable; type names, such as {magic} model losses")


def pack(values: Mapping[str, Any]) -> Packed:
    """Pickle `values` for the ranks; raises TransferError that names what cannot be."""
    packed, errors, moved = pickling.dump_all(dict(values))
    if errors:
        raise TransferError(f"nothing was pushed: {_reasons(errors, 'cannot be pickled')}")
    return Packed(packed, moved)


def staged(errors_by_rank: Mapping[int, Mapping[str, str]]) -> None:
    """Raise TransferError if a rank could not unpickle what was pushed."""
    errors = {
        name: f"{error} ({_where(errors_by_rank, name)})"
        for rank in errors_by_rank
        for name, error in errors_by_rank[rank].items()
    }
    if errors:
        raise TransferError(f"nothing was pushed: {_reasons(errors, 'cannot be unpickled there')}")


def _where(errors_by_rank: Mapping[int, Mapping[str, str]], name: str) -> str:
    return ranks_text([rank for rank, errors in errors_by_rank.items() if name in errors])


def forward(rank: int, reply: Mapping[str, Any], what: str) -> dict[str, bytes]:
    """The pickled objects in a rank's answer to ``transfer.pack``; raises TransferError that names what did not come.

    `what` says what was to be done with them: ``pulled``.
    """
    if reply["missing"]:
        names = ", ".join(reply["missing"])
        raise TransferError(f"nothing was {what}: rank {rank} has no {names}; type names that a %%dip cell defined")
    if reply["errors"]:
        raise TransferError(f"nothing was {what}: {_reasons(reply['errors'], f'cannot be pickled on rank {rank}')}")
    return dict(reply["values"])


def unpack(rank: int, reply: Mapping[str, Any]) -> dict[str, Any]:
    """The objects themselves."""
    values, errors = {}, {}
    for name, data in forward(rank, reply, "pulled").items():
        try:
            values[name] = pickle.loads(data)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
    if errors:
        raise TransferError(f"nothing was pulled: {_reasons(errors, 'cannot be unpickled in the notebook')}")
    return values


def _reasons(errors: Mapping[str, str], what: str) -> str:
    return "; ".join(f"{name} {what}: {error}" for name, error in errors.items())
