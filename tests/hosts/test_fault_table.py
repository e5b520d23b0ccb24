"""All faults of the table in docs/hosts.md, during all actions; each takes some minutes."""

from __future__ import annotations

import pytest

from .fault_table import ACTIONS, FAULTS, run_action
from .network import Network


@pytest.mark.long
@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("fault", FAULTS)
def test_no_fault_hangs_or_costs_a_healthy_rank(hosts: Network, fault: str, action: str) -> None:
    outcome = run_action(hosts, fault, action)
    assert not any(word in outcome for word in ("HANG", "LOST")), outcome
