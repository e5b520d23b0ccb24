"""The hosts, for tests that run in nb, and the proof that nothing is left on any of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import pytest

from ..cluster.conftest import own_ipython_folder, warmed_up  # noqa: F401
from ..cluster.leftovers import assert_nothing_left, family_of, wait_until
from .network import Network, not_here
from .slurm import Slurm


@pytest.fixture(scope="session", autouse=True)
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """All hosts, plain and up. Without them there is nothing to be tested here."""
    if reason := not_here():
        pytest.skip(reason)
    request.getfixturevalue("own_ipython_folder")
    network = Network()
    yield network
    network.close()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_of_the_module(network: Network) -> Iterator[None]:
    """For groups that the tests of a module share."""
    with _nothing_left(network):
        yield


@pytest.fixture(autouse=True)
def hosts(network: Network) -> Iterator[Network]:
    """`hosts["h1"]` and the others. After the test their links are mended, they are up, and nothing is left on them
    that was not there before; a host that has booted meanwhile has new folders."""
    with _nothing_left(network):
        yield network


@pytest.fixture
def slurm(hosts: Network) -> Iterator[Slurm]:
    """Slurm on h1 and h2, which boot anew when it stops."""
    slurm = Slurm(hosts)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


@pytest.fixture
def three_nodes(hosts: Network) -> Iterator[Slurm]:
    """The same on h1, h2 and h3."""
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
    left: dict[tuple[str, object], str] = {}

    def none() -> bool:
        left.clear()
        left.update({key: text for key, text in network.contents().items() if key not in before})
        for process in family_of(os.getpid()):  # it may keep its preload process: assert_nothing_left
            left.pop(("nb", process.pid), None)
        return not left

    network.reset()
    try:
        wait_until(none, 15, "the end of all that was started on the hosts")
    except AssertionError:
        for name in network.keys() - {"nb"}:  # the next test has no part in it
            network[name].boot()
        pytest.fail("left on the hosts:\n" + "\n".join(left.values()))
    assert_nothing_left(os.getpid())
