"""Files: fetched once on each host, written once. And what a learner takes along when it goes to the notebook.

Mends, in fastai 2.8.12: each rank downloads, or tries to, for itself; in a cell on one rank that is not rank 0,
``save`` and ``export`` write nothing, and say nothing. A recorder leaves its losses behind when it is pickled.
"""

from __future__ import annotations

import functools
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from fastai.learner import Learner, Recorder
from fastai.text.learner import TextLearner
from fastcore.basics import Stateful
from fastdownload import FastDownload

from ddip.apps.fastai import patches, ranks
from ddip.rank import current
from ddip.rank.c10d import store

WAIT_SECONDS = 0.05
_calls: Counter[tuple[str, str]] = Counter()


def once_a_host(what: str, fetch: Callable[[], Any]) -> Any:
    """Have the first rank of this host `fetch`; the others wait until it has, and raise what it has raised.

    The first rank waits for nobody.
    """
    if not ranks.together():
        return fetch()
    call = (current.name(), what)
    _calls[call] += 1
    key = f"ddip once {current.name()} {os.environ['GROUP_RANK']} {_calls[call]} {what}"
    first = ranks.is_first_here()
    if not first:
        _wait_for(key, what)
    outcome = "ok"
    try:
        with ranks.each_by_itself():
            return fetch()
    except BaseException as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    finally:
        if first:
            store().set(key, outcome)


def _wait_for(key: str, what: str) -> None:
    while not store().check([key]):
        time.sleep(WAIT_SECONDS)
    outcome = store().get(key).decode()
    if outcome != "ok":
        raise RuntimeError(f"the first rank of this host failed to get {what}: {outcome}")


def _written(method: Callable[..., Any]) -> Callable[..., Any]:
    """Of the ranks that run the cell, the first one writes."""

    @functools.wraps(method)
    def write(self: Any, *args: Any, **kwargs: Any) -> Any:
        here = current.ranks()
        if current.is_everywhere() or not here or min(here) == 0 or min(here) != ranks.rank():
            return method(self, *args, **kwargs)
        before = os.environ["RANK"]
        os.environ["RANK"] = "0"  # by which fastai decides
        try:
            return method(self, *args, **kwargs)
        finally:
            os.environ["RANK"] = before

    return write


_exporting = False


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


def mend() -> None:
    """Fetch and write once."""
    get, hub = FastDownload.get, torch.hub.download_url_to_file

    @functools.wraps(get)
    def get_once(self: FastDownload, url: str, *args: Any, **kwargs: Any) -> Any:
        return once_a_host(url, lambda: get(self, url, *args, **kwargs))

    @functools.wraps(hub)
    def download_once(url: str, dst: str, *args: Any, **kwargs: Any) -> None:
        def fetch() -> None:
            if ranks.is_first_here() or not os.path.exists(dst):
                hub(url, dst, *args, **kwargs)

        once_a_host(url, fetch)

    patches.put(FastDownload, "get", get_once)
    patches.put(torch.hub, "download_url_to_file", download_once)
    patches.put(Learner, "save", _written(Learner.save))
    patches.put(Learner, "export", _written(_without_records(Learner.export)))
    patches.put(Recorder, "__getstate__", _with_records)
    patches.put(TextLearner, "save_encoder", _written(TextLearner.save_encoder))
