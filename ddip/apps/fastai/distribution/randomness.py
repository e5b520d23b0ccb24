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


class State(NamedTuple):
    """State of the default random generators: Python, NumPy and torch, the latter on CPU and GPU."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> State:
        """Return the current state of this rank's generators; for CUDA only if it is initialized."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        numpy = np.random.get_state(legacy=False)
        return cls(random.getstate(), numpy, torch.get_rng_state(), cuda)  # type: ignore[arg-type]

    def restore(self) -> None:
        """Set the generators to this state."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(self.cuda)

    def fingerprint(self) -> int:
        """Return a hash that is equal for states that produce the same numbers."""
        numpy = self.numpy["state"]
        cuda = b"" if self.cuda is None else self.cuda.numpy().tobytes()
        of_torch = self.torch.numpy().tobytes(), cuda
        return rank_exchange.fingerprint_value((self.python, numpy["key"].tobytes(), numpy["pos"], *of_torch))


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
    state = State.now()
    if len(set(rank_exchange.gather_numbers(state.fingerprint()))) > 1:
        State(*rank_exchange.broadcast_object(tuple(state))).restore()


def diverge_rng() -> None:
    """Seed each rank differently, as without the app; rank 0 keeps its state."""
    if rank_exchange.rank() != 0:
        Seeds(*(int.from_bytes(os.urandom(7), "little") for _ in Seeds._fields)).seed_all()


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore the generator states at the end of the block."""
    before = State.now()
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def seeded_rng(seed: int) -> Iterator[None]:
    """Seed all generators with `seed` for the block, and restore their states afterwards."""
    with preserved_rng():
        Seeds(seed, seed % 2**31, seed).seed_all()
        yield
