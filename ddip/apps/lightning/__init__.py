"""App for Lightning: a ``Trainer()`` and a ``Fabric()`` train on all ranks.

Lightning detects the ranks by itself: it takes them for processes of torchrun (``TorchElasticEnvironment``), starts
none, and uses the existing process group. `PATCHES` lists what else is patched; only `faults`, `runs` and `tuner` use
private names of Lightning. `release` undoes all patches.
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
    """Patch Lightning on a rank that has joined a group."""
    release()
    for module in PATCHES:
        module.apply_patches()
    _set_rank(dist.get_rank())


def release() -> None:
    """Undo all patches."""
    patches.undo_all()


def begin_cell() -> None:
    """Show and write common output only on the first rank of the cell.

    Lightning determines the rank on import, which is before the fork. Until it has made a Trainer, each rank would
    otherwise take itself for the first one.
    """
    ranks = current.cell_ranks()
    if ranks:
        _set_rank(sorted(ranks).index(dist.get_rank()))


def command(text: str) -> str:
    """Describe all patches for ``%%dip -a patches``; raises ValueError for other commands."""
    if text.strip() != "patches":
        raise ValueError(f"the app lightning knows one command: %%dip -a patches; typed: {text}")
    return "\n\n".join(f"{module.__name__.rpartition('.')[2]}: {(module.__doc__ or '').strip()}" for module in PATCHES)


def _set_rank(rank: int) -> None:
    rank_zero_only.rank = rank  # type: ignore[attr-defined]
