"""One progress bar, one table, one log file: rank 0's.

Mends, in fastai 2.8.12: every rank draws its own bar in ``lr_find`` and ``tta``, ranks but the first lose their
ProgressCallback for good, and each writes ``CSVLogger``'s file. fastprogress 1.1.6 asks once, when it is imported,
whether there is a notebook: in the warm process there is none, and in a rank there is one even below a terminal.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

from fastai.callback.progress import CSVLogger
from fastprogress import fastprogress
from fastprogress.fastprogress import MasterBar, ProgressBar

from ddip.apps import patches, rank_exchange
from ddip.rank.runtime import current


class _Quiet(ProgressBar):
    """A bar that nobody sees."""

    def update(self, val: int) -> None:
        pass


class _QuietMaster(MasterBar):
    """Stands for fastprogress's bar of the epochs on a rank whose bars nobody sees."""

    def __init__(self, gen: Any, total: int | None = None, **kwargs: Any) -> None:
        super().__init__(gen, _Quiet, total)

    def write(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update_graph(self, *args: Any, **kwargs: Any) -> None:
        pass


def apply() -> None:
    """Let one rank show, and write, what is the same on all."""
    before_fit = CSVLogger.before_fit

    def progress_bar(*args: Any, **kwargs: Any) -> Any:
        """The progress bar of fastprogress, where a person sees it."""
        if rank_exchange.is_quiet():
            return _Quiet(*args, **kwargs)
        return (fastprogress.NBProgressBar if current.is_rich() else fastprogress.ConsoleProgressBar)(*args, **kwargs)

    def master_bar(*args: Any, **kwargs: Any) -> Any:
        """The bar of the epochs: quiet, for a notebook, or for a terminal."""
        if rank_exchange.is_quiet():
            return _QuietMaster(*args, **kwargs)
        return (fastprogress.NBMasterBar if current.is_rich() else fastprogress.ConsoleMasterBar)(*args, **kwargs)

    @functools.wraps(before_fit)
    def open_file(self: CSVLogger) -> None:
        if not rank_exchange.is_quiet() or hasattr(self.learn, "gather_preds"):
            before_fit(self)
        else:
            self.file = tempfile.TemporaryFile("w")  # noqa: SIM115 - after_fit closes it
            self.old_logger, self.learn.logger = self.learn.logger, self._write_line

    patches.replace_imports("progress_bar", fastprogress.progress_bar, progress_bar)
    patches.replace_imports("master_bar", fastprogress.master_bar, master_bar)
    patches.patch(CSVLogger, "before_fit", open_file)
