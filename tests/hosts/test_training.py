"""Training across hosts equals training on one host, to the last digit on the CPU, also after faults.

Four ranks, because the sum of two numbers is the same in any order.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import ddip
from ddip.errors import CellError, CellTimeout

from ..cluster.test_own_state import CODE
from .network import Network

RESULT = "result = losses, *outcome(), list(sampler)"
KILL_AGENT = """
import psutil, time
for process in psutil.process_iter():
    if "ddip.cluster.hosts.agent" in process.cmdline(): process.kill()
time.sleep(60)
"""
KILLS = {"a rank": ("die()", [3]), "an agent": (KILL_AGENT, [2, 3])}
"""What rank 3 does within step 6, and the ranks that this ends."""
TRAIN = """
def fail_in_step_6(*_):
    if rank == 3 and state.step == 5: exec(fatal)
make(replicas)
opt.register_step_pre_hook(fail_in_step_6)
train(0, 10)
"""


@pytest.fixture
def hosts(network: Network) -> Network:
    """Return the hosts; the tests share a group, so leftovers are checked once at the end."""
    return network


@pytest.fixture(scope="module")
def expected(network: Network) -> list[Any]:
    """Train four ranks on one host without a fault; return the result of each."""
    with ddip.Group(hosts="h1:4") as group:
        group.run(CODE)
        return train_undisturbed(group)


@pytest.fixture(scope="module")
def group(network: Network) -> Iterator[ddip.Group]:
    """Start two ranks on h1 and two on h2."""
    with ddip.Group(2, hosts="h1,h2") as group:
        group.run(CODE)
        yield group


def train_undisturbed(group: ddip.Group) -> list[Any]:
    group.run(f"make(replicas)\nlosses = train(0, 10)\n{RESULT}\nstate.forget()")
    return results(group)


def results(group: ddip.Group) -> list[Any]:
    return [group.pull(["result"], rank)["result"] for rank in range(group.world_size)]


def continue_training(group: ddip.Group) -> list[Any]:
    """Recreate the model, restore the last complete step, and train to step 10; return the result of each rank."""
    group.run(CODE)
    group.run("make(replicas)\nassert 0 < (first := state.restore()) < 10")
    group.run(f"losses = train(first, 10)\n{RESULT}\nstate.forget()")
    return results(group)


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    """Assert that losses, tensors, numbers and data order are equal on each rank; `found` may lack early losses."""
    for (losses, tensors, *others), (all_losses, all_tensors, *all_others) in zip(found, expected, strict=True):
        assert losses == all_losses[-len(losses) :]
        assert [tensor.tolist() for tensor in tensors] == [tensor.tolist() for tensor in all_tensors]
        assert others == all_others


def test_training_on_two_hosts_equals_training_on_one(group: ddip.Group, expected: list[Any]) -> None:
    assert_equal(train_undisturbed(group), expected)


@pytest.mark.parametrize("killed", KILLS)
def test_training_after_a_repair_equals_an_undisturbed_run(group: ddip.Group, expected: list[Any], killed: str) -> None:
    fatal, ended = KILLS[killed]
    with pytest.raises(CellError, match="RankEnded"):
        group.run(f"fatal = {fatal!r}\n{TRAIN}")
    assert group.repair() == ended
    assert_equal(continue_training(group), expected)


def test_training_after_a_partition_equals_an_undisturbed_run(
    group: ddip.Group, hosts: Network, expected: list[Any]
) -> None:
    group.run("make(replicas)\nlosses = train(0, 1)")  # torch fills DDP's buckets again after the first step
    with hosts["h1"].parted_from(hosts["h2"]), pytest.raises(CellTimeout):
        group.run("train(1, 10)", timeout=3)
    assert_equal(continue_training(group), expected)


def test_training_through_a_network_cut_equals_an_undisturbed_run(
    group: ddip.Group, hosts: Network, expected: list[Any]
) -> None:
    group.run("make(replicas)\nlosses = train(0, 5)")
    with contextlib.ExitStack() as until_end:
        hosts["h2"].cut()
        mend = threading.Timer(5, hosts["h2"].mend)
        mend.start()
        until_end.callback(mend.join)
        group.run(f"losses += train(5, 10)\n{RESULT}\nstate.forget()")
    assert_equal(results(group), expected)
