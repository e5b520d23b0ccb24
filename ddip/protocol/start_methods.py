"""Advice on processes that multiprocessing does not fork, and which therefore lack all that cells have defined."""

from __future__ import annotations

NOT_FORKED = (
    "workers that are not forked (the default since Python 3.14) cannot find classes and functions of cells: pass "
    'multiprocessing_context="fork" to the loader (fastai: multiprocessing.set_start_method("fork", force=True)), or '
    "put them in a module"
)
