"""Load saved variables into the ranks of a group (``%dipload``): a collective.

    check     the save is this user's, of these releases, and complete; ranks agree which objects are filled in place
    unpickle  new objects are made, existing ones are found by their keys; of these, only tensors change
    fill      when every rank could load everything: sharded tensors are read, existing objects filled, variables set
    undo      if a rank could not: tensors and variables get their former values

On the same number of ranks, each rank loads what it has saved. On another number, each rank loads what rank 0 has
saved, without the variables that differed between the ranks; sharded tensors are divided again.
"""

from __future__ import annotations

import contextlib
import pickle
import signal
import types
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

from ddip.protocol.objects import definitions
from ddip.protocol.reports import LoadReport
from ddip.rank import user_namespace
from ddip.rank.inspection.state_history import history
from ddip.rank.objects import wrappers
from ddip.rank.runtime import process_settings
from ddip.rank.saves import content_digest, save_folder, save_pickler
from ddip.rank.saves.agreement import (
    EQUAL_BUT_FOR_BUFFERS,
    AgreedError,
    do_on_all,
    ensure_visible,
    reason_text,
)
from ddip.rank.saves.content_digest import Fingerprints
from ddip.rank.saves.detached import ensure_connected, find_reached
from ddip.rank.saves.holders import find_holders
from ddip.rank.saves.loader_workers import LOST
from ddip.rank.saves.pickled_parts import PickledParts
from ddip.rank.saves.save_pickler import Key, Keys, Loading, load_device
from ddip.rank.saves.save_state import HEADER, STREAM, wait_for_background
from ddip.rank.saves.tensor_files import TensorReader
from ddip.rank.saves.variables import GRADIENTS, find_keys, reshard_models, structure_of, with_same_objects
from ddip.sharded import contents
from ddip.sharded.copies import from_all

PER_RANK = "not equal on the {then} ranks that saved, and there are {now} now; existing variables keep their values"
DEFINED = "this session's definition was kept; loaded objects use the saved one, which differs"
CHANGED = "this session's class was kept, since its code has changed since the save"
BUFFERS = "they differed between the ranks; each has rank 0's now"
PICKLED_CLASSES: Collection[type] = getattr(cloudpickle.cloudpickle, "_DYNAMIC_CLASS_TRACKER_BY_CLASS", ())
"""Classes that this process has pickled or unpickled; unpickling one again sets its attributes.

Without this private name of cloudpickle, a load may change attributes of classes that it does not load.
"""
_nothing = object()
SHARED = (int, float, complex, str, bytes, type(None), types.FunctionType, types.ModuleType, type)
"""Classes of values that other variables may hold without a link to the replaced variable."""
NOT_LOADED: LoadReport = {
    "error": "",
    "time": 0.0,
    "ranks": 0,
    "loaded": [],
    "in_place": [],
    "not_loaded": {},
    "kept": {},
    "holders": [],
}


@dataclass
class _Source:
    """A save as this rank reads it."""

    version: str
    facts: dict[str, Any]
    reader: TensorReader
    prefix: str
    """Name of the rank whose variables are loaded, in names of tensors."""
    header: dict[str, Any]

    @classmethod
    def open(cls, version: str, names: list[str], anyway: bool) -> _Source:
        """Open a version of a save.

        Raises LookupError for an unknown variable, and ValueError for a damaged save, or one of other releases unless
        `anyway` is set.
        """
        try:
            facts = save_folder.read_facts(version)
            reader = TensorReader(version)
            prefix = f"rank{dist.get_rank() if facts['ranks'] == dist.get_world_size() else 0}"
            header = pickle.loads(reader.read_bytes(f"{prefix}/{HEADER}"))
        except ValueError:
            raise
        except Exception as error:
            raise ValueError(f"{version} is damaged: {reason_text(error)}") from error
        now, saved = save_folder.current_releases(), facts["releases"]
        others = [f"{name} {saved[name]}, and this is {name} {now[name]}" for name in now if saved[name] != now[name]]
        if others and not anyway:
            raise ValueError(f"it was saved with {'; '.join(others)}; --anyway loads it all the same")
        if unknown := [name for name in names if name not in facts["variables"]]:
            why = [f"{name} (left out: {facts['left_out'][name]})" for name in unknown if name in facts["left_out"]]
            raise LookupError(f"it has no variable {', '.join(why or unknown)}")
        return cls(version, facts, reader, prefix, header)

    @property
    def is_same_size(self) -> bool:
        """True if as many ranks saved as there are now."""
        return bool(self.facts["ranks"] == dist.get_world_size())

    def choose(self, names: list[str]) -> tuple[set[str], dict[str, str]]:
        """Return the variables to load of `names`, by default all, and the reasons for the others."""
        names = names or [*self.facts["variables"]]
        why = PER_RANK.format(then=self.facts["ranks"], now=dist.get_world_size())
        kinds = self.facts["variables"]
        left = {} if self.is_same_size else {name: why for name in names if kinds[name] == "per rank"}
        chosen = {name for name in names if name not in left and name in self.header["parts"]}
        if not self.is_same_size:
            left |= {f"buffers of {name}": BUFFERS for name in sorted(chosen) if kinds[name] == EQUAL_BUT_FOR_BUFFERS}
        return chosen, left

    def read_storages(self) -> dict[int, torch.UntypedStorage]:
        """Return the contents of all storages by number of slot; raise ValueError if they are damaged."""
        found, tensors = {}, {}
        for number, (name, device, shape, is_sharded) in enumerate(self.header["slots"]):
            if not is_sharded:
                tensors[name] = torch.empty(shape, dtype=torch.uint8, device=load_device(device))
                found[number] = tensors[name].untyped_storage()
        self.reader.read({name: tensor for name, tensor in tensors.items() if tensor.numel()})
        prints = Fingerprints()
        if [prints.of(storage) for storage in found.values()] != self.header["sums"]:
            raise ValueError(f"{self.version} is damaged: the files have other contents than were written")
        return found

    def read_sharded(self, tensors: Mapping[int, Any]) -> None:
        """Fill DTensors, by the number of their slot."""
        self.reader.read({self.header["slots"][number][0]: tensor for number, tensor in tensors.items()})

    def read_parts(self) -> PickledParts:
        """Return the pickles of all variables, in the order of the header; raise ValueError if they are damaged."""
        parts = self.header["parts"]
        buffers = {
            name: [self._read_bytes(f"{name}/{number}") for number in range(1, len(sizes))]
            for name, sizes in parts.items()
        }
        return PickledParts(self._read_bytes(STREAM), {name: sizes[0] for name, sizes in parts.items()}, buffers)

    def _read_bytes(self, name: str) -> bytearray:
        data = self.reader.read_bytes(f"{self.prefix}/{name}")
        crcs = self.header.get("crcs") or {STREAM: self.header["crc"]}  # an older ddip checked only the pickles
        if zlib.crc32(data) != crcs.get(name, zlib.crc32(data)):
            raise ValueError(f"{self.version} is damaged: the files have other contents than were written")
        return data


def load_variables(folder: str, names: list[str], anyway: bool) -> LoadReport:
    """Load the variables `names`, by default all, of the latest save in `folder`.

    All ranks must call this. Modules, optimizers, schedulers and scalers that exist with the same structure are filled
    in place; other variables are replaced. If it fails, the report has the reason, the same on all ranks, and nothing
    has changed.
    """
    try:
        with save_folder.lock_folder(folder):
            return _load_agreed(folder, names, anyway)
    except AgreedError as error:
        return {**NOT_LOADED, "error": str(error)}


def _load_agreed(folder: str, names: list[str], anyway: bool) -> LoadReport:
    wait_for_background()
    is_first = dist.get_rank() == 0
    version = from_all(do_on_all(lambda: save_folder.latest_version(folder) if is_first else ""))[0]
    ensure_visible(version)
    source = do_on_all(lambda: _Source.open(version, names, anyway))
    chosen, not_loaded = source.choose(names)
    variables = user_namespace()
    reshard_models(variables.values())
    structures = source.header["structures"]
    fitting = [n for n, text in structures.items() if text and n in variables and _has_structure(variables[n], text)]
    keys = find_keys({name: variables[name] for name in fitting})
    fitting = sorted(with_same_objects(source.header["identities"], keys, fitting))
    in_place = set.intersection(*map(set, from_all(fitting)))
    existing = {key: value for key, value in keys.items() if key.variable in in_place}
    replaced = _Namespace(variables)
    asked = set[str]().union(*from_all(chosen))
    loading, values, kept = _unpickle_agreed(source, existing, chosen, replaced, set() if anyway else asked)
    is_loaded = False
    try:
        not_loaded |= {f"workers of {name}": LOST for name in source.header.get("with_workers", ()) if name in chosen}
        not_loaded |= {name.strip("<>"): why for name, why in loading.lost.items() if name in {*asked, GRADIENTS}}
        with _without_interrupts():  # a rank that has agreed to go on must not stop
            if names:
                do_on_all(lambda: ensure_connected(loading, source.choose([])[0]))
            gradients = values.pop(GRADIENTS, [])
            loaded = sorted({name for of_rank in from_all([*values]) for name in of_rank})
            do_on_all(lambda: source.read_sharded(loading.sharded))
            _apply_values(loading, gradients, in_place & chosen)
            saved_buckets = source.header["buckets"]
            if contents.use_buckets is not None and len(loading.wrappers) == len(saved_buckets):  # none is lost
                for wrapper, buckets in zip(loading.wrappers, saved_buckets, strict=True):
                    contents.use_buckets(wrapper, buckets)
            if not names:
                process_settings.take_over(source.header["settings"])
                if source.is_same_size:
                    contents.set_process_generators(source.header["generators"])
            theirs, ours = {id(value) for value in values.values()}, {id(variables[name]) for name in kept}
            replaced.restore_classes(lambda cls: id(cls) in ours or (bool(names) and id(cls) not in theirs))
            is_loaded = True
            not_loaded |= _renew_copies(loading, replaced)
            loading.remove_reducers(lambda keys: bool(keys) and not loading.is_chosen(keys))
            history.replace_snapshots()
            return {
                "error": "",
                "time": source.facts["time"],
                "ranks": source.facts["ranks"],
                "loaded": loaded,
                "in_place": sorted(in_place & chosen),
                "not_loaded": not_loaded | (source.facts["left_out"] if not names else {}),
                "kept": kept,
                "holders": find_holders(replaced.former_objects(), variables, {*values, *kept}),
            }
    except BaseException:
        if not is_loaded:
            _undo_load(loading, replaced)
        raise


def _unpickle_agreed(
    source: _Source, existing: Mapping[Key, Any], chosen: set[str], replaced: _Namespace, needed: set[str]
) -> tuple[Loading, dict[str, Any], dict[str, str]]:
    """Unpickle all variables on all ranks and set the chosen ones; return these, and why definitions were kept.

    If some cannot be unpickled, begin again without them, as variables that were read before may hold parts of them.
    They are removed from `chosen`. Raises AgreedError if a `needed` one is lost on any rank.
    """
    lost: dict[str, str] = {}
    while True:
        loading = Loading(do_on_all(source.read_storages), existing, chosen, lost={**lost})
        try:
            do_on_all(partial(loading.use_existing_storages, source.header["places"]))
            values, kept, failed = do_on_all(partial(_unpickle_variables, source, loading, replaced, chosen))
            more = _agree_on_lost(failed, needed)
        except BaseException:
            _undo_load(loading, replaced)
            raise
        if more.keys() <= lost.keys():
            return loading, values, kept
        lost |= more
        chosen.difference_update(lost)
        _undo_load(loading, replaced)


def _undo_load(loading: Loading, replaced: _Namespace) -> None:
    """Give all variables and existing tensors their former values."""
    with _without_interrupts():
        replaced.restore()
        loading.undo()


def _has_structure(value: Any, structure: str) -> bool:
    """Return whether `value` has this structure, and is no wrapper of a former process group."""
    is_lost = isinstance(value, torch.nn.Module) and any(map(wrappers.is_lost, value.modules()))
    return not is_lost and structure_of(value) == structure


class _Namespace:
    """The rank's variables, with those that a load has replaced, and the classes that unpickling changes in place."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self._variables, self._former = variables, dict[str, Any]()
        self._classes = [(cls, {**vars(cls)}, content_digest.code_of(cls)) for cls in [*PICKLED_CLASSES]]

    def set(self, name: str, value: Any) -> None:
        """Set a variable, and keep its former value."""
        self._former.setdefault(name, self._variables.get(name, _nothing))
        self._variables[name] = value

    def has_other_code(self, value: Any) -> bool:
        """Return whether the load has changed the methods of `value`, a class of this session."""
        return any(cls is value and content_digest.code_of(cls) != code for cls, _, code in self._classes)

    def restore_classes(self, are_kept: Callable[[type], bool] = lambda cls: True) -> None:
        """Give the session's classes for which `are_kept` is true their former attributes."""
        for cls, former, _ in self._classes:
            if are_kept(cls):
                for name in vars(cls).keys() - former.keys():
                    type.__delattr__(cls, name)
                for name, value in former.items():
                    if vars(cls).get(name, _nothing) is not value:
                        type.__setattr__(cls, name, value)

    def restore(self) -> None:
        """Undo all changes."""
        self.restore_classes()
        while self._former:
            name, value = self._former.popitem()
            if value is _nothing:
                self._variables.pop(name, None)
            else:
                self._variables[name] = value

    def former_objects(self) -> list[Any]:
        """Return the replaced objects, without numbers, texts, functions and classes."""
        return [
            value
            for name, value in self._former.items()
            if self._variables.get(name) is not value and not isinstance(value, SHARED) and value is not _nothing
        ]


def _renew_copies(loading: Loading, replaced: _Namespace) -> dict[str, str]:
    """Let ``dist_state`` continue from the loaded variables; return why it cannot. A collective."""
    from ddip.sharded.state import renew_copies

    changed = {id(value) for key, value in loading.existing.items() if key.variable in loading.chosen}
    kept = {id(value) for value in loading.existing.values()} - changed
    modules = [value for value in replaced.former_objects() if issubclass(type(value), torch.nn.Module)]
    changed |= {id(parameter) for module in modules for parameter in module.parameters()}
    reached = find_reached(loading) if loading.dist_states else ()
    return renew_copies([(state, step) for state, step in loading.dist_states if id(state) in reached], changed, kept)


def _unpickle_variables(
    source: _Source, loading: Loading, namespace: _Namespace, chosen: set[str]
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Unpickle all variables and set the chosen ones.

    Returns these, the reasons for kept definitions, and the reasons why variables could not be unpickled.
    """
    values, kept, failed, parts = dict[str, Any](), dict[str, str](), dict[str, str](), source.read_parts()
    token = save_pickler.current.set(loading)
    try:
        for name in source.header["parts"]:
            if name in loading.lost:
                parts.skip(name)
                failed[name] = loading.lost[name]
                continue
            try:
                value = parts.load(name)
            except Exception as error:
                failed[name] = f"{type(error).__name__}: {error}"
                continue
            loading.unpickled[name] = value
            if name == GRADIENTS:
                values[name] = value
            elif name in chosen:
                own = user_namespace().get(name, _nothing)
                if _is_other_definition(own, value):
                    kept[name] = DEFINED
                    continue
                if namespace.has_other_code(value):
                    kept[name] = CHANGED
                    continue
                values[name] = value
                namespace.set(name, value)  # code of the next object may read it
    finally:
        save_pickler.current.reset(token)
    return values, kept, failed


def _agree_on_lost(failed: dict[str, str], needed: set[str]) -> dict[str, str]:
    """Return the variables that a rank could not unpickle, with the reasons, the same on all ranks.

    Raises AgreedError if one of them is `needed`.
    """
    of_ranks = from_all(failed)
    lost: dict[str, str] = {}
    for rank, failures in enumerate(of_ranks):
        for name, why in failures.items():
            on_all = all(name in others for others in of_ranks)
            lost.setdefault(name, why if on_all else f"{why} (on rank {rank})")
    if first := next((name for name in lost if name in needed), ""):
        raise AgreedError(f"{first} cannot be loaded: {lost[first]}; --anyway loads the other variables")
    return lost


def _is_other_definition(own: Any, saved: Any) -> bool:
    """Return whether `own` is a function or class of the notebook that differs from the saved one."""
    kinds = (types.FunctionType, type)
    if not isinstance(own, kinds) or not isinstance(saved, kinds) or own.__module__ != "__main__":
        return False
    return definitions.compute_digest(own) != definitions.compute_digest(saved)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignore interrupts in this context, in which objects of the session change."""
    former = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)


def _apply_values(loading: Loading, gradients: list[tuple[Any, Any, Keys]], in_place: set[str]) -> None:
    """Fill the existing objects, complete the new ones, and set the gradients of both."""
    for step in (*loading.fills, *loading.completions):
        step()
    for key, value in loading.existing.items():
        if key.variable in in_place and isinstance(value, torch.nn.Parameter):
            value.grad = None
    for tensor, gradient, keys in gradients:
        if loading.find(keys) is None or loading.is_chosen(keys):
            tensor.grad = gradient
