"""Run downloads, ``load_dataset`` and ``Dataset.map`` of data in files once per host, while the other ranks wait.

Under torchrun, each rank does this itself unless the program uses ``main_process_first``. Here, the other ranks read
the result of the host's first rank from the cache, or raise its error. Each rank maps data in memory itself.
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
"""Seconds to wait for the host's first rank to begin; then a rank does the work itself.

The first rank may be doing something else, and waiting for this rank.
"""
FORCED = ("force_download", "download_mode")
DOWNLOADS = {
    "huggingface_hub.file_download": "hf_hub_download",
    "huggingface_hub._snapshot_download": "snapshot_download",
}


def apply_patches() -> None:
    """Patch the libraries to do this work once per host."""
    for path, name in DOWNLOADS.items():
        if path in sys.modules:
            download = getattr(sys.modules[path], name)
            patches.replace_imports(name, download, patches.wrap_call(download, _download_once))
    datasets = sys.modules.get("datasets")
    if datasets is not None:
        load = datasets.load_dataset
        patches.replace_imports("load_dataset", load, patches.wrap_call(load, _load_once))
        patches.wrap_function(datasets.Dataset, "map", functools.partial(_map_once, datasets.is_caching_enabled))


def _run_once(kind: str, what: str, fetch: Callable[[], Any], found: Callable[[], Any]) -> Any:
    if threading.current_thread() is not threading.main_thread():  # threads of different ranks have no common order
        return fetch()
    return once_per_host(f"{kind}({what})", fetch, found, PATIENCE, same_error=True, kind=kind)


def _download_once(download: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True

    def load_cached() -> Any:
        cached = {name: value for name, value in kwargs.items() if name not in FORCED}
        try:
            return download(*args, **{**cached, "local_files_only": True})
        except FileNotFoundError:  # for example in another cache
            return download(*args, **kwargs)

    if kwargs.get("dry_run") or kwargs.get("local_files_only"):
        return download(*args, **kwargs)
    return _run_once(download.__name__, f"{args[:2]}", lambda: download(*args, **kwargs), load_cached)


def _load_once(load: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    __tracebackhide__ = True
    if kwargs.get("streaming"):
        return load(*args, **kwargs)
    cached = {name: value for name, value in kwargs.items() if name not in FORCED}
    return _run_once("load_dataset", f"{args[:2]}", lambda: load(*args, **kwargs), lambda: load(*args, **cached))


def _map_once(
    is_caching_enabled: Callable[[], bool], map_original: Callable[..., Any], self: Any, /, *args: Any, **kwargs: Any
) -> Any:
    __tracebackhide__ = True
    in_file = kwargs.get("cache_file_name") is not None or (self.cache_files and is_caching_enabled())
    if not in_file or kwargs.get("keep_in_memory"):
        return map_original(self, *args, **kwargs)
    cached = {**kwargs, "load_from_cache_file": True}
    return _run_once(
        "Dataset.map", "", lambda: map_original(self, *args, **kwargs), lambda: map_original(self, *args, **cached)
    )
