"""App for fastai: unchanged cells of a lesson train on all ranks.

While the app is active, it patches fastai in the places that ``%%dip -a patches`` lists. Each file here says which
fault of which version it mends. `release` undoes all patches.
"""

from __future__ import annotations

import contextlib
import os

import fastai.callback.all
import fastai.distributed
import fastai.tabular.all
import fastai.text.all
from fastcore.foundation import defaults

from ddip.apps import compat_fastai, compat_hf, patches
from ddip.protocol import compat

if refusal := compat.find_refusal(compat_fastai.FASTAI, compat_fastai.FASTCORE, compat_hf.ACCELERATE):
    raise ImportError(refusal)

from ddip.apps import launcher
from ddip.apps.fastai import contexts, evaluate, fastai_files, fastai_show, finder, fit, precision
from ddip.apps.fastai.distribution import randomness

with contextlib.suppress(ImportError, RuntimeError, OSError):  # this torchvision does not fit torch
    import fastai.vision.all  # noqa: F401

MENDS = (fit, evaluate, finder, fastai_files, fastai_show, contexts, precision, launcher)
_is_active = False  # True from `prepare` until `release`


def prepare() -> None:
    """Patch fastai on a rank that has joined a group."""
    global _is_active
    release()
    for module in MENDS:
        module.apply_patches()
    # fastai's default number of workers per loader
    patches.set_attribute(defaults, "cpus", defaults.cpus // int(os.environ["LOCAL_WORLD_SIZE"]))
    _is_active = True


def release() -> None:
    """Undo all patches of fastai, and let the ranks' random numbers differ again."""
    global _is_active
    patches.undo_all()
    if _is_active:
        _is_active = False
        randomness.diverge_rng()


def begin_cell() -> None:
    """Give all ranks the random states of rank 0."""
    randomness.sync_rng()


def command(text: str) -> str:
    """Describe all patches of fastai for ``%%dip -a patches``; raises ValueError for other commands."""
    if text.strip() != "patches":
        raise ValueError(f"the app fastai knows one command: %%dip -a patches; typed: {text}")
    return "\n\n".join(f"{module.__name__.rpartition('.')[2]}: {(module.__doc__ or '').strip()}" for module in MENDS)
