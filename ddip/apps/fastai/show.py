"""One progress bar, one table, one log file: rank 0's.

Mends, in fastai 2.8.12: every rank draws its own bar in ``lr_find`` and ``tta``, ranks but the first lose their
ProgressCallback for good, and each writes ``CSVLogger``'s file.
"""

from __future__ import annotations

import functools
import tempfile
from typing import Any

from fastai.callback import progress
from fastai.callback.progress import CSVLogger
from fastprogress.fastprogress import MasterBar, ProgressBar

from ddip.apps.fastai import patches, ranks


class _Quiet(ProgressBar):
    """A bar that nobody sees."""

    def update(self, val: int) -> None:
        pass


class _QuietMaster(MasterBar):
    """The bar above it."""

    def __init__(self, gen: Any, total: int | None = None, **kwargs: Any) -> None:
        super().__init__(gen, _Quiet, total)

    def write(self, *args: Any, **kwargs: Any) -> None:
        pass

    def update_graph(self, *args: Any, **kwargs: Any) -> None:
        pass


def mend() -> None:
    """Let one rank show, and write, what is the same on all."""
    bar, master, before_fit = progress.progress_bar, progress.master_bar, CSVLogger.before_fit

    @functools.wraps(bar)
    def progress_bar(gen: Any, *args: Any, **kwargs: Any) -> Any:
        return _Quiet(gen, *args, **kwargs) if ranks.is_quiet() else bar(gen, *args, **kwargs)

    @functools.wraps(master)
    def master_bar(gen: Any, *args: Any, **kwargs: Any) -> Any:
        return _QuietMaster(gen, *args, **kwargs) if ranks.is_quiet() else master(gen, *args, **kwargs)

    @functools.wraps(before_fit)
    def open_file(self: CSVLogger) -> None:
        if not ranks.is_quiet() or hasattr(self.learn, "gather_preds"):
            before_fit(self)
        else:
            self.file = tempfile.TemporaryFile("w")  # noqa: SIM115 - after_fit closes it
            self.old_logger, self.learn.logger = self.learn.logger, self._write_line

    patches.put_everywhere("progress_bar", bar, progress_bar)
    patches.put_everywhere("master_bar", master, master_bar)
    patches.put(CSVLogger, "before_fit", open_file)
