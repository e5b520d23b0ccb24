"""Lightning on the ranks: a ``Trainer()`` and a ``Fabric()`` train on all of them.

Lightning finds the ranks by its own means: it takes them for processes of torchrun (``TorchElasticEnvironment``),
starts none, and finds the process group there. What it is told besides is in ``PATCHES``: by its public names, but in
``faults`` and ``tuner``. ``release`` takes everything out again.
"""

from __future__ import annotations

import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only

from ddip.apps import compat_lightning, patches
from ddip.protocol import compat

if refusal := compat.find_refusal(*(names for names in compat_lightning.TABLES if names.is_installed)):
    raise ImportError(refusal)

from ddip.apps.lightning import faults, runs, trainers, tuner
from ddip.rank.runtime import current

PATCHES = (trainers, runs, faults, tuner)


def prepare() -> None:
    """Change Lightning, on a rank that has joined a group."""
    release()
    for module in PATCHES:
        module.apply()
    _set_rank(dist.get_rank())


def release() -> None:
    """Leave Lightning as it was."""
    patches.restore()


def begin_cell() -> None:
    """Have the first rank of the cell show and write what one of them does: on a rank that was forked from a process
    that had imported Lightning, that would be each of them until it has made a Trainer."""
    ranks = current.ranks()
    if ranks:
        _set_rank(sorted(ranks).index(dist.get_rank()))


def command(text: str) -> str:
    """``%%dip -a patches``: what is changed in Lightning, and why."""
    if text.strip() != "patches":
        raise ValueError(f"the app lightning knows one command: %%dip -a patches; typed: {text}")
    return "\n\n".join(f"{module.__name__.rpartition('.')[2]}: {(module.__doc__ or '').strip()}" for module in PATCHES)


def _set_rank(rank: int) -> None:
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
