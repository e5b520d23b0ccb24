"""Push and pull between a notebook and the ranks of a kept group, through the keeper.

    notebook: `KeptObjects`                   keeper: functions of this module     ranks
    pickles values  --- file --------------->  `push_file` ----------------------> unpickle them
    unpickles       <-- file ----------------  `fetch_file` <---------------------- pickle variables

The keeper does not unpickle: classes, functions and shared memory are as in a group of the notebook's own. The file is
in the keeper's folder, and is removed at once.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddip.errors import TransferError
from ddip.group.objects import transfer
from ddip.group.objects.modules import ModulesPushed
from ddip.group.objects.transfer import Fetched, Transferred
from ddip.group.watching import peek
from ddip.output import area
from ddip.output.progress import Progress
from ddip.protocol.objects.pickling import Pickled, PickledNames

if TYPE_CHECKING:
    from ddip.group.group import Group
    from ddip.output.progress import Report

QUIET_SECONDS = 0.5
"""Seconds after which the keeper shows the progress of a transfer."""


def _to_bytes(pickled: Mapping[str, Pickled]) -> dict[str, list[bytes]]:
    return {name: [bytes(part) for part in one.parts] for name, one in pickled.items()}


def _from_bytes(parts: Mapping[str, list[bytes]]) -> dict[str, Pickled]:
    return {name: Pickled([memoryview(bytearray(part)) for part in one]) for name, one in parts.items()}


def _write_file(path: Path, content: object, what: str) -> None:
    """Pickle `content` to a file.

    Raises TransferError, with the participle `what`, if the file system refuses it.
    """
    try:
        path.write_bytes(pickle.dumps(content))
    except OSError as error:
        raise TransferError(
            f"nothing was {what}: {path}: {error.strerror}; free some space there, or start the group again with "
            "TMPDIR set to a folder with more"
        ) from None


class KeptObjects:
    """Stand-in for the group of a keeper in ``%dipush`` and ``%dipull``.

    `call` calls a function of this module in the keeper, and returns its value; `folder` is the keeper's.
    """

    def __init__(self, call: Callable[..., Any], folder: Path) -> None:
        self._call = call
        self._path = folder / "values"
        self._path.unlink(missing_ok=True)  # of a kernel that was killed
        self.transferred = Transferred()
        """The sizes of the last transfer."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return int(self._call("world_size"))

    def push(self, values: Mapping[str, Any], ranks: Sequence[int] | None, progress: Report) -> list[str]:
        """Copy objects into the namespaces of ranks, as ``Group.push`` does."""
        to = [*range(self.world_size)] if ranks is None else [*ranks]
        packed = transfer.pack_values(values, lambda names: list(self._call("find_lacking", names, to)))
        try:
            _write_file(self._path, (replace(packed, pickled={}), _to_bytes(packed.pickled)), "pushed")
            self.transferred = Transferred(**self._call("push_file", str(self._path), to))
        finally:
            self._path.unlink(missing_ok=True)
        return [*self.transferred.moved]

    def pull_all(
        self, names: Sequence[str], ranks: Sequence[int], progress: Report
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return copies of variables of several ranks, as ``Group.pull_all`` does."""
        return self._fetch(names, ranks, None)

    def peek_all(
        self, names: Sequence[str], ranks: Sequence[int], seconds: float, progress: Report
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """Return copies of the current variables of several ranks, as ``Group.peek_all`` does."""
        return self._fetch(names, ranks, seconds)

    def _fetch(
        self, names: Sequence[str], ranks: Sequence[int], seconds: float | None
    ) -> tuple[list[dict[str, Any]], list[str]]:
        try:
            self._call("fetch_file", str(self._path), [*names], [*ranks], transfer.known_names(), seconds)
            replies = pickle.loads(self._path.read_bytes())
        finally:
            self._path.unlink(missing_ok=True)
        all_fetched = [Fetched(rank, reply, _from_bytes(values)) for rank, reply, values in replies]
        values = [transfer.unpickle_values(fetched) for fetched in all_fetched]
        self.transferred = transfer.report_transfer(names, all_fetched)
        return values, [*self.transferred.moved]

    def push_modules(self, typed: str, reload: bool, progress: Report) -> ModulesPushed:
        """Push the notebook's own modules, as ``Group.push_modules`` does.

        The keeper reads them: it has the notebook's folder.
        """
        pushed = self._call("push_modules", typed, reload)
        by_rank = {
            name: {int(rank): why for rank, why in ranks.items()} for name, ranks in pushed["not_reloaded"].items()
        }
        return ModulesPushed(**{**pushed, "not_reloaded": by_rank})

    def variable_names(self, beginning: str, rank: int = 0) -> list[str]:
        """Return the names of a rank's variables that begin with `beginning`."""
        return list(self._call("variable_names", beginning, rank))


# -- in the keeper


def push_modules(group: Group, typed: str, reload: bool) -> dict[str, Any]:
    """Push modules; return `ModulesPushed` as a dict."""
    return asdict(group.push_modules(typed, reload=reload))


def find_lacking(group: Group, names: list[str], to: list[int]) -> list[str]:
    """Return which of `names` one of the ranks `to` lacks."""
    with group.lifecycle.ready_for_push(to, lambda text, share=None: None):
        return transfer.find_lacking(group.ranks, names, to)


def push_file(group: Group, path: str, to: list[int]) -> dict[str, Any]:
    """Push the pickled objects in a file to the ranks `to`; return `Transferred` as a dict."""
    packed, parts = pickle.loads(Path(path).read_bytes())
    whole: PickledNames = replace(packed, pickled=_from_bytes(parts))
    bar = Progress(after=QUIET_SECONDS)
    try:
        with group.lifecycle.ready_for_push(to, bar):
            pushed = transfer.push_packed(group.ranks, whole, to, bar)
            group.history.note_push(area.cell_number() or 1, whole.pickled, to)
            return asdict(pushed)
    finally:
        bar.end("")


def fetch_file(group: Group, path: str, names: list[str], of: list[int], known: str, seconds: float | None) -> None:
    """Write variables of the ranks `of` to a file, as pickled there.

    `known`: the notebook's names; `seconds`: limit of a snapshot as in ``Group.peek``, None to wait for cells.
    """
    bar = Progress(after=QUIET_SECONDS)
    try:
        if seconds is not None:
            all_fetched = peek.fetch_pickled(group.ranks, names, of, seconds, bar, known)
        else:
            with group.lifecycle.ready_for_pull(names, of, bar):
                all_fetched = transfer.fetch_variables(group.ranks, names, of, bar, known)
    finally:
        bar.end("")
    replies = [(fetched.rank, _plain_reply(fetched), _to_bytes(fetched.values)) for fetched in all_fetched]
    _write_file(Path(path), replies, "pulled")


def _plain_reply(fetched: Fetched) -> Any:
    """Return the reply of a rank without the values, which `_to_bytes` copies."""
    return {**fetched.reply, "values": {}}
