"""Show one progress bar and one table, and write one log file: those of rank 0.

Mends, in fastai 2.8.12: every rank draws its own bar in ``lr_find`` and ``tta``, all ranks but rank 0 lose
their ProgressCallback for good, and each rank writes the file of ``CSVLogger``. fastprogress 1.1.6 checks only once, on
import, for a notebook: the preload process has none, and a rank seems to have one even below a terminal.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from fastai.callback.progress import CSVLogger
from fastprogress import fastprogress
from fastprogress.fastprogress import MasterBar, ProgressBar

from ddip.apps import patches, rank_exchange
from ddip.rank.runtime import current


class _HiddenBar(ProgressBar):
    """A progress bar that is not shown."""

    def update(self, val: int) -> None:
        pass


class _HiddenMasterBar(MasterBar):
    """Replacement for fastprogress's bar of epochs on a rank whose bars are not shown."""

    def __init__(self, gen: Any, total: int | None = None, **kwargs: Any) -> None:
        super().__init__(gen, _HiddenBar, total)

    def write(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update_graph(self, *args: Any, **kwargs: Any) -> None:
        pass


def apply_patches() -> None:
    """Patch fastprogress and CSVLogger so that only rank 0 shows and writes common output."""

    def progress_bar(*args: Any, **kwargs: Any) -> Any:
        """Make a progress bar: hidden, for a notebook, or for a terminal."""
        if rank_exchange.is_quiet():
            return _HiddenBar(*args, **kwargs)
        return (fastprogress.NBProgressBar if current.is_rich() else fastprogress.ConsoleProgressBar)(*args, **kwargs)

    def master_bar(*args: Any, **kwargs: Any) -> Any:
        """Make a bar of epochs: hidden, for a notebook, or for a terminal."""
        if rank_exchange.is_quiet():
            return _HiddenMasterBar(*args, **kwargs)
        return (fastprogress.NBMasterBar if current.is_rich() else fastprogress.ConsoleMasterBar)(*args, **kwargs)

    patches.replace_imports("progress_bar", fastprogress.progress_bar, progress_bar)
    patches.replace_imports("master_bar", fastprogress.master_bar, master_bar)
    patches.wrap_function(CSVLogger, "before_fit", _open_file)


def _open_file(before_fit: Callable[[Any], None], self: CSVLogger) -> None:
    if not rank_exchange.is_quiet() or hasattr(self.learn, "gather_preds"):
        before_fit(self)
    else:
        self.file = tempfile.TemporaryFile("w")  # noqa: SIM115 - after_fit closes it
        self.old_logger, self.learn.logger = self.learn.logger, self._write_line
