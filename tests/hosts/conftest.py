"""The hosts, for tests that run on nb, and the proof that nothing is left on any of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from ..cluster.conftest import own_ipython_folder, warmed_up  # noqa: F401
from ..cluster.leftovers import assert_nothing_left, family_of, wait_until
from .network import Network, why_not_on_nb
from .slurm import Slurm


@pytest.fixture(scope="session", autouse=True)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Yield the running hosts, with default options; skip the tests if there are none."""
    if reason := why_not_on_nb():
        pytest.skip(reason)
    request.getfixturevalue("own_ipython_folder")
    network = Network()
    yield network
    network.close()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_of_the_module(network: Network) -> Iterator[None]:
    """Prove that nothing is left of the groups that the tests of a module share."""
    with _nothing_left(network):
        yield


@pytest.fixture(autouse=True)
def hosts(network: Network) -> Iterator[Network]:
    """Yield the hosts, such as `hosts["h1"]`, and prove that a test leaves nothing on them.

    After the test all links work and all hosts are up. A host that has booted meanwhile has new folders.
    """
    with _nothing_left(network):
        yield network


@pytest.fixture
def slurm(hosts: Network) -> Iterator[Slurm]:
    """Run Slurm on h1 and h2, which boot again when it stops."""
    slurm = Slurm(hosts)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture
def three_nodes(hosts: Network) -> Iterator[Slurm]:
    """Run Slurm on h1, h2 and h3."""
    slurm = Slurm(hosts, ("h1", "h2", "h3"))
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@contextlib.contextmanager
def _nothing_left(network: Network) -> Iterator[None]:
    before = network.contents()
    yield
    leftovers: dict[tuple[str, object], str] = {}

    def is_clean() -> bool:
        leftovers.clear()
        leftovers.update({key: text for key, text in network.contents().items() if key not in before})
        for process in family_of(
            os.getpid()
        ):  # this process may keep its preload process; assert_nothing_left checks the others
            leftovers.pop(("nb", process.pid), None)
        return not leftovers

    network.restore_hosts()
    try:
        wait_until(is_clean, 15, "the end of all that was started on the hosts")
    except AssertionError:
        for name in network.keys() - {"nb"}:  # do not fail the next test as well
            network[name].boot()
        pytest.fail("left on the hosts:\n" + "\n".join(leftovers.values()))
    assert_nothing_left(os.getpid())
