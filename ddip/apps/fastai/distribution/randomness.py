"""Random numbers: the ranks draw the same ones, but while they train.

A cell that splits data, or makes a model, then does the same on every rank without a seed. While they train, each draws
its own: dropout and augmentation differ, as they would for the items of one large batch.
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
    """Of the three generators that libraries draw from by default."""

    python: tuple[Any, ...]
    numpy: dict[str, Any]
    torch: torch.Tensor
    cuda: torch.Tensor | None

    @classmethod
    def now(cls) -> State:
        """The states of all generators of this rank now."""
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        numpy = np.random.get_state(legacy=False)
        return cls(random.getstate(), numpy, torch.get_rng_state(), cuda)  # type: ignore[arg-type]

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(self.cuda)

    def fingerprint(self) -> int:
        """The same for the same numbers to come."""
        numpy = self.numpy["state"]
        cuda = b"" if self.cuda is None else self.cuda.numpy().tobytes()
        of_torch = self.torch.numpy().tobytes(), cuda
        return rank_exchange.fingerprint((self.python, numpy["key"].tobytes(), numpy["pos"], *of_torch))


class Seeds(NamedTuple):
    """One for each generator, drawn from it: who has seeded only one of them gets the same again from that one."""

    python: int
    numpy: int
    torch: int

    @classmethod
    def draw(cls) -> Seeds:
        """The next ones."""
        numpy, torch_ = np.random.randint(2**31), torch.randint(2**62, ())
        return cls(random.getrandbits(62), int(numpy), int(torch_))

    def seed_all(self, more: int = 0) -> None:
        """Begin each generator there; `more` gives other numbers."""
        random.seed(self.python + more)
        np.random.seed((self.numpy + more) % 2**32)
        torch.manual_seed(self.torch + more)


def sync_rng() -> None:
    """Have every rank draw what rank 0 will draw: after a cell on some ranks only, or one that failed, they differ."""
    if not rank_exchange.on_all_ranks():
        return
    state = State.now()
    if len(set(rank_exchange.gather_numbers(state.fingerprint()))) > 1:
        State(*rank_exchange.broadcast_object(tuple(state))).restore()


def diverge_rng() -> None:
    """Have each rank draw its own numbers from here on, as without the app; rank 0 goes on as it was."""
    if rank_exchange.rank() != 0:
        Seeds(*(int.from_bytes(os.urandom(7), "little") for _ in Seeds._fields)).seed_all()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What is drawn in here is not missed outside."""
    before = State.now()
    try:
        yield
    finally:
        before.restore()


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In here every rank draws the numbers that come of `seed`."""
    with kept():
        Seeds(seed, seed % 2**31, seed).seed_all()
        yield
