"""List the private names of torch without which a rank, or a feature of it, fails as a whole; see ``compat.py``."""

from __future__ import annotations

from ddip.protocol.compat import Names

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
"""Names that ddip needs to form and rebuild a process group."""
COUNTS = "numbers of collectives are not compared, and ranks that wait on a GPU are not released"
SET_UP = "the ranks do not compare the members of a new process group, and the stop button does not end its setup"
WRAPPERS = "DDP wrappers must be recreated after a fault"
ITERATIONS = "an iteration interrupted by a failed cell is not detected"
DEVICES = "a default device left by a stopped cell is not restored"
WORKERS = "unused data loader workers delay the next cell"
PERSISTENT_WORKERS = "after %dipload, loaders with persistent workers draw another random number"
RPC = "torch.distributed.rpc is neither checked nor named when the group is rebuilt"
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
        "torch.distributed._compute_bucket_assignment_by_size",
        f"{_REDUCER}._rebuild_buckets",
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
    PERSISTENT_WORKERS: ("torch.utils.data.dataloader._MultiProcessingDataLoaderIter",),
    RPC: (
        "torch.distributed.rpc.backend_registry._init_process_group",
        "torch.distributed.rpc.api._is_current_rpc_agent_set",
    ),
}
"""Names that each feature needs; the key says what the user loses without the feature."""
NAMES = Names("torch", TESTED, CORE, FEATURES, optional=FEATURES[RPC])
is_on = NAMES.is_on
