"""``to_fp16`` and ``to_bf16`` on the CPU.

Mends, in fastai 2.8.12: MixedPrecision casts for CUDA only, and elsewhere warns and does nothing.
"""

from __future__ import annotations

import functools

import torch
from fastai.callback.fp16 import MixedPrecision
from fastcore.foundation import L
from torch.amp import GradScaler, autocast

from ddip.apps.fastai import patches


def mend() -> None:
    """Cast to what the device computes fast: bfloat16 on the CPU."""
    plain = MixedPrecision.before_fit

    @functools.wraps(plain)
    def before_fit(self: MixedPrecision) -> None:
        if getattr(self.learn.dls, "device", torch.device("cpu")).type != "cpu":
            plain(self)
        else:
            self.autocast = autocast("cpu", dtype=torch.bfloat16)
            self.learn.scaler, self.scales = GradScaler("cpu", enabled=False), L()

    patches.put(MixedPrecision, "before_fit", before_fit)
