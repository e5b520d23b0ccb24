"""Private names of libraries that ddip uses: a release that changes one of them fails here first."""

from __future__ import annotations

import atexit
import ctypes
import gzip
import importlib
import inspect
import io
import json
import os
import re
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import cloudpickle
import ipyparallel
import IPython
import pytest
import torch
import torch.distributed as dist
import tqdm
import zmq
from ipykernel import ipkernel
from ipykernel.iostream import IOPubThread, OutStream
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from ipykernel.zmqshell import ZMQDisplayPublisher, ZMQInteractiveShell
from ipyparallel.apps.baseapp import BaseParallelApplication
from ipyparallel.client.futures import MessageFuture
from ipyparallel.cluster.launcher import LocalEngineSetLauncher, LocalProcessLauncher
from ipyparallel.controller import app as controller_app
from ipyparallel.controller.app import IPController
from ipyparallel.controller.heartmonitor import HeartMonitor
from ipyparallel.controller.hub import Hub
from ipyparallel.engine import app
from ipyparallel.engine.kernel import IPythonParallelKernel
from ipyparallel.error import unwrap_exception
from IPython.core import shellapp, ultratb
from IPython.core.compilerop import CachingCompiler
from IPython.core.interactiveshell import InteractiveShell
from torch._C._distributed_c10d import Backend, Work
from torch.distributed import ProcessGroup, distributed_c10d, fsdp, rpc
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import dataloader

from ddip.cluster.processes.controller import READ_BY_HUB
from ddip.rank.native import lost_waits
from ddip.rank.objects import live_objects, reducers, wrappers
from ddip.rank.process_group import aborted_tensors, collectives, flight_recorder, rank_vitals
from ddip.rank.profiling import profile_events, profiling, trace_file
from ddip.rank.runtime import c10d, process_settings
from ddip.rank.saves import load_state, save_pickler
from ddip.sharded import layout


def test_the_client_sends_as_ddip_asks() -> None:
    wanted = {"socket", "msg_type", "content", "ident", "metadata", "buffers", "header"}
    assert wanted <= set(inspect.signature(ipyparallel.Client._send).parameters)
    source = inspect.getsource(ipyparallel.Client)
    for name in ("metadata", "_mux_stream", "_control_stream", "_query_stream", "_engines", "_io_loop", "_closed"):
        assert f"self.{name}" in source
    assert list(inspect.signature(ipyparallel.Client._update_engines).parameters) == ["self", "engines"]
    assert "msg_future.output = output" in source
    assert MessageFuture("id").iopub_callbacks == []


def test_settings_of_the_process_are_read_and_put_back() -> None:
    process_settings.begin_cell()
    with torch.utils._device.DeviceContext("meta"):
        device, modes = process_settings._read_modes()
        assert device == torch.device("meta") and len(modes) == 1
        process_settings._write_modes((None, []))
        assert torch.ones(1).device == torch.device("cpu")
        process_settings._write_modes((device, modes))
    with torch.autocast("cpu", torch.float16):
        former = process_settings._read_autocast()
        assert former[0] == 1
    now = process_settings._read_autocast()
    process_settings._write_autocast(former)
    assert torch.is_autocast_enabled("cpu") and process_settings._read_autocast() == former
    process_settings._write_autocast(now)
    environment = process_settings._read_environment()
    assert environment == dict(os.environb)
    process_settings._write_environment({**environment, b"DDIP_ODD": b"\xff"})
    assert os.environb.pop(b"DDIP_ODD") == b"\xff"
    filters = warnings.filters
    with warnings.catch_warnings():
        assert warnings.filters is not filters
        process_settings._write_filters(filters)
        assert warnings.filters is filters
    process_settings._write_inference(False)
    assert process_settings.end_cell(None) == []


def test_links_find_the_ipyparallel_parts_that_they_replace() -> None:
    source = inspect.getsource(ipyparallel.Client)
    for name in ("_control_stream.on_recv(self._dispatch_single_reply", "self._futures", "self._io_loop"):
        assert name in source
    engine = inspect.getsource(app.IPEngine)
    for name in ("= self.init_connector()", "self.connection_info = d", "url('control')", "parent=self,"):
        assert name in engine


def test_the_client_closes_its_sockets_before_it_sets_their_linger() -> None:
    """Check the fault that ``RankClient.close`` works around; a failure means it may be removed."""
    assert "self._io_loop.close(all_fds=True)" in inspect.getsource(ipyparallel.Client._io_main)
    close = inspect.getsource(ipyparallel.Client.close)
    assert close.index("self._stop_io_thread()") < close.index("socket.close(linger=linger)")
    assert "if self._closed:" in close and "self._io_loop.add_callback" in inspect.getsource(ipyparallel.Client)


def test_the_client_keeps_ids_where_ddip_drops_them() -> None:
    send = inspect.getsource(ipyparallel.Client._send)
    assert send.index("self.history.append(msg_id)") < send.index("self.create_message_futures(")


def test_the_hub_reads_monitored_messages_by_topic() -> None:
    topics = {f"b'{name}'" for name in ("in", "out", "iopub", *(topic.decode() for topic in READ_BY_HUB))}
    handlers = inspect.getsource(Hub.__init__).partition("self.monitor_handlers = {")[2].partition("}")[0]
    others = {"b'incontrol'", "b'outcontrol'"}  # the Hub ignores these
    assert set(re.findall(r"b'\w+'", handlers)) == topics | others
    assert 'sub.setsockopt(zmq.SUBSCRIBE, b"")' in inspect.getsource(controller_app)


def test_the_client_ends_requests_to_an_ended_engine_itself() -> None:
    ended = inspect.getsource(ipyparallel.Client._unregister_engine)
    assert ended.index("= self._engines.pop(") < ended.index("self._handle_stranded_msgs(eid, uuid)")
    assert list(inspect.signature(ipyparallel.Client._handle_stranded_msgs).parameters) == ["self", "eid", "uuid"]


def test_the_client_receives_answers_where_ddip_does() -> None:
    assert "_mux_stream.on_recv(self._dispatch_reply, copy=False)" in inspect.getsource(ipyparallel.Client)
    assert list(inspect.signature(ipyparallel.Client._dispatch_reply.__wrapped__).parameters) == ["self", "msg"]


def test_the_kernel_sends_states_where_ddip_withholds_them() -> None:
    assert list(inspect.signature(Kernel._publish_status).parameters) == ["self", "status", "channel", "parent"]
    assert "iopub_socket = IOPubThread(iopub_socket" in inspect.getsource(app.IPEngine.complete_registration)
    send = inspect.getsource(IOPubThread.send_multipart)
    assert "self.schedule(lambda: self._really_send(*args, **kwargs))" in send


def test_the_hub_answers_the_requests_of_ddip() -> None:
    source = inspect.getsource(Hub)
    assert "'connection_request'" in source and "'unregistration_request'" in source
    assert HeartMonitor.class_traits()["period"].metadata["config"]
    assert HeartMonitor.class_traits()["max_heartmonitor_misses"].metadata["config"]


def test_the_hub_registers_engines_as_ddip_asks() -> None:
    assert "self.query_handlers = {" in inspect.getsource(Hub.__init__)
    assert "handler(idents, msg)" in inspect.getsource(Hub.dispatch_query)
    assert "self.incoming_registrations[heart] = EngineConnector(" in inspect.getsource(Hub.register_engine)
    assert list(inspect.signature(Hub.finish_registration).parameters) == ["self", "heart"]
    hearts = inspect.getsource(Hub.handle_new_heart)  # the heart of a registered engine is ignored
    assert "if heart not in self.incoming_registrations:" in hearts


def test_the_controller_consists_of_the_parts_ddip_replaces() -> None:
    source = inspect.getsource(controller_app)
    assert source.count("time.") == 1 and "time.sleep(0.25)" in source
    assert source.count("= Hub(") == 1
    assert list(inspect.signature(IPController.next_port).parameters) == ["self", "pool_name"]
    assert source.count("select_random_ports") == 1
    assert controller_app.IPController.context.klass is zmq.Context and "zmq.Context.instance()" in source
    own = inspect.getsource(IPController.construct_url)  # once both agree, ddip's override can be removed
    assert "sep = '-' if" in own and 'return f"{interface}{sep}{port}"' in own
    assert """f'{info["interface"]}:{port}'""" in inspect.getsource(app.IPEngine.complete_registration)
    assert """f"{cfg['interface']}:{cfg[key]}\"""" in inspect.getsource(ipyparallel.Client.__init__)
    assert list(inspect.signature(IPController.save_connection_dict).parameters) == ["self", "fname", "cdict"]
    assert "os.path.join(self.profile_dir.security_dir, fname)" in inspect.getsource(IPController.save_connection_dict)


def test_the_launchers_start_and_wait_as_ddip_does() -> None:
    source = inspect.getsource(LocalProcessLauncher)
    for name in ("output_file", "pid", "process", "notify_start(self.process.pid)", "_start_waiting()", "get_env()"):
        assert f"self.{name}" in source
    for use in ("process.wait(timeout=", "process.is_running()", "process.wait(0)", "process.send_signal("):
        assert f"self.{use}" in source
    assert {"launchers", "outputs"} <= set(LocalEngineSetLauncher.class_traits())
    engine_set = inspect.getsource(LocalEngineSetLauncher.start)
    assert "parent=self" in engine_set and "dlist.append(d)" in engine_set
    assert "isawaitable(r)" in inspect.getsource(ipyparallel.Cluster.start_engines)
    assert "isawaitable(r)" in inspect.getsource(ipyparallel.Cluster.start_controller)
    assert "self.controller.get_connection_info()" in inspect.getsource(ipyparallel.Cluster.connect_client)


def test_the_engine_registers_as_ddip_asks() -> None:
    register = inspect.getsource(app.IPEngine.register)
    assert "await self.complete_registration(msg, connect, maybe_tunnel)" in register
    assert "self.registrar = ctx.socket(zmq.DEALER)" in register
    assert "self.find_connection_file()" in inspect.getsource(app.IPEngine.init_engine)
    assert "signal.signal(signal.SIGTERM, self._signal_stop)" in inspect.getsource(app.IPEngine.init_signal)
    assert {"url_file", "wait_for_url_file", "ident"} <= set(app.IPEngine.class_traits())


def test_ipyparallel_adds_the_working_directory_where_ddip_removes_it() -> None:
    init = inspect.getsource(app.IPEngine.init_engine)
    assert init.index("sys.path.insert(0, '')") < init.index("self.find_connection_file()")
    assert inspect.getsource(app).count("sys.path") == 1
    assert "sys.path.insert(0, '')" in inspect.getsource(BaseParallelApplication.to_work_dir)


def test_python_runs_its_exit_functions_when_asked() -> None:
    assert callable(atexit._run_exitfuncs)
    assert list(weakref.finalize._registry) is not None  # type: ignore[attr-defined]


def test_ipykernel_and_ipython_list_modules_where_ddip_lists_none() -> None:
    assert ipkernel.sys is shellapp.sys is sys
    modules = inspect.getsource(ipkernel).count("_kernel_modules")
    assert modules in (0, 2)  # from ipykernel 7 on, its debugger gets them, and nothing else
    assert "self.shell._sys_modules_keys = set(sys.modules.keys())" in inspect.getsource(shellapp)
    assert "self._sys_modules_keys" in inspect.getsource(InteractiveShell.reset)


def test_traitlets_configures_the_log_in_methods_that_ddip_replaces() -> None:
    assert callable(app.IPEngine._configure_logging) and callable(app.IPEngine._log_default)


def test_the_engine_creates_its_kernel_from_a_module_name() -> None:
    assert app.Kernel is IPythonParallelKernel
    assert "Kernel.instance(" in inspect.getsource(app.IPEngine.complete_registration)
    for name in ("enable_nanny", "max_heartbeat_misses", "wait_for_url_file", "timeout", "id"):
        assert app.IPEngine.class_traits()[name].metadata["config"]


def test_the_kernel_takes_handlers_by_the_names_of_its_messages() -> None:
    for channel in ("control", "shell"):
        assert f"self.{channel}_handlers[msg_type] = getattr(self, msg_type)" in inspect.getsource(Kernel.__init__)
    assert IPythonParallelKernel.control_msg_types and IPythonParallelKernel.msg_types


def test_the_kernel_runs_a_cell_between_the_calls_of_ddip() -> None:
    run = inspect.getsource(IPythonKernel.do_execute)
    assert run.index("self._forward_input(allow_stdin)") < run.index("self._restore_input()")
    for name in ("shell._last_traceback or []", "shell.payload_manager.clear_payload()", "should_run_async("):
        assert name in run
    if hasattr(Kernel, "_supports_kernel_subshells"):
        assert 'getattr(shell, "_last_traceback_during_displayhook", False)' in run
    assert 'msg["header"]["msg_type"].rsplit("_", 1)[0] + "_reply"' in inspect.getsource(Kernel._send_abort_reply)


def test_ipykernel_still_asks_an_absent_shell_thread_for_its_parent() -> None:
    """Check the fault that ``_NoShellThread`` works around; a failure means it may be removed."""
    if hasattr(Kernel, "_supports_kernel_subshells"):
        assert "self.shell_channel_thread.parent_thread" in inspect.getsource(IPythonKernel.do_execute)


def test_the_kernel_handles_requests_between_the_hooks_that_ddip_replaces() -> None:
    assert "signal(SIGINT, default_int_handler)" in inspect.getsource(Kernel.pre_handler_hook)
    assert "signal(SIGINT, self.saved_sigint_handler)" in inspect.getsource(Kernel.post_handler_hook)
    assert "if msg_id in self.aborted:" in inspect.getsource(IPythonParallelKernel.should_handle)
    assert "self.do_apply(content, bufs, msg_id, md)" in inspect.getsource(IPythonParallelKernel.apply_request)


def test_torch_stores_its_groups_under_the_names_ddip_uses() -> None:
    world = distributed_c10d._world
    for name in c10d.TABLES:
        assert hasattr(getattr(world, name), "clear")
    assert callable(distributed_c10d._update_default_pg) and callable(distributed_c10d._unregister_all_process_groups)
    left = inspect.getsource(distributed_c10d.destroy_process_group)
    for name in c10d.TABLES:
        assert f"_world.{name}.clear()" in left
    assert callable(getattr(torch.distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout)
    assert callable(ProcessGroup._get_backend) and hasattr(ProcessGroup, "_device_types")
    assert callable(Backend._get_sequence_number_for_group)


def test_torch_sets_up_groups_where_ddip_wraps_it() -> None:
    helper = inspect.signature(distributed_c10d._new_process_group_helper)
    assert [*helper.parameters][:3] == ["group_size", "group_rank", "global_ranks_in_group"]
    assert [*helper.parameters][3:6] == ["backend", "store", "group_name"] and "timeout" in helper.parameters
    assert inspect.getsource(distributed_c10d.init_process_group).count("_new_process_group_helper(") == 2
    assert "= _new_process_group_helper(" in inspect.getsource(distributed_c10d._new_group_with_tag)
    assert "_world.group_count" in inspect.getsource(distributed_c10d._process_group_name)


def test_torch_begins_collectives_through_the_methods_that_ddip_wraps() -> None:
    """All methods except these begin a collective, a send or a receive, or a batch of them."""
    quiet = {"_add_ephemeral_timeout", "_enable_collectives_timing", "_get_backend", "_get_backend_name", "_has_hooks"}
    quiet |= {"_get_sequence_number_for_group", "_register_backend", "_register_on_completion_hook", "_set_group_desc"}
    quiet |= {"_set_default_backend", "_set_group_name", "_wait_for_pending_works", "_id", "_backend_id"}
    quiet |= {"abort", "boxed", "unbox", "get_group_store", "get_reconfigure_handle", "merge_remote_group", "name"}
    quiet |= {"_pybind11_conduit_v1_", "_set_sequence_number_for_group"}
    quiet |= {"get_backend", "new_window", "rank", "reconfigure", "set_timeout", "shutdown", "size", "split_group"}
    quiet |= {f"{un}register_{when}_hook" for un in ("", "un") for when in ("abort", "pre", "post")}
    methods = {
        name for name in dir(ProcessGroup) if callable(getattr(ProcessGroup, name)) and not name.startswith("__")
    }
    methods -= {name for name in methods if isinstance(getattr(ProcessGroup, name), (type, ProcessGroup.BackendType))}
    assert methods - quiet <= {*collectives.COLLECTIVES, *collectives.OTHERS}
    assert {"allreduce", "broadcast", "send", "recv", "recv_anysource", "monitored_barrier"} <= methods


def test_torch_waits_for_collectives_where_ddip_sees_their_failures() -> None:
    for collective in (dist.all_reduce, dist.broadcast, dist.reduce, dist.all_reduce_coalesced):
        assert "work.wait()" in inspect.getsource(collective)
        assert inspect.unwrap(collective).__code__.co_filename == aborted_tensors._C10D
        assert collective.__code__.co_filename in (aborted_tensors._C10D, aborted_tensors._C10D_LOGGER)
    assert callable(Work.wait) and callable(Work.is_completed)
    assert hasattr(dist.BroadcastOptions(), "rootRank")
    assert callable(dist.get_debug_level) and hasattr(dist.DebugLevel, "DETAIL")


def test_the_flight_recorder_answers_the_requests_of_ddip() -> None:
    """Use gloo in a group of this process alone."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        torch.distributed.all_reduce(torch.ones(4))
        torch.distributed.all_reduce(torch.ones(2, 3, dtype=torch.int64))
        torch.distributed.barrier()
    finally:
        torch.distributed.destroy_process_group()
    if not flight_recorder.is_available():
        return  # this release records only nccl
    found = [(each.number, each.op, each.shapes, each.dtypes) for each in flight_recorder.read_entries()[-3:]]
    assert found[:2] == [(1, "gloo:all_reduce", [[4]], ["float32"]), (2, "gloo:all_reduce", [[2, 3]], ["int64"])]
    assert found[2][:2] == (3, "gloo:barrier")
    assert all(each.is_done and each.group == "0" for each in flight_recorder.read_entries()[-3:])


def test_the_profiler_answers_the_requests_of_ddip(tmp_path: Path) -> None:
    for name in profiling.STARTERS:
        assert callable(getattr(torch.autograd.profiler, name))
    assert torch.autograd.profiler._is_profiler_enabled is False
    with (
        trace_file.suppress_messages(),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        assert torch.autograd.profiler._is_profiler_enabled is True
        list(torch.utils.data.DataLoader([1, 2]))
    recorded = profile_events.RecordedEvents(profile_events.Layers(0, 1 << 63))
    assert profiler.profiler is not None
    profile_events.read_events(profiler.profiler.kineto_results.events(), threading.get_native_id(), recorded)
    assert recorded.layers.ops and len(recorded.layers.loading) >= 2
    assert profiler._get_distributed_info() is None
    with (tmp_path / "trace").open("wb") as to:
        trace_file.write_trace([trace_file.export_part(profiler)], to)
    trace = json.loads(gzip.decompress((tmp_path / "trace").read_bytes()))
    first = min(event["ts"] for event in trace["traceEvents"] if event.get("cat") == "cpu_op")
    assert abs(trace["baseTimeNanoseconds"] / 1000 + first - time.time_ns() / 1000) < 60e6


def test_a_wrapper_stores_its_reducer_under_the_expected_name() -> None:
    source = inspect.getsource(torch.nn.parallel.DistributedDataParallel)
    assert "self.reducer = dist.Reducer(" in source and "self.logger = dist.Logger(" in source
    present = {name for module, name in wrappers.WRAPPERS.items() if hasattr(importlib.import_module(module), name)}
    assert present == set(wrappers.WRAPPERS.values())


def test_a_wrapper_can_be_revived() -> None:
    from torch._dynamo import eval_frame  # imported here because it takes a second in each test process

    source = inspect.getsource(torch.nn.parallel.DistributedDataParallel)
    assert source.index("self.process_group = _get_default_group()") < source.index("self.module = module")
    for name in ("mixed_precision", "device_mesh", "_delay_all_reduce_params", "_use_python_reducer", "_comm_hooks"):
        assert f"self.{name}" in source
    assert "self._comm_hooks.append((hook, state))" in source
    assert (
        'del attrs["process_group"]' in source and 'del attrs["reducer"]' in source and 'del attrs["logger"]' in source
    )
    assert "self.process_group = _get_default_group()" in inspect.getsource(DistributedDataParallel.__setstate__)
    assert "self._ddp_init_helper(" in inspect.getsource(DistributedDataParallel.__setstate__)
    assert "self._orig_mod = mod" in inspect.getsource(eval_frame.OptimizedModule.__init__)
    assert "self._compiled_call_impl = torch.compile(" in inspect.getsource(torch.nn.Module.compile)
    for name in (*wrappers.SETTINGS, *reducers.FIRST_STEP, "parameters_to_ignore"):
        assert f"self.{name}" in source
    names = ["module", "process_group", "broadcast_bucket_size", "src", "params_and_buffers_to_ignore"]
    assert list(inspect.signature(_sync_module_states).parameters) == [*names, "broadcast_buffers"]


def test_a_reducer_can_be_replaced_in_place() -> None:
    """Do what ``DistributedDataParallel.__setstate__`` does, except for the group."""
    setstate_source = inspect.getsource(DistributedDataParallel.__setstate__)
    for name in ("_build_params_for_reducer()", "_build_debug_param_to_name_mapping(parameters)", "_ddp_init_helper("):
        assert f"self.{name}" in setstate_source
    for name in ("self.reducer._set_static_graph()", "self.logger._set_static_graph()"):
        assert name in setstate_source
    names = ["parameters", "expect_sparse_gradient", "param_to_name_mapping", "static_graph"]
    assert list(inspect.signature(DistributedDataParallel._ddp_init_helper).parameters)[1:] == names
    assert callable(torch.distributed.Reducer._remove_autograd_hooks)
    assert callable(torch.distributed.Reducer._set_mixed_precision_param_dtype)
    assert callable(DistributedDataParallel._register_builtin_comm_hook)
    assert str(reducers.BuiltinCommHookType.ALLREDUCE) == f"{reducers.BUILTIN}ALLREDUCE"
    source = inspect.getsource(DistributedDataParallel)
    for name in ("require_backward_grad_sync", "require_forward_param_sync", "_delay_all_reduce_params"):
        assert f"self.{name}" in source
    assert reducers.join._JoinConfig.construct_disabled_join_config().enable is False
    for module, name in reducers.STATES.items():
        kind = getattr(importlib.import_module(module), name)
        assert set(inspect.signature(kind).parameters) - {"random_seed"} <= set(kind.__slots__)


def test_backward_passes_and_their_nodes_are_counted_where_expected() -> None:
    source = inspect.getsource(torch.autograd.backward)
    assert "_engine_run_backward(" in source and "accumulate_grad=True" in source
    assert "accumulate_grad=False" in inspect.getsource(torch.autograd.grad)
    weight = torch.ones(1, requires_grad=True)
    before = torch.autograd._get_sequence_nr()
    with torch.no_grad():
        weight * 2
    assert torch.autograd._get_sequence_nr() == before
    weight * 2
    assert torch.autograd._get_sequence_nr() > before
    assert torch.amp.grad_scaler.OptState.READY and "_per_optimizer_states" in inspect.getsource(torch.amp.GradScaler)


@pytest.mark.skipif(not hasattr(fsdp, "FSDPModule"), reason="before torch 2.6 it was elsewhere")
def test_sharded_models_keep_their_training_state_where_ddip_resets_it() -> None:
    source = inspect.getsource(importlib.import_module(live_objects.FSDP2_STATES[0]))
    for name in ("_is_root", "_modules", "_state_ctx", "_comm_ctx", "_training_state", "_device"):
        assert f"self.{name}" in source
    for name in ("all_states", "iter_forward_root", "post_backward_final_callback_queued"):
        assert f"self.{name}" in source
    parts = inspect.getsource(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group"))
    for name in ("_all_gather_result", "_post_reduce_event", "_reshard_after_forward_event", "_partial_reduce_output"):
        assert f"self.{name}" in parts
    for name in ("self._post_forward_indices", "self.post_forward_order", "self.all_gather_state", "def _to_sharded("):
        assert name in parts
    end = inspect.getsource(fsdp._runtime_utils._post_backward_final_callback)
    for name in ("_catch_all_reshard", "_ran_pre_backward_hook", "_needs_pre_backward_unshard", "_post_forward_index"):
        assert name in end
    for name in ("_prefetched", "_exec_order_data.next_iter()", "_all_fsdp_states", "_post_backward_callback_queued"):
        assert name in end
    finalize = inspect.getsource(fsdp._runtime_utils._finalize_params)
    assert "flat_param._post_backward_hook_state[-1].remove()" in finalize and "_post_backward_called" in finalize


def test_a_device_mesh_knows_its_groups_by_their_names() -> None:
    """Check that meshes of different groups are equal; ``rank/process_group/meshes.py`` relies on it."""
    same = inspect.getsource(DeviceMesh.__eq__)
    assert "self._thread_id == other._thread_id" in same and "_group_names" not in same
    assert "self._hash = hash(" in inspect.getsource(DeviceMesh.__hash__)
    before_2_8, now = "self._dim_group_infos = dim_group_infos", "self._dim_group_names = self._init_process_groups("
    assert any(line in inspect.getsource(DeviceMesh) for line in (before_2_8, now))


def test_cloudpickle_tells_the_classes_that_it_has_unpickled() -> None:
    class Local:
        pass

    cloudpickle.loads(cloudpickle.dumps(Local))
    assert Local in load_state.PICKLED_CLASSES


def test_a_sharded_tensor_knows_the_position_of_its_shard() -> None:
    names = list(inspect.signature(layout.of_tensors.compute_local_shape_and_global_offset).parameters)
    assert names[:3] == ["global_shape", "mesh", "placements"]


@pytest.mark.skipif(not hasattr(fsdp, "FSDPModule"), reason="before torch 2.6 it was elsewhere")
def test_fully_shard_knows_its_gathered_parameters() -> None:
    source = inspect.getsource(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param"))
    for name in ("self.sharded_param:", "self._module_info: ParamModuleInfo = module_info", "    param_name: str"):
        assert name in source
    assert callable(fsdp.FSDPModule._get_fsdp_state)
    for name in ("self.fsdp_placement = ", "self.unsharded_accumulated_grad = ", "_unsharded_param.grad"):
        assert name in source
    groups = inspect.getsource(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group"))
    absent = {"reduce_scatter_unused_params", "reduce_scatter_max_input_buffers"}  # in torch 2.11
    if "self.gradient_divide_factor: " in groups:
        absent |= {"reduce_scatter_reduce_op"}  # this came before it, for instance in torch 2.7
    else:
        absent |= {
            "gradient_divide_factor",
            "force_sum_reduction_for_comms",
            "_all_gather_comm",
            "_reduce_scatter_comm",
        }
    for name in {*save_pickler.GROUP_SETTINGS, *save_pickler.COMMUNICATION} - absent:
        assert f"self.{name}: " in groups or f"self.{name} = " in groups
    states = inspect.getsource(importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_state"))
    assert "self._mp_policy = mp_policy" in states


def test_rpc_makes_its_group_where_ddip_wraps_it() -> None:
    made = inspect.signature(rpc.backend_registry._init_process_group).parameters
    assert list(made) == ["store", "rank", "world_size"]
    handler = inspect.getsource(rpc.backend_registry._tensorpipe_init_backend_handler)
    assert "_init_process_group(store, rank, world_size)" in handler and "TensorPipeAgent(" in handler
    assert callable(rpc.api._is_current_rpc_agent_set)


def test_ipython_keeps_a_failed_cell_where_ddip_frees_it() -> None:
    assert "last_execution_result" in InteractiveShell.class_traits()
    assert "self.tb = etb" in inspect.getsource(ultratb)
    cache = inspect.getsource(CachingCompiler.cache)
    assert "self._filename_map[name] = number" in cache or IPython.version_info < (8,)  # see old_versions.py
    assert "exec(code_obj, self.user_global_ns, self.user_ns)" in inspect.getsource(InteractiveShell.run_code)


def test_ipythons_traceback_caches_sources_where_ddip_frees_them() -> None:
    executing = pytest.importorskip("executing")
    source = inspect.getsource(executing.Source)
    assert '"__source_cache_with_lines", {}' in source and '"__executing_cache", {}' in source
    assert "setattr(cls, name, result)" in source
    assert callable(executing.executing.statement_containing_node.cache_clear)
    assert ".parent = " in inspect.getsource(executing.Source.__init__)


def test_the_shell_shows_errors_where_ddip_does() -> None:
    source = inspect.getsource(InteractiveShell)
    assert source.count("self.showtraceback(") > 5 and "self.showsyntaxerror()" in source
    assert list(inspect.signature(InteractiveShell.showtraceback).parameters)[1:] == [
        *("exc_tuple", "filename", "tb_offset", "exception_only", "running_compiled_code")
    ]
    for name in ("run_line_magic", "run_cell_magic", "run_code", "run_cell_async", "ask_exit"):
        assert hasattr(ZMQInteractiveShell, name)
    assert "sys._getframe(stack_depth + 1)" in inspect.getsource(InteractiveShell.get_local_scope)
    assert "self._last_traceback = stb" in inspect.getsource(ZMQInteractiveShell._showtraceback)


def test_the_client_dispatches_output_where_ddip_takes_it() -> None:
    dispatch = inspect.getsource(ipyparallel.Client._dispatch_iopub.__wrapped__)
    assert "future = self._output_futures.get(msg_id)" in dispatch and "future.set_result(None)" in dispatch
    source = inspect.getsource(ipyparallel.Client)
    assert "on_recv(self._dispatch_iopub" in source and "self._futures.pop(msg_id, None)" in source
    assert list(inspect.signature(ipyparallel.Client._dispatch_iopub.__wrapped__).parameters) == ["self", "msg"]


@pytest.mark.skipif(not hasattr(OutStream, "_flush_buffers"), reason="ipykernel before 6.29: see old_versions.py")
def test_the_streams_of_a_kernel_are_flushed_where_ddip_counts() -> None:
    assert "for parent, data in self._flush_buffers():" in inspect.getsource(OutStream._flush)
    assert "self._schedule_flush()" in inspect.getsource(OutStream.write)
    assert "self._flush_pending = False" in inspect.getsource(OutStream._flush)
    assert "self.socket = socket" in inspect.getsource(IOPubThread.__init__)
    assert "event_f = self._events.popleft()" in inspect.getsource(IOPubThread._handle_event)  # in their order
    assert "parent = self.parent_header" in inspect.getsource(OutStream.write)
    assert inspect.signature(OutStream.__init__).parameters["watchfd"].kind is inspect.Parameter.KEYWORD_ONLY
    assert "self._original_stdstream_copy" in inspect.getsource(OutStream.fileno)
    assert 'getattr(sys.stderr, "_original_stdstream_copy", None)' in inspect.getsource(app.IPEngine.redirect_output)
    display = inspect.getsource(ZMQDisplayPublisher.publish)
    assert "parent=self.parent_header" in display
    assert display.index("self._flush_streams()") < display.index("self.session.send(")
    assert "self._flush_streams()" in inspect.getsource(ZMQDisplayPublisher.clear_output)
    assert InteractiveShell.class_traits()["display_pub_class"].klass is not None


def test_the_client_keeps_the_engine_of_an_error() -> None:
    assert "content.get('engine_info', {})" in inspect.getsource(unwrap_exception)


def test_the_kernel_flushes_streams_after_a_reply_through_its_methods() -> None:
    assert "sys.stdout.flush()" in inspect.getsource(Kernel.dispatch_shell)
    assert IPythonKernel.class_traits()["shell_class"].klass is ZMQInteractiveShell
    assert list(inspect.signature(Kernel.raw_input).parameters) == ["self", "prompt"]
    assert list(inspect.signature(Kernel.getpass).parameters)[:2] == ["self", "prompt"]
    assert "self.io_loop = ioloop.IOLoop.current()" in inspect.getsource(Kernel.start)
    assert "self.io_loop.add_callback(set_sigint_result)" in inspect.getsource(IPythonKernel._cancel_on_sigint)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells for which address a thread waits")
def test_functions_that_end_a_gloo_wait_have_known_names() -> None:
    library = ctypes.CDLL(str(lost_waits.LIBRARY))
    ctypes.c_char.in_dll(library, lost_waits.VTABLE)
    assert [name for name in lost_waits.ABORT_FUNCTIONS if not hasattr(library, name)] == []


def test_tqdm_knows_its_bars_by_the_names_that_are_used() -> None:
    with tqdm.tqdm(total=9, file=io.StringIO()) as outer, tqdm.tqdm(total=5, file=io.StringIO()) as inner:
        outer.update(3)
        inner.update(2)
        assert rank_vitals.list_bars() == [(3, 9), (2, 5)]
    assert rank_vitals.list_bars() == []


def test_a_data_loader_waits_for_workers_as_ddip_configures() -> None:
    end = inspect.getsource(dataloader._MultiProcessingDataLoaderIter._shutdown_workers)
    assert "w.join(timeout=_utils.MP_STATUS_CHECK_INTERVAL)" in end and "w.terminate()" in end
    assert "_utils" in vars(dataloader) and dataloader._utils.MP_STATUS_CHECK_INTERVAL == 5.0
