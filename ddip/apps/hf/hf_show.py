"""One bar, one table, one log: rank 0's.

transformers 5.23 decides once, when it is imported, whether its bars are a notebook's, and in a notebook each rank
draws its own; datasets, and the loading of weights and files, draw theirs on each rank.
"""

from __future__ import annotations

import sys
from typing import Any

from ddip.apps import patches, rank_exchange
from ddip.rank.runtime import current

SWITCHES = ("datasets.utils.tqdm", "huggingface_hub.utils.tqdm")
"""Modules with ``disable_progress_bars``."""
_hidden: list[Any] = []
"""What turns on again the bars that are hidden."""


def apply() -> None:
    """Have what the cells change put back at the end."""
    trainer: Any = sys.modules.get("transformers.trainer")
    if trainer is not None:
        patches.patch(trainer, "DEFAULT_PROGRESS_CALLBACK", trainer.ProgressCallback)


def begin_cell() -> None:
    """Let rank 0 show bars, of the kind that the notebook can show."""
    trainer: Any = sys.modules.get("transformers.trainer")
    quiet = rank_exchange.is_quiet()
    if trainer is not None:
        rich = current.is_rich() and not quiet
        kind = sys.modules["transformers.utils.notebook"].NotebookProgressCallback
        trainer.DEFAULT_PROGRESS_CALLBACK = kind if rich else trainer.ProgressCallback
    if quiet and not _hidden:
        _hide()
    elif not quiet:
        restore()


def _hide() -> None:
    for name in SWITCHES:
        module = sys.modules.get(name)
        if module is not None and not module.are_progress_bars_disabled():
            module.disable_progress_bars()
            _hidden.append(module.enable_progress_bars)
    logging = sys.modules.get("transformers.utils.logging")
    if logging is not None and logging.is_progress_bar_enabled():
        logging.disable_progress_bar()
        _hidden.append(logging.enable_progress_bar)


def restore() -> None:
    """Show all bars again."""
    while _hidden:
        _hidden.pop()()
