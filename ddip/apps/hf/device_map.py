"""Refuse ``device_map="auto"``: it spreads one model over all GPUs of a process, but each rank has one GPU.

transformers 5.23 spreads the model on each rank over all visible GPUs, and raises only in the first training step. ddip
raises when the model is loaded, and says what to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ddip.apps import patches, rank_exchange

SPREAD = ("auto", "balanced", "balanced_low_0", "sequential")
INSTEAD = (
    "device_map={typed!r} spreads one model over all GPUs, and each of the {size} ranks has its own copy: write "
    "device_map={{'': device}}, or leave it out, and Trainer or Accelerator places the model"
)


def apply_patches() -> None:
    """Patch ``from_pretrained`` to raise ValueError if all ranks load a model with a `SPREAD` device map."""
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is not None:
        model = modeling.PreTrainedModel
        load = patches.wrap_call(model.__dict__["from_pretrained"].__func__, _load_checked)
        patches.set_attribute(model, "from_pretrained", classmethod(load))


def _load_checked(load: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    typed = kwargs.get("device_map")
    if isinstance(typed, str) and typed in SPREAD and rank_exchange.on_all_ranks():
        raise ValueError(INSTEAD.format(typed=typed, size=rank_exchange.world_size()))
    return load(*args, **kwargs)
