"""Show one progress bar, one table and one log: those of rank 0.

transformers 5.23 decides only once, on import, whether to show a notebook's bars, and in a notebook each rank shows its
own. datasets, and the loading of weights and files, also show bars on each rank.
"""

from __future__ import annotations

import sys
from typing import Any

from ddip.apps import patches, rank_exchange
from ddip.rank.runtime import current

SWITCHES = ("datasets.utils.tqdm", "huggingface_hub.utils.tqdm")
"""Modules that have ``disable_progress_bars``."""
_show_again: list[Any] = []
"""Functions that show hidden bars again."""


def apply_patches() -> None:
    """Save the default progress callback, which `begin_cell` sets, so that the end of the app restores it."""
    trainer: Any = sys.modules.get("transformers.trainer")
    if trainer is not None:
        patches.set_attribute(trainer, "DEFAULT_PROGRESS_CALLBACK", trainer.ProgressCallback)


def begin_cell() -> None:
    """Show bars on rank 0 only, as HTML or text as the notebook allows."""
    trainer: Any = sys.modules.get("transformers.trainer")
    quiet = rank_exchange.is_quiet()
    if trainer is not None:
        rich = current.is_rich() and not quiet
        kind = sys.modules["transformers.utils.notebook"].NotebookProgressCallback
        trainer.DEFAULT_PROGRESS_CALLBACK = kind if rich else trainer.ProgressCallback
    if quiet and not _show_again:
        _hide_bars()
    elif not quiet:
        restore_bars()


def _hide_bars() -> None:
    for name in SWITCHES:
        module = sys.modules.get(name)
        if module is not None and not module.are_progress_bars_disabled():
            module.disable_progress_bars()
            _show_again.append(module.enable_progress_bars)
    logging = sys.modules.get("transformers.utils.logging")
    if logging is not None and logging.is_progress_bar_enabled():
        logging.disable_progress_bar()
        _show_again.append(logging.enable_progress_bar)


def restore_bars() -> None:
    """Show all bars again."""
    while _show_again:
        _show_again.pop()()
