"""Hugging Face on the ranks: accelerate, transformers, and what builds on them (trl, peft, datasets), unchanged.

While the app is there, these libraries are changed in the places that ``PATCHES`` lists; each file here says why.
``release`` takes everything out again. Each library may be missing.
"""

from __future__ import annotations

import contextlib
import sys

with contextlib.suppress(ImportError):
    import accelerate  # noqa: F401
with contextlib.suppress(ImportError):
    import transformers.trainer
    import transformers.utils.notebook  # noqa: F401
with contextlib.suppress(ImportError):
    import datasets  # noqa: F401

from ddip.apps import compat_hf, once, patches
from ddip.protocol import compat

if refusal := compat.find_refusal(*(names for module, names in compat_hf.BY_MODULE.items() if module in sys.modules)):
    raise ImportError(refusal)

from ddip.apps.hf import device_map, hf_files, hf_show, living, place, trainer_faults

PATCHES = (place, living, trainer_faults, hf_show, hf_files, device_map)


def prepare() -> None:
    """Change the libraries, on a rank that has joined a group."""
    release()
    for module in PATCHES:
        module.apply()
    if place.accelerate_is_there():
        from ddip.apps import launcher  # it needs accelerate

        launcher.apply()
    place.forget()


def rejoined() -> None:
    """The ranks are in a new group: what was in use goes on."""
    living.go_on()


def begin_cell() -> None:
    """One rank shows what all of them do."""
    hf_show.begin_cell()
    living.begin_cell()


def end_cell(error: BaseException | None) -> None:
    """Nobody waits for what this cell has not done; what it has left half done is mended."""
    once.end_cell()
    living.end_cell(error)


def release() -> None:
    """Leave the libraries as they were, and what they know of a group that is left."""
    patches.restore()
    hf_show.restore()
    place.forget()


def command(text: str) -> str:
    """``%%dip -a patches``: what is changed, and why."""
    if text.strip() != "patches":
        raise ValueError(f"the app hf knows one command: %%dip -a patches; typed: {text}")
    return "\n\n".join(f"{module.__name__.rpartition('.')[2]}: {(module.__doc__ or '').strip()}" for module in PATCHES)
