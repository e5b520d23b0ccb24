"""Import what a rank otherwise imports when it first needs it: to send objects, show a traceback, complete a name.

By then the notebook's folder is on its path, and a file there may have any name.
"""

# ruff: noqa: F401

from __future__ import annotations

import cloudpickle
import IPython.core.guarded_eval
import IPython.core.latex_symbols
import pygments.formatters.terminal256  # type: ignore[import-untyped]
import stack_data
import torch.distributed as dist

from ddip.protocol import dump, pickling
from ddip.rank import (
    apps,
    c10d,
    calls,
    collectives,
    current,
    housekeeping,
    names,
    process_group,
    setup,
    sockets,
    stacks,
    streams,
    transfer,
)

dist.BackendConfig(dist.Backend("cpu:gloo,cuda:nccl"))  # torch looks for each among all packages that are installed
