"""The table of faults and actions in docs/hosts.md: some of its cells, and all as long tests that take some minutes."""

from __future__ import annotations

import pytest

from .fault_table import ACTIONS, FAULTS, run_action
from .network import Network

CHEAP = {"link cut for 2 s": "collective", "connections of sshd ended": "repair", "disk full": "start"}
"""Faults, each with an action."""


@pytest.mark.parametrize("fault", CHEAP)
def test_a_cell_of_the_table_keeps_its_promises(hosts: Network, fault: str) -> None:
    assert_kept(run_action(hosts, fault, CHEAP[fault]))


@pytest.mark.long
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_hangs_or_costs_a_healthy_rank(hosts: Network, fault: str, action: str) -> None:
    assert_kept(run_action(hosts, fault, action))


def assert_kept(outcome: str) -> None:
    """Assert that a cell of the table has no hang and no lost healthy rank; the fixture checks what is left."""
    assert not any(word in outcome for word in ("HANG", "LOST")), outcome
