"""List the private names of torch without which a rank, or a feature of it, fails as a whole.

A rank looks for them once, when it starts, and turns off the features whose names are missing; the notebook prints
which. Attributes of objects, such as those of an FSDP model, are looked up where they are used: a model that lacks one
refuses its next use after a fault.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any

_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_REDUCER = "torch.distributed.Reducer"
TESTED = "2.4 to 2.15"
"""Versions of torch that ddip has been tested with."""
CORE = (
    f"{_C10D}._world",
    f"{_C10D}._update_default_pg",
    f"{_C10D}._unregister_all_process_groups",
    f"{_C10D}._get_default_store",
)
"""Without these there is no process group that ddip can form again."""
COUNTS = "numbers of collectives are not compared, and ranks that wait on a GPU are not released"
SET_UP = "the ranks do not check who is in a new group, and the stop button does not end the set-up of one"
WRAPPERS = "DDP wrappers must be made again after a fault"
ITERATIONS = "an iteration that a failed cell has broken is not noticed"
DEVICES = "a default device that a stop has left is not put back"
WORKERS = "workers of data loaders that are garbage delay the next cell"
RPC = "torch.distributed.rpc is neither checked nor named when the group is formed again"
FEATURES = {
    COUNTS: (
        "torch.distributed.ProcessGroup._get_backend",
        "torch.distributed.ProcessGroup._device_types",
        "torch._C._distributed_c10d.Backend._get_sequence_number_for_group",
    ),
    SET_UP: (f"{_C10D}._new_process_group_helper",),
    WRAPPERS: (
        "torch.distributed.utils._sync_module_states",
        "torch.distributed.algorithms.join._JoinConfig",
        f"{_DDP}._ddp_init_helper",
        f"{_DDP}._build_params_for_reducer",
        f"{_DDP}._build_debug_param_to_name_mapping",
        f"{_DDP}._get_ddp_logging_data",
        f"{_DDP}._register_builtin_comm_hook",
        f"{_REDUCER}._remove_autograd_hooks",
        f"{_REDUCER}._set_static_graph",
    ),
    ITERATIONS: ("torch.autograd._engine_run_backward", "torch.autograd._get_sequence_nr"),
    DEVICES: (
        "torch.overrides._get_current_function_mode_stack",
        "torch.overrides._pop_mode",
        "torch.overrides._push_mode",
        "torch.utils._device.CURRENT_DEVICE",
    ),
    WORKERS: ("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL",),
    RPC: (
        "torch.distributed.rpc.backend_registry._init_process_group",
        "torch.distributed.rpc.api._is_current_rpc_agent_set",
    ),
}
"""By what the user loses: the names that it needs."""


def find_object(path: str) -> Any:
    """Return the object with this dotted name, and import modules on the way.

    Raises AttributeError if there is none, and ImportError if torch was built without a module of it.
    """
    parent, _, name = path.rpartition(".")
    if not parent:
        return importlib.import_module(name)
    try:
        owner = find_object(parent)
    except AttributeError:
        owner = importlib.import_module(parent)
    return getattr(owner, name)


def find_missing(names: tuple[str, ...]) -> list[str]:
    """Return those of `names` that this torch lacks. RPC is not missed in a torch that was built without it."""
    lacking = []
    for name in names:
        try:
            find_object(name)
        except AttributeError:
            lacking.append(name)
        except ImportError:
            lacking += [name] * (name not in FEATURES[RPC])
    return lacking


@functools.cache
def find_off() -> dict[str, list[str]]:
    """Return the features that are off, each with the names that this torch lacks."""
    return {feature: found for feature, names in FEATURES.items() if (found := find_missing(names))}


def is_on(feature: str) -> bool:
    """Return whether this torch has all names that `feature` needs."""
    return feature not in find_off()
