"""Import early what a rank would otherwise import later: to send objects, show a traceback, complete a name, or end.

By then the notebook's folder is on ``sys.path``, and a file there could shadow any of these modules.
"""

# ruff: noqa: F401

from __future__ import annotations

import contextlib
import importlib

import cloudpickle
import pygments.formatters.terminal256  # type: ignore[import-untyped]
import threadpoolctl
import torch.distributed as dist

from ddip.protocol import compat_ipyparallel, dump
from ddip.protocol.objects import pickling
from ddip.rank.inspection import advice, stale, state_report, state_sync
from ddip.rank.kernel import app_hooks, call_runner
from ddip.rank.native import sockets
from ddip.rank.objects import names, rank_transfer
from ddip.rank.process_group import collectives, membership, rank_vitals, setup
from ddip.rank.runtime import c10d, current, housekeeping, process_settings, seeds, stacks
from ddip.rank.streams import streams

for name in (
    "IPython.core.guarded_eval",
    "IPython.core.latex_symbols",
    "IPython.extensions.autoreload",
    "stack_data",
    "tabulate",  # of torch, at the end of every process
):
    with contextlib.suppress(ImportError):  # another IPython may have no such module
        importlib.import_module(name)

dist.BackendConfig(dist.Backend("cpu:gloo,cuda:nccl"))  # torch searches all installed packages for each backend
threadpoolctl.threadpool_info()  # it resolves the paths of all loaded libraries, once
