"""Options of the test run, and the number of processes that share it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import zlib
from collections.abc import Generator, Iterator
from importlib import metadata
from pathlib import Path

import pytest

from .cluster import meanwhile

sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # jsonschema does without it; its import takes 4 s

HERE = Path(__file__).parent
TORCH = tuple(map(int, metadata.version("torch").split(".")[:2]))
PUBLIC_SINCE = {"fully_shard": "2.6", "DTensor": "2.5", "Shard": "2.5", "init_sync": "2.5"}
"""Names of torch that the tests use, and the first version in which they are public."""
NOT_SAMPLED = {
    "system": "below classic compile day debugger dist doors gpu_machine headless installs kept_page lessons mcp "
    "self_harm stopped_changes strangers watch",
    "frameworks": "debugger deepspeed resume written",
    "hosts": "attach diprun kept_hosts objects peek rest slurm_groups slurm_lost",
}
"""Files of these folders that ``--sample`` leaves out. It is by file, since tests of one page follow each other."""
MAKE_OPTIMIZERS = (
    "test_agreement",
    "test_dist_state_contents",
    "test_holders",
    "test_object_graphs",
    "test_pickling",
    "test_walk",
)
"""Files whose tests make optimizers in their own process, which then imports torch._dynamo in 4 s."""
MISSING = re.compile(f"(?:import name|no attribute|keyword argument) '({'|'.join(PUBLIC_SINCE)})'")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options; ``--spawn`` tests systems on which processes cannot be forked."""
    parser.addoption("--golden", action="store_true", help="write the golden files of the system tests")
    parser.addoption("--every-line", action="store_true", help="test a death at each line of a save, not only at a few")
    parser.addoption("--sample", action="store_true", help="run a sample of system tests, frameworks, hosts and grids")
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
    return 2 if whole and not (config.option.keyword or getattr(config.option, "lf", False)) else 0


@pytest.fixture(scope="session", autouse=True)
def the_stop_button_works() -> None:
    """Restore SIGINT's handler: a shell ignores SIGINT in background jobs, a notebook's kernel does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """Skip a test whose fixtures use a name that torch lacks."""
    with _skipped_on_old_torch():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """End a test's background actions when it ends; skip it if it uses a name that torch lacks."""
    try:
        with _skipped_on_old_torch():
            yield
    finally:
        meanwhile.end_all()


@contextlib.contextmanager
def _skipped_on_old_torch() -> Iterator[None]:
    """Turn an error about a name that torch before 2.6 lacks into a skip, also if a cell raised it."""
    try:
        yield
    except Exception as error:
        lacking = MISSING.search(str(error)) if TORCH < (2, 6) else None
        if lacking:
            pytest.skip(f"needs {lacking[1]}, which torch has since {PUBLIC_SINCE[lacking[1]]}")
        raise


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order and group the tests for the processes that share them.

    Tests that share a notebook, or a group of their module, run in one process. Unit tests come last, because they are
    shortest. With ``--sample``, tests of hosts, front ends and frameworks, and grids, are left out.
    """
    if config.getoption("--no-native"):
        for item in items:
            if names := sorted({name for mark in item.iter_markers("native") for name in mark.args}):
                item.add_marker(pytest.mark.skip(f"needs {', '.join(names)}, which --no-native turns off"))
    if config.getoption("--sample"):
        left_out = [item for item in items if _is_outside_sample(item)]
        items[:] = [item for item in items if not _is_outside_sample(item)]
        config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workerinput"):
        items.sort(
            key=lambda item: (item.path.parent.name == "unit", _shared_resource(item) != "notebook", item.path.name)
        )
        for item in items:
            item.add_marker(pytest.mark.xdist_group(_shared_resource(item)))


def _is_outside_sample(item: pytest.Item) -> bool:
    """Return True if ``--sample`` leaves the test out.

    It leaves out some files, all but the first variant of a test of hosts, five of six scripts of the frameworks'
    table, and most grids, decided by their names.
    """
    folder, name = item.path.parent.name, item.path.stem.removeprefix("test_")
    if name in NOT_SAMPLED.get(folder, "").split():
        return True
    indices = item.callspec.indices if hasattr(item, "callspec") else {}
    if folder == "hosts":
        return any(indices.values())
    if (folder, name) == ("frameworks", "table"):
        return indices["script"] % 6 != 0
    grids = list(item.iter_markers("grid"))  # one of the test, and one of its parameter
    if folder in NOT_SAMPLED or not grids:
        return False
    is_example = all(grid.kwargs.get("in_ci") for grid in grids) or item.path.stem in ("test_pages", "test_notebooks")
    return zlib.crc32(item.name.encode()) % (16 if is_example else 32) != 0


def _shared_resource(item: pytest.Item) -> str:
    """Return the name of the expensive resource that a test shares with others."""
    for name in ("notebook", "bare_notebook"):
        if f"shared_{name}" in getattr(item, "fixturenames", ()):
            return name
    if item.path.stem in MAKE_OPTIMIZERS:
        return "optimizers"
    return "fastai" if item.path.name.startswith("test_fastai") else item.path.name  # one preload process imports it
