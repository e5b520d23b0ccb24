"""List the private names of debugpy that the service for IDEs needs; see ``compat.py``."""

from __future__ import annotations

from ddip.protocol.compat import Names

_PYDEVD = "debugpy.server.api.pydevd"
NAMES = Names(
    "debugpy",
    "1.6 to 1.8",
    core=(
        f"{_PYDEVD}.PyDB.initialize_network",
        f"{_PYDEVD}.PyDB.start_auxiliary_daemon_threads",
        f"{_PYDEVD}.SetupHolder",
        f"{_PYDEVD}.PyDevdAPI.set_dont_trace_start_end_patterns",
        f"{_PYDEVD}.PyDevdAPI.request_resume_thread",
        f"{_PYDEVD}.PyDB.do_wait_suspend",
        f"{_PYDEVD}.get_current_thread_id",
        f"{_PYDEVD}.settrace",
        f"{_PYDEVD}.settrace_forked",
        f"{_PYDEVD}.stoptrace",
    ),
)
"""Looked up when an IDE is served for the first time, since the import takes 0.3 s."""
