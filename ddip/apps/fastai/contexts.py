"""What a user's cell may say of distribution itself: ``distrib_ctx``, ``rank0_first``.

Mends, in fastai 2.8.12: ``distrib_ctx`` fails on the CPU unless told ``cpu=True``, and with batch norm there even so;
``rank0_first`` strands the others when rank 0 raises.
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
def _synced(learn: Learner, wanted: bool) -> Iterator[None]:
    """Batch norm over the batches of all ranks, where torch has that: on GPUs."""
    device = torch.device(getattr(learn.dls, "device", None) or "cpu")
    if not wanted or not rank_exchange.on_all_ranks() or device.type != "cuda":
        yield
        return
    plain = {name: module for name, module in learn.model.named_modules() if name and isinstance(module, _BatchNorm)}
    learn.model = nn.SyncBatchNorm.convert_sync_batchnorm(learn.model)
    try:
        yield
    finally:  # parameters and buffers are shared by both
        for name, module in plain.items():
            parent, _, last = name.rpartition(".")
            setattr(learn.model.get_submodule(parent), last, module)


@functools.wraps(distributed.rank0_first)
def rank0_first(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run `func` on rank 0, then on the others; if it fails there, raise on all."""
    if not rank_exchange.on_all_ranks():
        return func(*args, **kwargs)
    first = rank_exchange.rank() == 0
    failed = "" if first else rank_exchange.broadcast_object("")
    if failed:
        raise RuntimeError(f"rank 0 failed in {getattr(func, '__name__', func)}: {failed}")
    try:
        with rank_exchange.single_process_mode():
            return func(*args, **kwargs)
    except BaseException as error:
        failed = f"{type(error).__name__}: {error}"
        raise
    finally:
        if first:
            rank_exchange.broadcast_object(failed)


def apply() -> None:
    """Make both harmless: fit distributes by itself."""

    @contextlib.contextmanager
    def distrib_ctx(self: Learner, sync_bn: bool = True, in_notebook: bool = False, **kwargs: Any) -> Iterator[Learner]:
        """Train on all ranks, as ddip's fastai app does anyway; with `sync_bn`, batch norm is over all of them."""
        with _synced(self, sync_bn):
            yield self

    def to_distributed(self: Learner, sync_bn: bool = True, **kwargs: Any) -> Learner:
        """Return the learner: ddip's fastai app trains it on all ranks anyway."""
        return self

    def detach_distributed(self: Learner) -> Learner:
        """Return the learner."""
        return self

    def num_distrib() -> int:
        """Ranks that a barrier can wait for."""
        return rank_exchange.world_size() if rank_exchange.on_all_ranks() else 0

    patches.patch(Learner, "distrib_ctx", distrib_ctx)
    patches.patch(Learner, "to_distributed", to_distributed)
    patches.patch(Learner, "detach_distributed", detach_distributed)
    patches.replace_imports("rank0_first", distributed.rank0_first, rank0_first)
    patches.patch(torch_core, "num_distrib", num_distrib)  # as distrib_barrier sees it: ``load`` in a cell on one rank
