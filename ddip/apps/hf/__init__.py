"""App for Hugging Face: accelerate, transformers and libraries built on them (trl, peft, datasets) use all ranks.

While the app is active, it patches these libraries in the places that `PATCHES` lists; each file here says why.
`release` undoes all patches. Each library may be missing.
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
    """Patch the libraries on a rank that has joined a group."""
    release()
    for module in PATCHES:
        module.apply_patches()
    if "accelerate.state" in sys.modules:
        from ddip.apps import launcher  # imports accelerate

        launcher.apply_patches()
    place.reset_state()


def rejoined() -> None:
    """Make the libraries' objects usable in a rebuilt group. Call this on all ranks at once."""
    living.reset_iterations()


def begin_cell() -> None:
    """Show progress bars only on rank 0, and forget the optimizer steps of the last cell."""
    hf_show.begin_cell()
    living.begin_cell()


def end_cell(error: BaseException | None) -> None:
    """Stop other ranks from waiting for this cell; after an error, request a rebuild if needed."""
    once.end_cell()
    living.end_cell(error)


def release() -> None:
    """Undo all patches, and reset the state that the libraries keep about the group."""
    patches.undo_all()
    hf_show.restore_bars()
    place.reset_state()


def command(text: str) -> str:
    """Answer ``%%dip -a patches`` with a description of all patches; raise ValueError for any other command."""
    if text.strip() != "patches":
        raise ValueError(f"the app hf knows one command: %%dip -a patches; typed: {text}")
    return "\n\n".join(f"{module.__name__.rpartition('.')[2]}: {(module.__doc__ or '').strip()}" for module in PATCHES)
