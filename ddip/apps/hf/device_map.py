"""``device_map="auto"``: it lays one model out over the GPUs of one process, and here each rank has its own.

transformers 5.23 loads it on each rank, over all GPUs that it sees, and the first step of a training refuses it. It is
refused where it is written, with what to write instead.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from ddip.apps import patches, rank_exchange

SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
INSTEAD = (
    "device_map={typed!r} spreads one model over all GPUs, and each of the {size} ranks has its own copy: write "
    "device_map={{'': device}}, or leave it out, and Trainer or Accelerator puts it there"
)


def apply() -> None:
    """Refuse it where all ranks load a model."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        own = modeling.PreTrainedModel.__dict__["from_pretrained"].__func__
        patches.patch(modeling.PreTrainedModel, "from_pretrained", classmethod(_checked(own)))


def _checked(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_here(kind: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        typed = kwargs.get("device_map")
        if isinstance(typed, str) and typed in SPREAD and rank_exchange.on_all_ranks():
            raise ValueError(INSTEAD.format(typed=typed, size=rank_exchange.world_size()))
        return load(kind, *args, **kwargs)

    return load_here
