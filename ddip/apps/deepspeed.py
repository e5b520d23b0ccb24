"""DeepSpeed after a fault: it keeps groups of its own, which go with the group that ddip forms again.

``deepspeed.init_distributed`` takes the group that is there, and torch builds an op once a host while the other ranks
wait, so nothing is to be prepared. DeepSpeed is imported by the cells: its import looks for GPUs, and starts compilers.
"""

from __future__ import annotations

import gc
import sys
from typing import Any, NoReturn

from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

GONE = (
    "this engine of DeepSpeed was made in a group that is no more: ddip has formed the group again. Make another with "
    "deepspeed.initialize, of a new model, and load_checkpoint if parameters and optimizer must be what they were"
)


def rejoined() -> None:
    """Have DeepSpeed make its groups again, and the engines of before say that they cannot go on."""
    _forget_groups()
    runtime = sys.modules.get("deepspeed.runtime.engine")
    if runtime is not None:
        for engine in [one for one in gc.get_objects() if isinstance(one, runtime.DeepSpeedEngine)]:
            engine.forward = engine.backward = engine.step = engine.save_checkpoint = _refuse


def release() -> None:
    """Have it begin anew in another group."""
    _forget_groups()
    comm = sys.modules.get("deepspeed.comm.comm")
    if comm is not None:
        comm.cdb = None  # type: ignore[attr-defined]


def _refuse(*args: Any, **kwargs: Any) -> NoReturn:
    raise RuntimeError(GONE)


def _forget_groups() -> None:
    """DeepSpeed keeps them in globals of its modules, and makes those that are not there."""
    for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "deepspeed"]:
        for name, value in list(vars(module).items()):
            if isinstance(value, ProcessGroup | DeviceMesh):
                setattr(module, name, None)
            elif isinstance(value, dict) and any(isinstance(one, ProcessGroup) for one in value.values()):
                value.clear()
