"""List the private names of ipykernel and IPython, by the process that uses them; see ``compat.py``."""

from __future__ import annotations

from ddip.protocol.compat import Names

_KERNEL = "ipykernel.kernelbase.Kernel"
_STREAM = "ipykernel.iostream.OutStream"
KERNEL_TESTED = "6.17 to 7.4"
"""Versions of ipykernel that ddip has been tested with."""
TESTED = "7.34 to 9.18"
"""Versions of IPython that ddip has been tested with."""
STATES = "each cell needs more messages"
AWAITS = "the stop button may not end a cell that awaits"
QUICK = "short cells take longer"
DISPLAYS = "a print may appear below a later display"
MODULES = "changed modules of the notebook are not reloaded on other hosts"
RELOAD = "%reload_ext ddip ends the group"
RANK_KERNEL = Names(
    "ipykernel",
    KERNEL_TESTED,
    core=(
        f"{_KERNEL}.pre_handler_hook",
        f"{_KERNEL}.post_handler_hook",
        f"{_STREAM}._flush",
        f"{_STREAM}._flush_buffers or {_STREAM}._flush_buffer",  # see old_versions.RequestBuffers
        f"{_STREAM}._is_master_process",
        f"{_STREAM}._schedule_flush",
        "ipykernel.zmqshell.ZMQInteractiveShell._showtraceback",
    ),
    features={
        STATES: (f"{_KERNEL}._publish_status",),
        AWAITS: ("ipykernel.ipkernel.IPythonKernel._cancel_on_sigint",),
        QUICK: ("ipykernel.ipkernel.IPythonKernel._forward_input", "ipykernel.ipkernel.IPythonKernel._restore_input"),
        DISPLAYS: ("ipykernel.zmqshell.ZMQDisplayPublisher._flush_streams",),
    },
)
RANK_SHELL = Names("IPython", TESTED, features={MODULES: ("IPython.extensions.autoreload.superreload",)})
NOTEBOOK = Names(
    "IPython",
    TESTED,
    features={
        RELOAD: ("IPython.core.extensions.ExtensionManager.reload_extension",),
    },
)
