"""Save the variables of all ranks to a folder (``%dipsave``): a collective between two cells, or between two steps.

    pack      each rank pickles its variables with one memo; variables that cannot be pickled are left out
    compare   the ranks find which variables and tensors are equal on all of them
    write     tensors equal on all ranks once, sharded ones in parts, others per rank (`tensor_files`)
    commit    rank 0 gives the complete version its name (`save_folder`)

In the background, tensors are copied first, and a thread of each rank writes them. It leaves a file with its result;
the thread of rank 0 waits for these files, and commits. Threads use no collectives.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import pickle
import threading
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from ddip.protocol.reports import SaveReport
from ddip.rank.runtime import process_settings
from ddip.rank.saves import save_folder
from ddip.rank.saves.agreement import (
    AgreedError,
    Digests,
    classify_variables,
    digest_variables,
    do_on_all,
    ensure_visible,
    reason_text,
)
from ddip.rank.saves.content_digest import Fingerprint, Fingerprints
from ddip.rank.saves.save_pickler import Slot
from ddip.rank.saves.tensor_files import TensorWriter
from ddip.rank.saves.variables import (
    Packed,
    choose_variables,
    find_keys,
    number_objects,
    pack_variables,
    reshard_models,
    structure_of,
)
from ddip.sharded import contents
from ddip.sharded.copies import from_all
from ddip.sharded.layout import DTensor

HEADER, STREAM = "header", "stream"
"""Names of two tensors of bytes of each rank: the pickled header, and the pickles of all variables."""
POLL_SECONDS = 0.02
_running: list[_Background] = []
"""The save that threads write, or the last one."""


@dataclass
class _PartFacts:
    """Facts about one rank's part of a save, which it sends to the others."""

    names: list[str]
    imports: list[str]
    left_out: dict[str, str]
    digests: Digests
    sums: list[Fingerprint]
    """Fingerprint of each plain tensor."""
    shards: list[Any]
    """Shape and type of each sharded tensor."""
    collectives: list[Any]
    """DDP models and device meshes, which a load creates on all ranks together."""


def save_variables(folder: str, names: list[str], background: bool) -> SaveReport:
    """Save the variables `names`, by default all, to `folder`; a collective of all ranks.

    With `background`, tensors are copied, and threads write them; `background_save` returns how that ended. If it
    fails, the report has the reason, the same on all ranks, and the former save of the folder stays.
    """
    try:
        return _save_agreed(folder, names, background)
    except AgreedError as error:
        return {"error": str(error), "size": 0, "variables": {}, "left_out": {}, "seconds": 0.0}


def _save_agreed(folder: str, names: list[str], background: bool) -> SaveReport:
    began = time.monotonic()
    wait_for_background()
    generators = contents.process_generators()
    variables = do_on_all(lambda: choose_variables(names))
    reshard_models(variables.values())
    packed = do_on_all(lambda: pack_variables(variables))
    ranks = from_all(do_on_all(lambda: _describe_part(variables, packed)))
    slots = do_on_all(lambda: _name_slots(packed, ranks))
    buckets = [contents.buckets_of(wrapper) if contents.buckets_of else [] for wrapper in packed.pickler.wrappers]
    tensors = {name: slot.tensor for name, slot in slots.items()}
    header = {
        "parts": {name: pickled.sizes for name, pickled in packed.pickled.items()},
        "slots": [(name, slot.device, slot.shape, slot.is_sharded) for name, slot in slots.items()],
        "structures": {name: structure_of(value) for name, value in variables.items() if name in packed.pickled},
        "identities": number_objects(find_keys(variables)),
        "sums": ranks[dist.get_rank()].sums,
        "places": packed.pickler.places,
        "buckets": buckets,
        "with_workers": packed.pickler.with_workers,
        "generators": generators,
        "settings": {k: v for k, v in process_settings.find_changed().items() if k in process_settings.NUMERIC},
    }
    if background:
        tensors = {name: _copy_tensor(tensor) for name, tensor in tensors.items()}
    tensors |= _stream_tensors(header, packed)
    sizes = from_all({name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()})
    kinds = classify_variables(
        list(dict.fromkeys(name for rank in ranks for name in rank.names)),
        [rank.digests for rank in ranks],
        ranks[0].imports,
    )
    left_out = {name: why for rank in ranks for name, why in rank.left_out.items()}
    summary = {
        "format": save_folder.FORMAT,
        "releases": save_folder.current_releases(),
        "time": time.time(),
        "ranks": dist.get_world_size(),
        "variables": kinds,
        "left_out": left_out,
    }
    version = _begin_version(folder)
    with contextlib.ExitStack() as in_use:
        if dist.get_rank() == 0:
            in_use.enter_context(save_folder.lock_folder(version, fcntl.LOCK_EX))
            in_use.push(functools.partial(_drop_after_error, version))
        writer = TensorWriter(tensors, version)
        if background:
            _running[:] = [_Background(writer, version, summary, in_use.pop_all())]
        else:
            _write_version(writer, version, summary)
    size = sum({name: size for of_rank in sizes for name, size in of_rank.items()}.values())
    seconds = time.monotonic() - began
    return {"error": "", "size": size, "variables": kinds, "left_out": left_out, "seconds": seconds}


def _drop_after_error(version: str, kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None:
        save_folder.drop_version(version)


def _describe_part(variables: dict[str, Any], packed: Packed) -> _PartFacts:
    slots = packed.pickler.slots
    prints = Fingerprints()
    return _PartFacts(
        names=[name for name in packed.pickled if name in variables],
        imports=[name for name, value in variables.items() if issubclass(type(value), ModuleType)],
        left_out=packed.left_out,
        digests=digest_variables(variables, prints),
        sums=[prints.of(slot.tensor.untyped_storage()) for slot in slots if not slot.is_sharded],
        shards=[(slot.shape, str(slot.tensor.dtype)) for slot in slots if slot.is_sharded],
        collectives=[len(packed.pickler.wrappers), packed.pickler.meshes],
    )


def _name_slots(packed: Packed, ranks: list[_PartFacts]) -> dict[str, Slot]:
    """Return the slots by name; all ranks have the same name for a sharded tensor, and for an equal one.

    Raises ValueError if the ranks have different sharded tensors, DDP models or device meshes.
    """
    own = ranks[dist.get_rank()]
    if any(rank.shards != own.shards or rank.collectives != own.collectives for rank in ranks):
        raise ValueError("the ranks have different sharded tensors, DDP models or device meshes; give all the same")
    found: dict[str, Slot] = {}
    plain = sharded = 0
    for slot in packed.pickler.slots:
        if slot.is_sharded:
            found[f"sharded/{sharded}"] = slot
            sharded += 1
        else:
            is_equal = all(rank.sums[plain : plain + 1] == own.sums[plain : plain + 1] for rank in ranks)
            found[f"equal/{plain}" if is_equal else f"rank{dist.get_rank()}/{plain}"] = slot
            plain += 1
    return found


def _stream_tensors(header: dict[str, Any], packed: Packed) -> dict[str, torch.Tensor]:
    """Return the header, the pickles, and each buffer that the pickles refer to, as tensors of bytes."""
    parts = {STREAM: bytearray().join(pickled.parts[0] for pickled in packed.pickled.values())}
    for name, pickled in packed.pickled.items():
        parts |= {f"{name}/{number}": bytearray(part) for number, part in enumerate(pickled.parts) if number}
    crcs = {name: zlib.crc32(part) for name, part in parts.items()}
    parts[HEADER] = bytearray(pickle.dumps(header | {"crcs": crcs}))
    prefix = f"rank{dist.get_rank()}"
    return {f"{prefix}/{name}": torch.frombuffer(part, dtype=torch.uint8) for name, part in parts.items()}


def _copy_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        return tensor.clone()  # type: ignore[no-any-return]
    return tensor.to("cpu", copy=True)


def _begin_version(folder: str) -> str:
    """Create the folder of a new version on rank 0, and return it on all ranks, which must see it."""
    version = do_on_all(lambda: save_folder.begin_version(folder) if dist.get_rank() == 0 else "")
    version = from_all(version)[0]
    ensure_visible(version)
    return version


def _write_version(writer: TensorWriter, version: str, summary: dict[str, Any]) -> None:
    results = from_all(do_on_all(writer.write))
    do_on_all(lambda: _commit_version(writer, version, summary, results) if dist.get_rank() == 0 else None)


def _commit_version(writer: TensorWriter, version: str, summary: dict[str, Any], results: list[Any]) -> None:
    writer.finish(results)
    save_folder.complete_version(version, summary)


# -- in the background


class _Background(threading.Thread):
    """Thread that writes this rank's part; on rank 0, it waits for all parts and commits the save."""

    def __init__(
        self, writer: TensorWriter, version: str, summary: dict[str, Any], in_use: contextlib.ExitStack
    ) -> None:
        super().__init__(name="ddip-save", daemon=True)
        self._writer, self._version, self._summary, self._in_use = writer, version, summary, in_use
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        self.folder = os.path.dirname(version)
        self.error = ""
        """Reason why the save failed; empty while it runs, and if it is complete."""
        self.written, self.abandoned = threading.Event(), False
        self.start()

    def run(self) -> None:
        """Write the part, and commit on rank 0."""
        result: Any
        try:
            result = self._writer.write()
        except Exception as error:
            result = f"{reason_text(error)} (on rank {self._rank})"
            for file in Path(self._version).glob(f"__{self._rank}_*"):
                file.unlink(missing_ok=True)  # makes room on a full disk
        if self._rank:
            self.error = result if isinstance(result, str) else ""
            self._leave_result(result)
            self.written.set()
            return
        self.written.set()
        with self._in_use:
            try:
                self.error = self._commit_all(result)
            except Exception as error:
                self.error = reason_text(error)
            if self.error:
                save_folder.drop_version(self._version)

    def _part(self, rank: int, suffix: str) -> Path:
        return Path(self._version) / f"part-{rank}.{suffix}"

    def _leave_result(self, result: Any) -> None:
        """Leave the result of this rank for rank 0 in a file; an empty one says that there was no room for it."""
        try:
            self._part(self._rank, "new").write_bytes(pickle.dumps(result))
            self._part(self._rank, "new").rename(self._part(self._rank, "done"))
        except OSError:
            with contextlib.suppress(OSError):
                self._part(self._rank, "full").touch()

    def _commit_all(self, result: Any) -> str:
        """Wait for the results of the other ranks, and commit the save; return why that failed, or ""."""
        others = range(1, self._ranks)
        while not all(self._part(rank, "done").exists() or self._part(rank, "full").exists() for rank in others):
            if self.abandoned:
                return "a rank ended before it had written its part"
            time.sleep(POLL_SECONDS)
        if full := [rank for rank in others if self._part(rank, "full").exists()]:
            return f"No space left on the device of rank {full[0]}"
        results = [result, *(pickle.loads(self._part(rank, "done").read_bytes()) for rank in others)]
        for rank in others:
            self._part(rank, "done").unlink()
        if error := next((found for found in results if isinstance(found, str)), ""):
            return error
        _commit_version(self._writer, self._version, self._summary, results)
        return ""


def background_save() -> tuple[bool, str]:
    """Return whether this rank still writes a save in the background, and which folder failed and why, or ""."""
    thread = _running[0] if _running else None
    return (False, "") if thread is None else (thread.is_alive(), thread.error and f"{thread.folder}: {thread.error}")


def wait_for_background() -> None:
    """Wait on all ranks until the former save is complete; give it up if one of its ranks has ended."""
    for thread in _running:
        thread.written.wait()
    from_all(None)
    for thread in _running:
        thread.abandoned = True  # every part that will be written is there
        thread.join()
