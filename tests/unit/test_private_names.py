"""The private names of others that ddip uses: a release that changes one of them fails here first."""

from __future__ import annotations

import inspect

import ipyparallel
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from ipyparallel.client.futures import MessageFuture
from ipyparallel.controller.heartmonitor import HeartMonitor
from ipyparallel.controller.hub import Hub
from ipyparallel.engine import app
from ipyparallel.engine.kernel import IPythonParallelKernel


def test_the_client_sends_as_ddip_asks() -> None:
    wanted = {"socket", "msg_type", "content", "ident", "metadata", "track_outstanding", "message_future_hook"}
    assert wanted <= set(inspect.signature(ipyparallel.Client._send).parameters)
    source = inspect.getsource(ipyparallel.Client)
    for name in ("metadata", "_mux_stream", "_control_stream", "_query_stream", "_engines"):
        assert f"self.{name}" in source
    assert list(inspect.signature(ipyparallel.Client._update_engines).parameters) == ["self", "engines"]
    assert "msg_future.output = output" in source
    assert MessageFuture("id").iopub_callbacks == []


def test_the_hub_answers_what_ddip_asks() -> None:
    source = inspect.getsource(Hub)
    assert "'connection_request'" in source and "'unregistration_request'" in source
    assert HeartMonitor.class_traits()["period"].metadata["config"]
    assert HeartMonitor.class_traits()["max_heartmonitor_misses"].metadata["config"]


def test_the_engine_makes_its_kernel_from_a_name_of_its_module() -> None:
    assert app.Kernel is IPythonParallelKernel
    assert "Kernel.instance(" in inspect.getsource(app.IPEngine.complete_registration)
    for name in ("enable_nanny", "max_heartbeat_misses", "wait_for_url_file", "timeout", "id"):
        assert app.IPEngine.class_traits()[name].metadata["config"]


def test_the_kernel_takes_handlers_by_the_names_of_its_control_messages() -> None:
    assert "self.control_handlers[msg_type] = getattr(self, msg_type)" in inspect.getsource(Kernel.__init__)
    assert IPythonParallelKernel.control_msg_types


def test_ipykernel_still_asks_an_absent_shell_thread_for_its_parent() -> None:
    """When this fails, ``_NoShellThread`` may be needed no longer."""
    if hasattr(Kernel, "_supports_kernel_subshells"):
        assert "self.shell_channel_thread.parent_thread" in inspect.getsource(IPythonKernel.do_execute)


def test_an_engine_set_tells_its_launchers_and_what_they_wrote() -> None:
    from ipyparallel.cluster.launcher import LocalEngineSetLauncher

    assert {"launchers", "outputs"} <= set(LocalEngineSetLauncher.class_traits())
