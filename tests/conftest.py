"""Options of the test run, and how many processes share it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--spawn``: the same tests with engines that are spawned, as where processes cannot be forked."""
    parser.addoption("--golden", action="store_true", help="write the golden files of the system tests anew")
    parser.addoption("--spawn", action="store_true", help="spawn every engine instead of forking it")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes run all tests, or all of a folder; a choice runs in this one."""
    folders = {HERE, *(HERE / name for name in ("cluster", "frameworks", "system"))}
    whole = folders & {Path(arg).resolve() for arg in config.args}
    return 2 if whole and not (config.option.keyword or config.option.lf) else 0


@pytest.fixture(scope="session", autouse=True)
def the_stop_button_works() -> None:
    """A shell that runs the tests in the background has them ignore SIGINT; a notebook's kernel does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where processes share the tests: what uses one notebook, or one group of its module, is done by one of them, and
    decisions come last, which take the least time."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: (item.path.parent.name == "unit", _place(item) != "notebook", item.path.name))
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_place(item)))


def _place(item: pytest.Item) -> str:
    """What the test has in common with others that is dear to start."""
    for name in ("notebook", "bare_notebook"):
        if f"shared_{name}" in getattr(item, "fixturenames", ()):
            return name
    return "fastai" if item.path.name.startswith("test_fastai") else item.path.name  # one warm process imports it
