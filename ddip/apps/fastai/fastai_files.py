"""Download files once per host, write them once, and keep a recorder's losses when a learner goes to the notebook.

Mends, in fastai 2.8.12: each rank tries to download for itself; in a cell on one rank other than rank 0, ``save`` and
``export`` write nothing, without an error; all ranks train SentencePiece into the same files; a pickled recorder lacks
its losses. In fastcore 2.2.39: while one rank writes a settings file for the first time, another may read it empty.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from fastai.learner import Learner, Recorder
from fastai.text import core
from fastai.text.learner import TextLearner
from fastcore import xtras
from fastcore.basics import Stateful
from fastdownload import FastDownload

from ddip.apps import patches, rank_exchange
from ddip.apps.once import once_per_host
from ddip.rank.runtime import current


def _write_on_first_rank(method: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `method` so that the first rank that runs the cell writes, even if it is not rank 0."""
    cell_ranks = current.cell_ranks()
    if current.is_everywhere() or not cell_ranks or min(cell_ranks) == 0 or min(cell_ranks) != rank_exchange.rank():
        return method(*args, **kwargs)
    before = os.environ["RANK"]
    os.environ["RANK"] = "0"  # fastai writes on rank 0 only
    try:
        return method(*args, **kwargs)
    finally:
        os.environ["RANK"] = before


_exporting = False
"""True while ``Learner.export`` runs."""


def _export_without_records(export: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call `export` without a recorder's losses, which inference does not need."""
    global _exporting
    _exporting = True
    try:
        return _write_on_first_rank(export, *args, **kwargs)
    finally:
        _exporting = False


def _state_with_records(self: Recorder) -> dict[str, Any]:
    left_out = () if _exporting else self._stateattrs
    return {**Stateful.__getstate__(self), **{name: vars(self)[name] for name in left_out if name in vars(self)}}


def _run_once_per_host(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function that writes files and returns nothing once per host."""
    what = f"{function.__name__}({', '.join(map(str, args[:1]))})"
    return once_per_host(what, lambda: function(*args, **kwargs), lambda: None)


def _train_once_per_host(
    setup: Callable[..., Any], self: core.SentencePieceTokenizer, items: Any, rules: Any = None
) -> Any:
    """Train a tokenizer once per host, since otherwise all ranks would write the same files."""

    def load_tokenizer() -> Any:
        from sentencepiece import SentencePieceProcessor

        model = self.cache_dir / "spm.model"
        self.tok = SentencePieceProcessor(model_file=str(model))
        return {"sp_model": model}

    if self.tok is not None:
        return setup(self, items, rules)
    return once_per_host(f"pieces in {self.cache_dir}", lambda: setup(self, items, rules), load_tokenizer)


def _save_atomically(save: Callable[..., None], file: Any, *args: Any, **kwargs: Any) -> None:
    """Save a settings file atomically: readers find all of it or none."""
    temporary = f"{file}.{os.getpid()}"
    save(temporary, *args, **kwargs)
    os.replace(temporary, file)


def _get_once(
    get: Callable[..., Any], self: FastDownload, url: str, extract_key: str = "data", force: bool = False
) -> Any:
    return once_per_host(url, lambda: get(self, url, extract_key, force), lambda: get(self, url, extract_key))


def _download_once(download: Callable[..., None], url: str, *args: Any, **kwargs: Any) -> None:
    once_per_host(url, lambda: download(url, *args, **kwargs), lambda: None)


def _tokenize_once(tokenize: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    def load_tokenized() -> Any:
        return tokenize(*args, **{**kwargs, "skip_if_exists": True})

    return once_per_host(f"tokens of {args[2]}", lambda: tokenize(*args, **kwargs), load_tokenized)


def apply_patches() -> None:
    """Patch fastai and fastcore to download once per host, and to write once."""
    home = sys.modules[xtras.save_config_file.__module__]  # fastcore 1 defines and uses it in fastcore.foundation
    patches.set_attribute(home, "save_config_file", patches.wrap_call(xtras.save_config_file, _save_atomically))
    patches.wrap_function(FastDownload, "get", _get_once)
    patches.wrap_function(torch.hub, "download_url_to_file", _download_once)
    patches.wrap_function(core, "_tokenize_files", _tokenize_once)
    patches.wrap_function(core.SentencePieceTokenizer, "setup", _train_once_per_host)
    vision = sys.modules.get("fastai.vision.utils")
    for name in ("download_images", "resize_images") if vision is not None else ():
        function = getattr(vision, name)
        patches.replace_imports(name, function, patches.wrap_call(function, _run_once_per_host))
    patches.wrap_function(Learner, "save", _write_on_first_rank)
    patches.wrap_function(Learner, "export", _export_without_records)
    patches.set_attribute(Recorder, "__getstate__", _state_with_records)
    patches.wrap_function(TextLearner, "save_encoder", _write_on_first_rank)
