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
from IPython.core.getipython import get_ipython

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


def prepare() -> None:
    """Patch fastai on a rank that has joined a group."""
    release()
    for module in MENDS:
        module.apply_patches()
    # fastai's default number of workers per loader
    patches.set_attribute(defaults, "cpus", defaults.cpus // int(os.environ["LOCAL_WORLD_SIZE"]))
    shell = get_ipython()
    assert shell is not None
    shell.events.register("pre_run_cell", _begin_cell)


def release() -> None:
    """Undo all patches of fastai, and let the ranks' random numbers differ again."""
    patches.undo_all()
    shell = get_ipython()
    if shell is not None and _begin_cell in shell.events.callbacks["pre_run_cell"]:
        shell.events.unregister("pre_run_cell", _begin_cell)
        randomness.diverge_rng()


def command(text: str) -> str:
    """Describe all patches of fastai for ``%%dip -a patches``; raises ValueError for other commands."""
    if text.strip() != "patches":
        raise ValueError(f"the app fastai knows one command: %%dip -a patches; typed: {text}")
    return "\n\n".join(f"{module.__name__.rpartition('.')[2]}: {(module.__doc__ or '').strip()}" for module in MENDS)


def _begin_cell(info: object) -> None:
    randomness.sync_rng()
