"""Options of the test run, and how many processes share it."""

from __future__ import annotations

import os
import signal
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest

from .cluster import meanwhile

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; ``--spawn`` is for what runs where processes cannot be forked."""
    parser.addoption("--golden", action="store_true", help="write the golden files of the system tests anew")
    parser.addoption("--every-line", action="store_true", help="a death at each line of a save, and not at a few")
    parser.addoption("--half", action="store_true", help="of the grids half, but all pages and notebooks")
    parser.addoption("--spawn", action="store_true", help="spawn every engine instead of forking it")
    parser.addoption("--no-native", action="store_true", help="turn off what reaches below public interfaces")


def pytest_configure(config: pytest.Config) -> None:
    """With ``--no-native``, set the variable that turns these mechanisms off in this process and all that it starts."""
    if config.getoption("--no-native"):
        os.environ["DDIP_NATIVE"] = "0"


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes run all tests, or all of a folder; a choice runs in this one."""
    folders = {HERE, *(HERE / name for name in ("cluster", "frameworks", "system"))}
    whole = folders & {Path(arg).resolve() for arg in config.args}
    return 2 if whole and not (config.option.keyword or config.option.lf) else 0


@pytest.fixture(scope="session", autouse=True)
def the_stop_button_works() -> None:
    """A shell that runs the tests in the background has them ignore SIGINT; a notebook's kernel does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """What a test has begun beside it ends with it."""
    try:
        yield
    finally:
        meanwhile.end_all()


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the tests: what uses one notebook, or one group of its module, is done by one of them, and
    decisions come last, which take the least time. With ``--half``, leave out half of the grids."""
    if config.getoption("--no-native"):
        for item in items:
            if names := sorted({name for mark in item.iter_markers("native") for name in mark.args}):
                item.add_marker(pytest.mark.skip(f"needs {', '.join(names)}, which --no-native turns off"))
    if config.getoption("--half"):
        left_out = [item for item in items if _is_of_other_half(item)]
        items[:] = [item for item in items if not _is_of_other_half(item)]
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (item.path.parent.name == "unit", _place(item) != "notebook", item.path.name))
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_place(item)))


def _is_of_other_half(item: pytest.Item) -> bool:
    """Is the test one of the grids, and not in the half that runs? Its name decides."""
    if item.path.stem in ("test_pages", "test_notebooks") or item.get_closest_marker("grid") is None:
        return False
    return zlib.crc32(item.name.encode()) % 2 == 1


def _place(item: pytest.Item) -> str:
    """What the test has in common with others that is dear to start."""
    for name in ("notebook", "bare_notebook"):
        if f"shared_{name}" in getattr(item, "fixturenames", ()):
            return name
    return "fastai" if item.path.name.startswith("test_fastai") else item.path.name  # one preload process imports it
