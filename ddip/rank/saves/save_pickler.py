"""Pickle a rank's variables for a save, and the memory of tensors beside the pickle.

    storage            a slot with its bytes; equal slots of several ranks are written once
    DTensor            a slot with the whole tensor; each rank writes its part, and ranks of another number can read it
    module, optimizer, scheduler, parameter, buffer
                       pickled with the variable and the name at which they are found, so that a load can fill the
                       objects that exist there (`open_object`) instead of making new ones
    DDP                its module and settings; a load wraps the module again
    fully_shard        its settings; a load shards the module again around the loaded parameters

A load unpickles within a `Loading`, which has the loaded slots and the existing objects.
"""

from __future__ import annotations

import contextvars
import copy
import copyreg
import functools
import inspect
import io
import math
import pickle
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.utils.data import DataLoader, DistributedSampler

from ddip.protocol.objects import pickling
from ddip.protocol.objects.pickling import Place, place_of
from ddip.rank.inspection import kinds
from ddip.rank.objects import reducers
from ddip.rank.saves.imported import Origin, import_object
from ddip.rank.saves.loader_workers import EndedWorkers, has_persistent_workers
from ddip.sharded import parameter_groups
from ddip.sharded.layout import DTensor, Layout

PARALLEL_SETTINGS = (
    "device_ids",
    "output_device",
    "dim",
    "broadcast_buffers",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "mixed_precision",
)
"""Attributes of a DDP wrapper that its constructor takes under the same names."""
GROUP_SETTINGS = (
    "reduce_grads",
    "all_reduce_grads",
    "reshard_after_backward",
    "gradient_divide_factor",
    "reduce_scatter_unused_params",
    "force_sum_reduction_for_comms",
    "reduce_scatter_max_input_buffers",
    "unshard_in_backward",
    "unshard_async_op",
)
"""Attributes of FSDP2 parameter groups that methods of the module set; some torch releases lack some of them."""
COMMUNICATION = {
    "_all_reduce_hook": "all-reduce hook",
    "_all_gather_comm": "custom all-gather",
    "_reduce_scatter_comm": "custom reduce-scatter",
    "reduce_scatter_reduce_op": "reduce-scatter divide factor",
}
"""Attributes of FSDP2 parameter groups that are not saved: the user's functions and, in torch 2.7, an operation."""
SEVERAL_MESHES = "its parameters are sharded over several meshes by shard_placement_fn"
UNEVEN = "its parameters of the shape {shape} cannot be divided along dimension {dim} among {ranks} ranks"
COMPOSABLE = "__composable_api"
"""Beginning of the names of a module's attributes that hold the state of ``fully_shard``."""
OF_SCHEDULERS = ("step", "_step_count", "_opt_called")
"""Attributes of an optimizer that the constructor of a scheduler sets: a wrapper, and what the wrapper counts."""
PARTS = ("_parameters", "_buffers", "_modules")
"""Attributes of a module that hold its parts."""
NEW_OBJECT: Any = copyreg.__newobj__  # type: ignore[attr-defined]
"""Function with which most objects are unpickled."""
OTHER_GROUP = "it uses a process group other than the default one; create it again after the load"
SOME_RANKS = "it holds a DeviceMesh of {size} of {world} ranks; only meshes of all ranks are saved"


class Key(NamedTuple):
    """The position of an object that a load may fill in place."""

    variable: str
    kind: str
    """``module``, ``tensor`` or ``object``."""
    name: str
    """Name within the module; empty for the variable's value."""


Keys: TypeAlias = tuple[Key, ...]
"""The positions at which one object is found; empty if a load makes it anew."""


@dataclass
class Slot:
    """A tensor outside of the pickle, with the facts that a load needs before it can read it."""

    tensor: torch.Tensor
    """Bytes of a storage, or a DTensor."""
    device: str
    """Device type, with the index if it is not the rank's own device."""
    shape: tuple[int, ...]

    @property
    def is_sharded(self) -> bool:
        """True for a DTensor."""
        return isinstance(self.tensor, DTensor)


class SavePickler(pickling.Pickler):
    """The pickler of one rank's variables; `slots` has the tensors, in the order in which they were met."""

    def __init__(
        self,
        file: io.BytesIO,
        buffers: list[pickle.PickleBuffer],
        keys: Mapping[int, Keys],
        imported: Mapping[int, Origin],
        left_out: Collection[str] = (),
    ) -> None:
        super().__init__(file, buffers)
        self._keys, self._imported, self._left_out = keys, imported, left_out
        self.slots: list[Slot] = []
        self.wrappers: list[Any] = []
        """DDP wrappers, which a load creates in this order on all ranks."""
        self.hooked: list[str] = []
        """Descriptions of hooks that are not saved."""
        self.unreduced: list[str] = []
        """Descriptions of gradients that are not saved, as ``fully_shard`` has not reduced them yet."""
        self.with_workers: list[str] = []
        """Variables with loaders whose persistent workers a load starts again."""
        self.meshes: list[tuple[int, ...]] = []
        """Shapes of the device meshes, which a load creates in this order on all ranks."""
        self.leaves: list[tuple[Any, Keys]] = []
        """Tensors that may have gradients, with their keys."""
        self.places: dict[Keys, tuple[int, Place]] = {}
        """Slot of each tensor that a load may fill, and its place there."""
        self._known: dict[int, int] = {}
        """Number of the slot of a storage, by the storage's ``_cdata``."""

    def reducer_override(self, obj: Any) -> Any:
        if id(obj) in self._imported:
            return import_object, self._imported[id(obj)]
        keys = self._keys.get(id(obj), ())
        if keys and all(key.variable in self._left_out for key in keys):
            raise pickle.PicklingError(f"it holds a part of {keys[0].variable}, which cannot be saved")
        if isinstance(obj, torch.Tensor):
            if obj.requires_grad and obj.is_leaf:
                self.leaves.append((obj, keys))
            if obj._backward_hooks or getattr(obj, "_post_accumulate_grad_hooks", None):
                self.hooked.append(f"hooks of {_name_of(keys)}")
        if isinstance(obj, io.IOBase) and not isinstance(obj, (io.BytesIO, io.StringIO)):
            raise pickle.PicklingError("it is an open file")
        if isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            return loaded_storage, (self._slot_of(obj),)
        if isinstance(obj, DTensor):
            return self._reduce_sharded(obj, keys)
        if isinstance(obj, DistributedDataParallel):
            return self._reduce_wrapper(obj, keys)
        if type(obj).__name__ == "DeviceMesh" and type(obj).__module__ == "torch.distributed.device_mesh":
            return self._reduce_mesh(obj)
        pickling.ensure_whole(obj, torch)
        if isinstance(obj, dist.ProcessGroup):
            if obj is not dist.group.WORLD:
                raise pickle.PicklingError(OTHER_GROUP)
            return default_group, ()
        if isinstance(obj, DistributedSampler) and type(obj).__reduce_ex__ is object.__reduce_ex__:
            make, args, state = cast(Any, obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:3]
            return make, args, (draws_own_part(obj), state), None, None, fill_sampler
        if type(obj).__name__ == "DistState" and type(obj).__module__ == "ddip.sharded.state":
            make, args, state = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:3]
            return make, args, (obj.step, state), None, None, fill_dist_state
        if isinstance(obj, DataLoader) and type(obj).__reduce_ex__ is object.__reduce_ex__ and "_iterator" in vars(obj):
            make, args, state = cast(Any, obj).__reduce_ex__(pickle.HIGHEST_PROTOCOL)[:3]
            had_workers = has_persistent_workers(obj)
            if had_workers:
                self.with_workers.append(self.name)
            return make, args, {**state, "_iterator": EndedWorkers() if had_workers else None}
        if is_fully_sharded(obj):
            return self._reduce_fully_sharded(obj, keys)
        if keys:
            return self._reduce_keyed(obj, keys)
        return super().reducer_override(obj)

    def on_cpu(self, obj: Any) -> Any:
        """Return `obj` itself: slots may be on any device."""
        return obj

    def _slot_of(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._known:
            self._shared_storage(storage)  # raises for a part of FSDP1
            self._known[storage._cdata] = len(self.slots)
            flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload]
            if storage.device.type == "cpu" and storage.is_shared():  # another process may be changing it
                flat = flat.clone()
            self.slots.append(Slot(flat, _device_text(storage.device), tuple(flat.shape)))
        return self._known[storage._cdata]

    def _reduce_sharded(self, tensor: Any, keys: Keys) -> tuple[Any, ...]:
        layout = Layout.of(tensor)
        whole = tensor.detach()
        self.slots.append(Slot(whole, _device_text(tensor.to_local().device), layout.whole))
        args = (len(self.slots) - 1, layout.whole, tensor.dtype, tensor.device_mesh, layout.placements)
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        return sharded_tensor, (keys, *args, is_parameter, tensor.requires_grad, vars(tensor))

    def _reduce_wrapper(self, wrapper: Any, keys: Keys) -> tuple[Any, ...]:
        if wrapper.process_group is not dist.group.WORLD:
            raise pickle.PicklingError(OTHER_GROUP)
        self.wrappers.append(wrapper)
        settings = {name: getattr(wrapper, name) for name in PARALLEL_SETTINGS if hasattr(wrapper, name)}
        settings["device_ids"] = None if not wrapper.device_ids else ["own"]
        settings["output_device"] = None
        settings["bucket_cap_mb"] = wrapper.bucket_bytes_cap / (1 << 20)
        if any(state is not None and not isinstance(state, dist.ProcessGroup) for _, state in wrapper._comm_hooks):
            self.hooked.append(f"state of the communication hook of {_name_of(keys)}")
        hooks = wrapper._comm_hooks, reducers.builtin_hook(wrapper)
        return parallel_wrapper, (keys, wrapper.module, settings, *hooks, wrapper.training)

    def _reduce_mesh(self, mesh: Any) -> tuple[Any, ...]:
        shape, world = tuple(mesh.mesh.shape), dist.get_world_size()
        if mesh.mesh.numel() != world:
            root = _root_of(mesh)
            if root.mesh.numel() != world or not mesh.mesh_dim_names:
                raise pickle.PicklingError(SOME_RANKS.format(size=mesh.mesh.numel(), world=world))
            return part_of_mesh, (root, mesh.mesh_dim_names)
        self.meshes.append(shape)
        return device_mesh, (mesh.device_type, shape, mesh.mesh_dim_names)

    def _reduce_keyed(self, obj: Any, keys: Keys) -> Any:
        if isinstance(obj, torch.Tensor):
            if kinds.is_strided(obj) and not is_lazy(obj):
                self.places[keys] = self._slot_of(obj.untyped_storage()), place_of(obj)
            make, args, *_ = self._plain_reduce(obj)
            return open_tensor, (keys, make, args)
        made = obj.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if made[0] is not NEW_OBJECT or made[3:] not in ((), (None, None)):
            return super().reducer_override(obj)  # its class decides how it is pickled
        state = made[2]
        if isinstance(obj, torch.nn.Module) and isinstance(state, dict):
            state = _without_sharding(state)
        if isinstance(obj, torch.optim.Optimizer) and isinstance(state, dict):
            rest = {name: value for name, value in vars(obj).items() if name not in state and name != "step"}
            return open_object, (keys, made[0], made[1]), (keys, state, rest), None, None, fill_optimizer
        return open_object, (keys, made[0], made[1]), (keys, state), None, None, fill_object

    def _plain_reduce(self, tensor: torch.Tensor) -> Any:
        if type(tensor) is torch.Tensor and pickling.is_plain_tensor(tensor):
            return self._reduce_tensor(tensor)
        return pickling.reduce_like_torch(tensor)

    def _reduce_fully_sharded(self, module: Any, keys: Keys) -> tuple[Any, ...]:
        own = _without_sharding(module.__getstate__())  # type: ignore[operator]
        shared = module._get_fsdp_state()
        settings: dict[str, Any] = {"mesh": None, "mp_policy": shared._mp_policy}
        settings |= {"modules": [*shared._modules], "managed": [], "group": {}}
        groups = parameter_groups.groups_of(module)
        if len(groups) > 1:
            raise pickle.PicklingError(SEVERAL_MESHES)
        for group in groups:
            settings |= {
                "mesh": group.mesh_info.mesh,
                "reshard_after_forward": group.post_forward_mesh_info is not None,
                "offload_policy": group.offload_policy,
                "managed": [(_current_of(parameter), parameter.fsdp_placement.dim) for parameter in group.fsdp_params],
                "group": {name: getattr(group, name) for name in GROUP_SETTINGS if hasattr(group, name)},
            }
            if parameter_groups.has_unreduced_gradients(group):
                self.unreduced.append(f"gradients of {keys[0].variable if keys else 'a module'}")
            for name, text in COMMUNICATION.items():
                own_one = getattr(group, name, None)
                if own_one is not None and not (name.endswith("_comm") and is_of_torch(own_one)):
                    self.hooked.append(f"{text} of {_name_of(keys)}")
        made = keys, NEW_OBJECT, (type(module).__bases__[1],)
        return open_object, made, (keys, own, settings), None, None, fill_sharded


def draws_own_part(sampler: Any) -> bool:
    """Return whether `sampler` draws this rank's part of the data; a load gives it the loading rank's."""
    if not isinstance(sampler, DistributedSampler) or type(sampler).__reduce_ex__ is not object.__reduce_ex__:
        return False
    return (sampler.rank, sampler.num_replicas) == (dist.get_rank(), dist.get_world_size())


def _current_of(parameter: Any) -> Any:
    """Return the parameter that a module has in the place of a ``FSDPParam``."""
    return getattr(parameter._module_info.module, parameter._module_info.param_name)


def _name_of(keys: Keys) -> str:
    return ".".join(filter(None, (keys[0].variable, keys[0].name))) if keys else "a tensor"


def _root_of(mesh: Any) -> Any:
    """Return the mesh of which `mesh` is a part, such as ``mesh["data"]``; `mesh` itself if it is whole."""
    if hasattr(mesh, "_get_root_mesh"):
        return mesh._get_root_mesh()
    from torch.distributed.device_mesh import _mesh_resources  # before torch 2.10

    return _mesh_resources.get_root_mesh(mesh)


def _without_sharding(state: dict[str, Any]) -> dict[str, Any]:
    """Return a module's attributes without those of ``fully_shard``, which refer to the group's shards."""
    found = {name: value for name, value in state.items() if not name.startswith(COMPOSABLE)}
    for name, hooks in state.items():
        if name.endswith(pickling.HOOKS) and isinstance(hooks, dict) and hooks:
            found[name] = type(hooks)((number, hook) for number, hook in hooks.items() if not _is_of_sharding(hook))
    return found


def is_of_torch(hook: Any) -> bool:
    """Return whether a hook's function is torch's own."""
    function = _function_of(hook)
    return (str(getattr(function, "__module__", "")) or type(function).__module__).partition(".")[0] == "torch"


def _function_of(hook: Any) -> Any:
    function = getattr(hook, "hook", hook)  # in torch's _WrappedHook
    return getattr(function, "func", function)


def _is_of_sharding(hook: Any) -> bool:
    """Return whether a hook belongs to ``fully_shard``, which adds it again."""
    function = _function_of(hook)
    owner = getattr(function, "__self__", None)
    return "fsdp" in type(owner).__module__ or "fsdp" in str(getattr(function, "__module__", ""))


def is_fully_sharded(obj: Any) -> bool:
    """Return whether `obj` is a module that ``fully_shard`` was called with."""
    return isinstance(obj, torch.nn.Module) and hasattr(obj, "_get_fsdp_state")


def _device_text(device: torch.device) -> str:
    """Return the device's type, and its index if it is not the current device of its type."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return device.type
    return str(device)


def load_device(text: str) -> torch.device:
    """Return the device on which to load a tensor of the device `text`: the CPU if this rank lacks it."""
    device = torch.device(text)
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device()) if text == "cuda" else device


# -- loading


class SavedState(NamedTuple):
    """An existing object with its keys in the save, and its saved state."""

    value: Any
    keys: Keys
    state: Any


@dataclass
class Loading:
    """The state of one load while its pickle is read."""

    storages: Mapping[int, torch.UntypedStorage]
    """Loaded storages by the number of their slot."""
    existing: Mapping[Key, Any]
    """Objects of the session that are used instead of new ones."""
    chosen: Collection[str]
    """Names of the variables to load; existing objects of others stay as they are."""
    sharded: dict[int, Any] = field(default_factory=dict)
    """DTensors to read, by the number of their slot."""
    lost: Mapping[str, str] = field(default_factory=dict)
    """Variables that cannot be unpickled, with the reasons."""
    unpickled: dict[str, Any] = field(default_factory=dict)
    """Values of all variables in the save, by name."""
    states: dict[int, SavedState] = field(default_factory=dict)
    """Saved states of existing objects, by the object's id."""
    filled: set[Keys] = field(default_factory=set)
    """Keys of existing tensors whose storages have the saved values already."""
    restores: list[Callable[[], object]] = field(default_factory=list)
    """Steps that give existing tensors their former values."""
    fills: list[Callable[[], object]] = field(default_factory=list)
    """Changes of existing objects, made when everything could be loaded."""
    completions: list[Callable[[], object]] = field(default_factory=list)
    """Steps on new objects, made when everything could be loaded."""
    wrappers: list[Any] = field(default_factory=list)
    """DDP wrappers, in the order in which they were saved."""
    new_wrappers: list[tuple[Any, Keys]] = field(default_factory=list)
    dist_states: list[tuple[Any, int | None]] = field(default_factory=list)
    """Each `DistState`, with the step of its newest copy when it was saved."""

    def find(self, keys: Keys) -> Any:
        """Return the object of the session to use instead of a new one; None for a new one.

        Raises ValueError if only variables that cannot be unpickled have the object.
        """
        if keys and all(key.variable in self.lost for key in keys):
            raise ValueError(f"it holds a part of {keys[0].variable}")
        return next((self.existing[key] for key in keys if key in self.existing), None)

    def use_existing_storages(self, places: Mapping[Keys, tuple[int, Place]]) -> None:
        """Let new tensors that share the memory of an existing one use its storage.

        It is filled now, as classes may copy values while they are unpickled, and later, as they may change them.
        """
        storages = dict(self.storages)
        others = {slot for keys, (slot, _) in places.items() if not self.is_chosen(keys)}
        for keys, (slot, place) in places.items():
            if slot in others:  # another variable, which stays as it is, has a part of the memory
                continue
            old, new = self.find(keys), self.storages[slot]
            if old is None or storages[slot] is not new or not kinds.is_plain(old) or place_of(old) != place:
                continue
            storage = old.untyped_storage()
            if storage.nbytes() == new.nbytes() and storage.device == new.device:
                kept = storage.clone() if storage.device.type == "cpu" else storage.cpu()
                self.restores.append(functools.partial(storage.copy_, kept))
                storage.copy_(new)
                storages[slot] = storage
                self.filled.add(keys)
                self.fill_later(keys, functools.partial(storage.copy_, new))
        self.storages = storages

    def fill_now(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Copy the values of `new` to the existing tensor `old`, which `undo` restores."""
        kept = old.detach().to("cpu", copy=True)
        self.restores.append(lambda: old.data.copy_(kept))
        old.data.copy_(new)

    def undo(self) -> None:
        """Restore the existing tensors, and remove the reducers of new DDP wrappers."""
        for step in reversed(self.restores):
            step()
        self.remove_reducers(lambda keys: True)

    def fill_later(self, keys: Keys, step: Callable[[], object]) -> None:
        """Fill the existing object at `keys` by `step` when everything could be loaded, if it is to be loaded."""
        if self.is_chosen(keys):
            self.fills.append(step)

    def remove_reducers(self, is_unused: Callable[[Keys], bool]) -> None:
        """Remove the reducers of new DDP wrappers for which `is_unused` is true.

        Their hooks may be on parameters that existed before.
        """
        for wrapper, keys in self.new_wrappers:
            if is_unused(keys):
                reducers.remove_reducer(wrapper)

    def is_chosen(self, keys: Keys) -> bool:
        """Return whether a variable to load holds the object at `keys`."""
        return any(key.variable in self.chosen for key in keys)


current: contextvars.ContextVar[Loading] = contextvars.ContextVar("loading")


def loaded_storage(slot: int) -> Any:
    """Return the loaded storage of a slot."""
    return current.get().storages[slot]


def default_group() -> Any:
    """Return the default process group."""
    return dist.group.WORLD


def device_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
    """Create a mesh of all ranks; a mesh of one dimension has as many as there are now."""
    from torch.distributed.device_mesh import init_device_mesh

    now = dist.get_world_size()
    if len(shape) == 1:
        shape = (now,)
    elif math.prod(shape) != now:
        raise ValueError(f"it has a mesh of {' x '.join(map(str, shape))} ranks, and there are {now}")
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def part_of_mesh(root: Any, names: tuple[str, ...]) -> Any:
    """Return the part of a mesh with these dimensions."""
    return root[names if len(names) > 1 else names[0]]


def sharded_tensor(
    keys: Keys,
    slot: int,
    whole: tuple[int, ...],
    dtype: torch.dtype,
    mesh: Any,
    placements: tuple[Any, ...],
    is_parameter: bool,
    requires_grad: bool,
    attributes: Mapping[str, Any] | None = None,
) -> Any:
    """Return a DTensor whose values are read later: a new one, or a new value for an existing one.

    `attributes`: those that the user may have set; None in a save of an older ddip.
    """
    loading = current.get()
    old = loading.find(keys)
    layout = Layout(whole, placements, mesh) if old is None else Layout.of(old)
    new = layout.tensor(torch.zeros(layout.place.shape, dtype=dtype, device=layout.mesh.device_type))
    loading.sharded[slot] = new.detach()
    new.requires_grad_(requires_grad)
    if is_parameter:
        new = torch.nn.Parameter(new, requires_grad)
    vars(new).update(attributes or {})
    if old is not None:
        loading.fill_later(keys, lambda: _fill_tensor(old, new))
        return old
    return new


def parallel_wrapper(
    keys: Keys, module: Any, settings: dict[str, Any], hooks: list[tuple[Any, Any]], builtin: str, training: bool
) -> Any:
    """Return the existing wrapper, or wrap `module` in DDP again."""
    loading = current.get()
    wrapper = loading.find(keys)
    if wrapper is not None:
        loading.fill_later(keys, lambda: setattr(wrapper, "training", training))
    else:
        if settings["device_ids"] is not None:
            settings["device_ids"] = [torch.cuda.current_device()] if torch.cuda.is_available() else None
        wrapper = _wrap_module(module, settings)
        loading.new_wrappers.append((wrapper, keys))
        for hook, state in hooks:
            wrapper.register_comm_hook(state, hook)
        reducers.use_builtin_hook(wrapper, builtin)
        wrapper.training = training
    loading.wrappers.append(wrapper)
    return wrapper


def _wrap_module(module: Any, settings: dict[str, Any]) -> DistributedDataParallel:
    """Wrap `module` in DDP without sending it rank 0's parameters and buffers."""
    if "init_sync" in inspect.signature(DistributedDataParallel).parameters:
        return DistributedDataParallel(module, init_sync=False, **settings)
    kept = [(tensor, tensor.detach().clone()) for tensor in (*module.parameters(), *module.buffers())]  # torch 2.4
    wrapper = DistributedDataParallel(module, **settings)
    with torch.no_grad():
        for tensor, values in kept:
            tensor.copy_(values)
    return wrapper


def fill_sampler(sampler: Any, state: tuple[bool, dict[str, Any]]) -> None:
    """Set a sampler's attributes. One that drew the saving rank's part of the data draws this rank's part."""
    is_own, attributes = state
    vars(sampler).update(attributes)
    if is_own:
        pickling.fit_sampler(sampler, dist.get_rank(), dist.get_world_size())


def fill_dist_state(state: Any, saved: tuple[int | None, dict[str, Any]]) -> None:
    """Set the attributes of a `DistState`, whose copies are not in the save."""
    step, attributes = saved
    vars(state).update(attributes)
    current.get().dist_states.append((state, step))


def open_object(keys: Keys, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the existing object at `keys`, or a new one without state."""
    old = current.get().find(keys)
    return make(*args) if old is None else old


def open_tensor(keys: Keys, make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Return the existing tensor at `keys`, to be filled later, or else the loaded one."""
    loading, new = current.get(), make(*args)
    old = loading.find(keys)
    if old is None:
        return new
    if loading.is_chosen(keys) and keys not in loading.filled and kinds.is_plain(old) and old.device.type != "meta":
        loading.fill_now(old, new)
    loading.fill_later(keys, lambda: _fill_tensor(old, new))
    return old


def _fill_tensor(old: Any, new: Any) -> None:
    """Give a tensor the values of another one, and those of its attributes that the user may have set."""
    with torch.no_grad():
        old.copy_(new)
        old.requires_grad_(new.requires_grad)
    vars(old).clear()
    vars(old).update(vars(new))


def fill_object(obj: Any, state: tuple[Keys, Any]) -> None:
    """Set the state of an object: of a new one now, of an existing one later, without its parts and hooks."""
    keys, saved = state
    loading = current.get()
    if loading.find(keys) is None:
        _set_state(obj, saved)
        return
    _try_state(obj, saved)
    loading.states[id(obj)] = SavedState(obj, keys, saved)
    fill = _fill_module if isinstance(obj, torch.nn.Module) else _set_state
    loading.fill_later(keys, lambda: fill(obj, saved))


def fill_optimizer(optimizer: Any, state: tuple[Keys, Any, dict[str, Any]]) -> None:
    """Set the state of an optimizer, with the attributes and hooks that it would not pickle by itself."""
    keys, saved, rest = state

    def fill() -> None:
        for name in vars(optimizer).keys() - saved.keys() - rest.keys() - {*OF_SCHEDULERS}:  # set since the save
            del vars(optimizer)[name]
        optimizer.__setstate__(saved)
        vars(optimizer).update(rest)

    loading = current.get()
    if loading.find(keys) is None:
        fill()
    else:
        _try_state(optimizer, saved)
        loading.states[id(optimizer)] = SavedState(optimizer, keys, {**saved, **rest})
        loading.fill_later(keys, fill)


def _set_state(obj: Any, state: Any) -> None:
    """Set the state of an object as unpickling does."""
    if isinstance(obj, torch.nn.Module) and isinstance(state, dict):
        pickling.fill_module(obj, state)
        return
    if hasattr(obj, "__setstate__"):
        obj.__setstate__(state)
        return
    own, slots = state if isinstance(state, tuple) and len(state) == 2 else (state, None)
    if type(obj).__getstate__ is object.__getstate__:  # type: ignore  # else its class leaves some out
        vars(obj).clear()  # of what was set since the save
    vars(obj).update(own or {})
    for name, value in (slots or {}).items():
        setattr(obj, name, value)


def _try_state(obj: Any, state: Any) -> None:
    """Raise now what an optimizer or a class of the user's raises for a state, before anything changes."""
    set_state = getattr(type(obj), "__setstate__", None)
    is_torchs = str(getattr(set_state, "__module__", "")).startswith("torch.")
    if set_state is not None and (not is_torchs or isinstance(obj, torch.optim.Optimizer)):
        set_state(object.__new__(type(obj)), _copy_containers(state, {}))  # the trial must not change the state


def _copy_containers(value: Any, copies: dict[int, Any]) -> Any:
    """Copy `value` and the containers in it, but no other object; `copies` has those made so far."""
    kind = type(value)
    if id(value) in copies or kind not in (tuple, list, set, dict, OrderedDict, defaultdict):
        return copies.get(id(value), value)
    if kind is tuple:
        return copies.setdefault(id(value), tuple(_copy_containers(item, copies) for item in value))
    made = copies[id(value)] = copy.copy(value)
    if kind is not set:
        for key, item in enumerate(value) if kind is list else value.items():
            made[key] = _copy_containers(item, copies)
    return made


def _fill_module(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Set the state of a module as unpickling does, except its parts, which are filled themselves, and its hooks.

    Attributes that the saved module lacked are removed, but those that its class does not pickle are kept.
    """
    own = vars(module)
    for name in [*module.__getstate__()]:  # type: ignore[operator]
        if name not in state and not name.startswith((COMPOSABLE, "_compiled")):  # such as a cache
            own.pop(name, None)
    kept = {name: own[name] for name in state if name in own and _is_part_or_hooks(name)}
    module.__setstate__({**state, **kept})


def _is_part_or_hooks(name: str) -> bool:
    """Return whether this attribute of a module has its parts or hooks."""
    return name in PARTS or name.endswith("_hooks") or "_hooks_" in name or name == "_is_full_backward_hook"


def fill_sharded(module: Any, state: tuple[Keys, dict[str, Any], dict[str, Any]]) -> None:
    """Set the state of a module of ``fully_shard``; a new one is sharded when everything could be loaded.

    Raises ValueError if this number of ranks cannot share the parameters of a new one.
    """
    keys, own, settings = state
    if "managed" not in settings:
        raise ValueError("it is a fully_shard model of an older ddip; save it again with this one")
    modules, managed, of_group = (settings.pop(name) for name in ("modules", "managed", "group"))
    loading = current.get()
    if loading.find(keys) is not None:
        _try_state(module, own)
        loading.states[id(module)] = SavedState(module, keys, own)
        loading.fill_later(keys, lambda: _fill_module(module, own))
        for group in parameter_groups.groups_of(module):
            loading.fill_later(keys, functools.partial(parameter_groups.drop_unreduced_gradients, group))
            loading.fill_later(keys, functools.partial(vars(group).update, of_group))
        return
    for parameter, dim in managed:
        if dim and parameter.shape[dim] % (ranks := settings["mesh"].shape[-1]):
            raise ValueError(UNEVEN.format(shape=tuple(parameter.shape), dim=dim, ranks=ranks))
    _set_state(module, own)
    loading.completions.append(lambda: _shard_again(modules, settings, managed, of_group))


def _shard_again(
    modules: list[Any], settings: dict[str, Any], managed: list[tuple[Any, int]], of_group: dict[str, Any]
) -> None:
    """Call ``fully_shard`` on modules whose `managed` parameters are sharded, and keep these parameters.

    torch shards a parameter without memory; ``fully_shard`` takes a parameter that was set afterwards as it is.
    """
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard

    modules = [module for module in modules if not is_fully_sharded(module)]
    if not modules:  # they were sharded with one of them
        return
    blanks: dict[int, torch.nn.Parameter] = {}
    for parameter, _ in managed:
        blank = _without_memory(parameter, settings["mesh"])
        blanks[id(parameter)] = torch.nn.Parameter(blank, parameter.requires_grad)
    dims = {id(blanks[id(parameter)]): dim for parameter, dim in managed}
    places, ignored = [], set[Any]()
    for part in [part for module in modules for part in _parts_to_shard(module)]:
        for name, parameter in part._parameters.items():
            if id(parameter) in blanks:
                places.append((part, name, parameter))
                part._parameters[name] = blanks[id(parameter)]
            elif parameter is not None:
                ignored.add(parameter)
    if any(dims.values()):
        settings["shard_placement_fn"] = lambda blank: Shard(dims[id(blank)])
    if ignored:
        settings["ignored_params"] = ignored
    fully_shard(modules if len(modules) > 1 else modules[0], **settings)
    for part, name, parameter in places:
        part._parameters[name] = parameter
    for group in parameter_groups.groups_of(modules[0]):
        vars(group).update(of_group)


def _without_memory(parameter: Any, mesh: Any) -> torch.Tensor:
    """Return a tensor without memory for ``fully_shard`` to shard over `mesh`."""
    of_parameter = parameter.device_mesh
    if mesh is None or mesh.ndim == of_parameter.ndim:
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
    names = tuple(name for name in of_parameter.mesh_dim_names if name not in mesh.mesh_dim_names)
    rest = part_of_mesh(of_parameter, names)
    placements = tuple(parameter.placements[of_parameter.mesh_dim_names.index(name)] for name in names)
    shape = Layout(tuple(parameter.shape), placements, rest).place.shape
    part = torch.empty(shape, dtype=parameter.dtype, device="meta")
    whole: torch.Tensor = DTensor.from_local(
        part, rest, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    return whole


def _parts_to_shard(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Yield `module` and its parts, without those that are sharded on their own."""
    yield module
    for part in module.children():
        if not is_fully_sharded(part):
            yield from _parts_to_shard(part)
