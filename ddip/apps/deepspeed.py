"""Make DeepSpeed continue after a fault: its process groups are lost when ddip rebuilds the group.

There is nothing to prepare: ``deepspeed.init_distributed`` uses the existing group, and torch builds DeepSpeed's ops
once per host while the other ranks wait. The cells import DeepSpeed, since its import looks for GPUs and starts
compilers.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NoReturn

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

STALE = (
    "this DeepSpeed engine was made in a process group that has been destroyed: ddip has rebuilt the group. Create a "
    "new engine from a new model with deepspeed.initialize; load_checkpoint restores parameters and optimizer"
)


def rejoined() -> None:
    """Make DeepSpeed recreate its groups, and make engines of the former group raise an error when used."""
    _forget_groups()
    runtime = sys.modules.get("deepspeed.runtime.engine")
    if runtime is not None:
        for engine in [obj for obj in gc.get_objects() if isinstance(obj, runtime.DeepSpeedEngine)]:
            engine.forward = engine.backward = engine.step = engine.save_checkpoint = _raise_stale


def release() -> None:
    """Reset DeepSpeed so that it initializes again in the next group."""
    _forget_groups()
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        comm.cdb = None  # type: ignore[attr-defined]


def _raise_stale(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(STALE)


def _forget_groups() -> None:
    """Clear groups and meshes in the globals of DeepSpeed's modules; DeepSpeed recreates missing ones."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed"]:
        for name, value in list(vars(module).items()):
            if isinstance(value, ProcessGroup | DeviceMesh):
                setattr(module, name, None)
            elif isinstance(value, dict) and any(isinstance(item, ProcessGroup) for item in value.values()):
                value.clear()
