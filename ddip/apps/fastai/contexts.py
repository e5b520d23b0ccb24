"""Support for fastai's own functions for distributed training in cells: ``distrib_ctx``, ``rank0_first``.

Mends, in fastai 2.8.12: ``distrib_ctx`` fails on the CPU unless told ``cpu=True``, and even then if the model has batch
norm; ``rank0_first`` leaves the other ranks waiting when rank 0 raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fastai import distributed, torch_core
from fastai.learner import Learner
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ddip.apps import patches, rank_exchange


@contextlib.contextmanager
def _sync_batch_norm(learn: Learner, wanted: bool) -> Iterator[None]:
    """Compute batch norm over the batches of all ranks within the context, if `wanted` and on a GPU."""
    device = torch.device(getattr(learn.dls, "device", None) or "cpu")
    if not wanted or not rank_exchange.on_all_ranks() or device.type != "cuda":
        yield
        return
    plain = {name: module for name, module in learn.model.named_modules() if name and isinstance(module, _BatchNorm)}
    learn.model = nn.SyncBatchNorm.convert_sync_batchnorm(learn.model)
    try:
        yield
    finally:  # both models share parameters and buffers
        for name, module in plain.items():
            parent, _, last = name.rpartition(".")
            setattr(learn.model.get_submodule(parent), last, module)


@functools.wraps(distributed.rank0_first)
def rank0_first(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `func` on rank 0, then on the other ranks; raises RuntimeError on these if it fails on rank 0."""
    if not rank_exchange.on_all_ranks():
        return func(*args, **kwargs)
    is_rank_0 = rank_exchange.rank() == 0
    failed = "" if is_rank_0 else rank_exchange.broadcast_object("")
    if failed:
        raise RuntimeError(f"rank 0 failed in {getattr(func, '__name__', func)}: {failed}")
    try:
        with rank_exchange.single_process_mode():
            return func(*args, **kwargs)
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"
        raise
    finally:
        if is_rank_0:
            rank_exchange.broadcast_object(failed)


def apply_patches() -> None:
    """Replace fastai's functions for distribution, since fit is already distributed."""

    @contextlib.contextmanager
    def distrib_ctx(self: Learner, sync_bn: bool = True, in_notebook: bool = False, **kwargs: Any) -> Iterator[Learner]:
        """Yield the learner, which trains on all ranks anyway; with `sync_bn`, batch norm covers all ranks."""
        with _sync_batch_norm(self, sync_bn):
            yield self

    def to_distributed(self: Learner, sync_bn: bool = True, **kwargs: Any) -> Learner:
        """Return the learner, which trains on all ranks anyway."""
        return self

    def detach_distributed(self: Learner) -> Learner:
        """Return the learner unchanged."""
        return self

    def num_distrib() -> int:
        """Return the number of ranks that a barrier can wait for; 0 if not all ranks run the cell."""
        return rank_exchange.world_size() if rank_exchange.on_all_ranks() else 0

    patches.set_attribute(Learner, "distrib_ctx", distrib_ctx)
    patches.set_attribute(Learner, "to_distributed", to_distributed)
    patches.set_attribute(Learner, "detach_distributed", detach_distributed)
    patches.replace_imports("rank0_first", distributed.rank0_first, rank0_first)
    # fastai's barrier does nothing for 0 ranks, so that ``load`` works in a cell on one rank
    patches.set_attribute(torch_core, "num_distrib", num_distrib)
