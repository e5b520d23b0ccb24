"""Keep random numbers equal on all ranks, except during training.

Cells that split data or make a model then do the same on every rank without a seed. During training, each rank draws
its own numbers: dropout and augmentation differ, as they do for the items of one large batch.
"""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from ddip.apps import rank_exchange
from ddip.sharded.contents import process_generators, set_process_generators


class Seeds(NamedTuple):
    """One seed per generator, drawn from that generator, so that a user's seed still has an effect."""

    python: int
    numpy: int
    torch: int

    @classmethod
    def draw(cls) -> Seeds:
        """Draw the next seeds from the generators."""
        numpy, torch_ = np.random.randint(2**31), torch.randint(2**62, ())
        return cls(random.getrandbits(62), int(numpy), int(torch_))

    def seed_all(self, more: int = 0) -> None:
        """Seed the generators; `more` is added to each seed."""
        random.seed(self.python + more)
        np.random.seed((self.numpy + more) % 2**32)
        torch.manual_seed(self.torch + more)


def sync_rng() -> None:
    """Copy rank 0's generator states to all ranks if they differ. A collective if all ranks run the cell.

    They differ after a cell that failed, or that ran on some ranks only.
    """
    if not rank_exchange.on_all_ranks():
        return
    states = process_generators()
    if len(set(rank_exchange.gather_numbers(_fingerprint_states(states)))) > 1:
        set_process_generators(rank_exchange.broadcast_object(states))


def _fingerprint_states(states: dict[str, Any]) -> int:
    """Return a hash that is equal for `states` of `process_generators` that produce the same numbers."""
    numpy = states["numpy"]["state"]
    tensors = [states[name].numpy().tobytes() for name in ("torch", "cuda") if name in states]
    return rank_exchange.fingerprint_value((states["random"], numpy["key"].tobytes(), numpy["pos"], tensors))


def diverge_rng() -> None:
    """Seed each rank differently, as without the app; rank 0 keeps its state."""
    if rank_exchange.rank() != 0:
        Seeds(*(int.from_bytes(os.urandom(7), "little") for _ in Seeds._fields)).seed_all()


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the generator states at the end of the block."""
    before = process_generators()
    try:
        yield
    finally:
        set_process_generators(before)


@contextlib.contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed all generators with `seed` for the block, and restore their states afterwards."""
    with preserved_rng():
        Seeds(seed, seed % 2**31, seed).seed_all()
        yield
