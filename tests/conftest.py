"""Options of the test run, and the number of processes that share it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import zlib
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from .cluster import meanwhile

HERE = Path(__file__).parent
TORCH = tuple(map(int, metadata.version("torch").split(".")[:2]))
NO_FULLY_SHARD = re.compile("(cannot import name|has no attribute) 'fully_shard'")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; ``--spawn`` tests systems on which processes cannot be forked."""
    parser.addoption("--golden", action="store_true", help="write the golden files of the system tests")
    parser.addoption("--every-line", action="store_true", help="test a death at each line of a save, not only at a few")
    parser.addoption("--half", action="store_true", help="run half of the grids, but all pages and notebooks")
    parser.addoption("--spawn", action="store_true", help="spawn every engine instead of forking it")
    parser.addoption("--no-native", action="store_true", help="turn off the native mechanisms")


def pytest_configure(config: pytest.Config) -> None:
    """Turn off native mechanisms in this process and its children if ``--no-native`` is given."""
    if config.getoption("--no-native"):
        os.environ["DDIP_NATIVE"] = "0"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Use two processes for all tests or a whole folder, and none for a selection."""
    folders = {HERE, *(HERE / name for name in ("cluster", "frameworks", "system"))}
    whole = folders & {Path(arg).resolve() for arg in config.args}
    return 2 if whole and not (config.option.keyword or config.option.lf) else 0


@pytest.fixture(scope="session", autouse=True)
def the_stop_button_works() -> None:
    """Restore SIGINT's handler: a shell ignores SIGINT in background jobs, a notebook's kernel does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Skip a test whose fixtures use ``fully_shard``, if torch has none."""
    with _skipped_without_fully_shard():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """End a test's background actions when it ends; skip it if it uses ``fully_shard`` and torch has none."""
    try:
        with _skipped_without_fully_shard():
            yield
    finally:
        meanwhile.end_all()


@contextlib.contextmanager
def _skipped_without_fully_shard() -> Iterator[None]:
    """Turn the error of a cell that finds no ``fully_shard`` into a skip; before torch 2.6 it was a private name."""
    try:
        yield
    except Exception as error:
        if TORCH < (2, 6) and NO_FULLY_SHARD.search(str(error)):
            pytest.skip("needs torch.distributed.fsdp.fully_shard, which torch has since 2.6")
        raise


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order and group the tests for the processes that share them.

    Tests that share a notebook, or a group of their module, run in one process. Unit tests come last, because they are
    shortest. With ``--half``, half of the grids is left out.
    """
    if config.getoption("--no-native"):
        for item in items:
            if names := sorted({name for mark in item.iter_markers("native") for name in mark.args}):
                item.add_marker(pytest.mark.skip(f"needs {', '.join(names)}, which --no-native turns off"))
    if config.getoption("--half"):
        left_out = [item for item in items if _is_of_other_half(item)]
        items[:] = [item for item in items if not _is_of_other_half(item)]
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: (item.path.parent.name == "unit", _shared_resource(item) != "notebook", item.path.name)
        )
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_shared_resource(item)))


def _is_of_other_half(item: pytest.Item) -> bool:
    """Return True if the test is a grid in the half that does not run, decided by its name."""
    if item.path.stem in ("test_pages", "test_notebooks") or item.get_closest_marker("grid") is None:
        return False
    return zlib.crc32(item.name.encode()) % 2 == 1


def _shared_resource(item: pytest.Item) -> str:
    """Return the name of the expensive resource that a test shares with others."""
    for name in ("notebook", "bare_notebook"):
        if f"shared_{name}" in getattr(item, "fixturenames", ()):
            return name
    return "fastai" if item.path.name.startswith("test_fastai") else item.path.name  # one preload process imports it
