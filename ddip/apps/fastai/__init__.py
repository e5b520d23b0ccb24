"""fastai on the ranks: a lesson's own cells train on all of them.

While the app is there, fastai is changed in the places that ``mends`` lists; each file here says which fault of which
version it mends. ``release`` takes everything out again.
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

with contextlib.suppress(ImportError, RuntimeError, OSError):  # a torchvision that does not fit torch
    import fastai.vision.all  # noqa: F401

MENDS = (fit, evaluate, finder, fastai_files, fastai_show, contexts, precision, launcher)


def prepare() -> None:
    """Change fastai, on a rank that has joined a group."""
    release()
    for module in MENDS:
        module.apply()
    patches.patch(defaults, "cpus", defaults.cpus // int(os.environ["LOCAL_WORLD_SIZE"]))  # loaders' workers
    shell = get_ipython()
    assert shell is not None
    shell.events.register("pre_run_cell", _begin_cell)


def release() -> None:
    """Leave fastai as it was."""
    patches.restore()
    shell = get_ipython()
    if shell is not None and _begin_cell in shell.events.callbacks["pre_run_cell"]:
        shell.events.unregister("pre_run_cell", _begin_cell)
        randomness.diverge_rng()


def command(text: str) -> str:
    """``%%dip -a mends``: what is changed in fastai, and why."""
    if text.strip() != "mends":
        raise ValueError(f"the app fastai knows one command: %%dip -a mends; typed: {text}")
    return "\n\n".join(f"{module.__name__.rpartition('.')[2]}: {(module.__doc__ or '').strip()}" for module in MENDS)


def _begin_cell(info: object) -> None:
    randomness.sync_rng()
