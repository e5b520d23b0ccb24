"""Downloads, ``load_dataset`` and ``Dataset.map`` of data in files: once on each host, while the other ranks wait.

Under torchrun each rank does it for itself, or each program says ``main_process_first``. The others read what the first
rank of the host has left in the cache, and raise what it has raised. Data in memory is mapped by each rank.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any

from ddip.apps import patches
from ddip.apps.once import once_per_host

PATIENCE = 20.0
"""Seconds until a rank does it itself, where the first one of the host does something else, and may wait for it."""
FORCED = ("force_download", "download_mode")
DOWNLOADS = {
    "huggingface_hub.file_download": "hf_hub_download",
    "huggingface_hub._snapshot_download": "snapshot_download",
}


def apply() -> None:
    """Divide them."""
    for path, name in DOWNLOADS.items():
        if path in sys.modules:
            download = getattr(sys.modules[path], name)
            patches.replace_imports(name, download, _downloaded(download))
    datasets = sys.modules.get("datasets")
    if datasets is not None:
        patches.replace_imports("load_dataset", datasets.load_dataset, _loaded(datasets.load_dataset))
        patches.patch(datasets.Dataset, "map", _mapped(datasets.Dataset.map, datasets.is_caching_enabled))


def _once(kind: str, what: str, fetch: Callable[[], Any], found: Callable[[], Any]) -> Any:
    if threading.current_thread() is not threading.main_thread():  # nothing is in order between threads of two ranks
        return fetch()
    return once_per_host(f"{kind}({what})", fetch, found, PATIENCE, same_error=True, kind=kind)


def _downloaded(download: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(download)
    def download_once(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True

        def found() -> Any:
            cached = {name: value for name, value in kwargs.items() if name not in FORCED}
            try:
                return download(*args, **{**cached, "local_files_only": True})
            except FileNotFoundError:  # in another cache, say
                return download(*args, **kwargs)

        if kwargs.get("dry_run") or kwargs.get("local_files_only"):
            return download(*args, **kwargs)
        return _once(download.__name__, f"{args[:2]}", lambda: download(*args, **kwargs), found)

    return download_once


def _loaded(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_once(*args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        if kwargs.get("streaming"):
            return load(*args, **kwargs)
        cached = {name: value for name, value in kwargs.items() if name not in FORCED}
        return _once("load_dataset", f"{args[:2]}", lambda: load(*args, **kwargs), lambda: load(*args, **cached))

    return load_once


def _mapped(apply_to: Callable[..., Any], is_caching_enabled: Callable[[], bool]) -> Callable[..., Any]:
    @functools.wraps(apply_to)
    def map_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        __tracebackhide__ = True
        in_file = kwargs.get("cache_file_name") is not None or (self.cache_files and is_caching_enabled())
        if not in_file or kwargs.get("keep_in_memory"):
            return apply_to(self, *args, **kwargs)
        cached = {**kwargs, "load_from_cache_file": True}
        return _once(
            "Dataset.map", "", lambda: apply_to(self, *args, **kwargs), lambda: apply_to(self, *args, **cached)
        )

    return map_once
