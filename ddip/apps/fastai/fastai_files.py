"""Files: fetched once on each host, written once. And what a learner takes along when it goes to the notebook.

Mends, in fastai 2.8.12: each rank downloads, or tries to, for itself; in a cell on one rank that is not rank 0,
``save`` and ``export`` write nothing, and say nothing; all ranks train SentencePiece into the same files. A recorder
leaves its losses behind when it is pickled. In fastcore 2.2.39: of a file of settings that one rank writes for the
first time, another may find the empty beginning.
"""

from __future__ import annotations

import functools
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


def _written(method: Callable[..., Any]) -> Callable[..., Any]:
    """Of the ranks that run the cell, the first one writes."""

    @functools.wraps(method)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = current.ranks()
        if current.is_everywhere() or not here or min(here) == 0 or min(here) != rank_exchange.rank():
            return method(self, *args, **kwargs)
        before = os.environ["RANK"]
        os.environ["RANK"] = "0"  # by which fastai decides
        try:
            return method(self, *args, **kwargs)
        finally:
            os.environ["RANK"] = before

    return write


_exporting = False
"""Does `Learner.export` run?"""


def _without_records(export: Callable[..., Any]) -> Callable[..., Any]:
    """What is exported is for inference."""

    @functools.wraps(export)
    def export_plain(self: Learner, *args: Any, **kwargs: Any) -> Any:
        global _exporting
        _exporting = True
        try:
            return export(self, *args, **kwargs)
        finally:
            _exporting = False

    return export_plain


def _with_records(self: Recorder) -> dict[str, Any]:
    left_out = () if _exporting else self._stateattrs
    return {**Stateful.__getstate__(self), **{name: vars(self)[name] for name in left_out if name in vars(self)}}


def _made_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of functions that leave files, and return nothing."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        what = f"{function.__name__}({', '.join(map(str, args[:1]))})"
        return once_per_host(what, lambda: function(*args, **kwargs), lambda: None)

    return make


def _trained_once(setup: Callable[..., Any]) -> Callable[..., Any]:
    """Of a tokenizer that learns its pieces of words: all ranks would write the same files, and read each other's."""

    @functools.wraps(setup)
    def train_once(self: core.SentencePieceTokenizer, items: Any, rules: Any = None) -> Any:
        def load() -> Any:
            from sentencepiece import SentencePieceProcessor

            model = self.cache_dir / "spm.model"
            self.tok = SentencePieceProcessor(model_file=str(model))
            return {"sp_model": model}

        if self.tok is not None:
            return setup(self, items, rules)
        return once_per_host(f"pieces in {self.cache_dir}", lambda: setup(self, items, rules), load)

    return train_once


def _written_at_once(save: Callable[..., None]) -> Callable[..., None]:
    """Of ``save_config_file``: who reads the file finds all of it, or none."""

    @functools.wraps(save)
    def save_at_once(file: Any, *args: Any, **kwargs: Any) -> None:
        beside = f"{file}.{os.getpid()}"
        save(beside, *args, **kwargs)
        os.replace(beside, file)

    return save_at_once


def apply() -> None:
    """Fetch and write once."""
    get, hub, tokenize = FastDownload.get, torch.hub.download_url_to_file, core._tokenize_files

    @functools.wraps(get)
    def get_once(self: FastDownload, url: str, extract_key: str = "data", force: bool = False) -> Any:
        return once_per_host(url, lambda: get(self, url, extract_key, force), lambda: get(self, url, extract_key))

    @functools.wraps(hub)
    def download_once(url: str, dst: str, *args: Any, **kwargs: Any) -> None:
        once_per_host(url, lambda: hub(url, dst, *args, **kwargs), lambda: None)

    @functools.wraps(tokenize)
    def tokenize_once(*args: Any, **kwargs: Any) -> Any:
        def found() -> Any:
            return tokenize(*args, **{**kwargs, "skip_if_exists": True})

        return once_per_host(f"tokens of {args[2]}", lambda: tokenize(*args, **kwargs), found)

    patches.patch(xtras, "save_config_file", _written_at_once(xtras.save_config_file))
    patches.patch(FastDownload, "get", get_once)
    patches.patch(torch.hub, "download_url_to_file", download_once)
    patches.patch(core, "_tokenize_files", tokenize_once)
    patches.patch(core.SentencePieceTokenizer, "setup", _trained_once(core.SentencePieceTokenizer.setup))
    vision = sys.modules.get("fastai.vision.utils")
    for name in ("download_images", "resize_images") if vision is not None else ():
        patches.replace_imports(name, getattr(vision, name), _made_once(getattr(vision, name)))
    patches.patch(Learner, "save", _written(Learner.save))
    patches.patch(Learner, "export", _written(_without_records(Learner.export)))
    patches.patch(Recorder, "__getstate__", _with_records)
    patches.patch(TextLearner, "save_encoder", _written(TextLearner.save_encoder))
