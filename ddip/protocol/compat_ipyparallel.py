"""List the private names of ipyparallel, by the process that uses them; see ``compat.py``."""

from __future__ import annotations

from ddip.protocol.compat import Names

_CLIENT = "ipyparallel.client.client.Client"
_CONTROLLER = "ipyparallel.controller.app"
_ENGINE = "ipyparallel.engine.app"
_HUB = "ipyparallel.controller.hub.Hub"
_LAUNCHER = "ipyparallel.cluster.launcher.LocalProcessLauncher"
TESTED = "9.2"
"""Versions of ipyparallel that ddip has been tested with."""
ATTACH = "%makedip -c and --engines cannot reach the hosts of another cluster"
LAUNCHERS = "an error in ipyparallel can hide the end of a process"
NOTEBOOK = Names(
    "ipyparallel",
    TESTED,
    core=(
        f"{_CLIENT}._send",
        f"{_CLIENT}._dispatch_iopub.__wrapped__",
        f"{_CLIENT}._dispatch_reply.__wrapped__",
        f"{_CLIENT}._handle_stranded_msgs",
        f"{_CLIENT}._update_engines",
        f"{_LAUNCHER}._start_waiting",
    ),
    features={
        ATTACH: (f"{_CLIENT}._dispatch_single_reply",),
        LAUNCHERS: (f"{_LAUNCHER}._wait",),
    },
)
CONTROLLER = Names(
    "ipyparallel",
    TESTED,
    core=(
        f"{_CONTROLLER}.Hub",
        f"{_CONTROLLER}.IPController.construct_url",
        f"{_CONTROLLER}.IPController.next_port",
        f"{_CONTROLLER}.IPController.save_connection_dict",
        f"{_HUB}.finish_registration",
    ),
)
ENGINE = Names(
    "ipyparallel",
    TESTED,
    core=(
        f"{_ENGINE}.Kernel",
        f"{_ENGINE}.IPEngine._signal_stop",
        f"{_ENGINE}.IPEngine.complete_registration",
        f"{_ENGINE}.IPEngine.find_connection_file",
        f"{_ENGINE}.IPEngine.init_signal",
    ),
)
