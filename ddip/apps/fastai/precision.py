"""Make ``to_fp16`` and ``to_bf16`` work on the CPU, and leave autocast after an error.

Mends, in fastai 2.8.12: MixedPrecision casts for CUDA only, and elsewhere only warns; after an error within a batch,
autocast stays on and keeps using its cached casts of the weights, so that the learner no longer learns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fastai.callback.fp16 import MixedPrecision
from fastai.learner import Learner
from fastcore.foundation import L
from torch.amp import GradScaler, autocast

from ddip.apps import patches


@contextlib.contextmanager
def autocast_left_on_error(learn: Learner) -> Iterator[None]:
    """Leave the learner's autocast if an error or an interrupt ends the block."""
    before = {device: torch.is_autocast_enabled(device) for device in ("cpu", "cuda")}
    try:
        yield
    except BaseException:
        for callback in learn.cbs:
            cast = vars(callback).get("autocast") if isinstance(callback, MixedPrecision) else None
            if cast is not None and torch.is_autocast_enabled(cast.device) and not before[cast.device]:
                cast.__exit__(None, None, None)
        raise


def apply_patches() -> None:
    """Patch MixedPrecision to use bfloat16 on the CPU, where it is fast and needs no gradient scaling."""
    patches.wrap_function(MixedPrecision, "before_fit", _before_fit)


def _before_fit(before_fit: Callable[[Any], None], self: MixedPrecision) -> None:
    if next(self.learn.model.parameters()).device.type != "cpu":
        before_fit(self)
    else:
        self.autocast = autocast("cpu", dtype=torch.bfloat16)
        self.learn.scaler, self.scales = GradScaler("cpu", enabled=False), L()
