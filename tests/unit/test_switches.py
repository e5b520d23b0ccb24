"""Native mechanisms: what turns them off, and whether they work here."""

from __future__ import annotations

import sys
import threading

import pytest

from ddip.protocol import switches
from ddip.protocol.reports import Ends
from ddip.rank.native import lost_waits, self_tests, sockets

from .conftest import NewGroup
from .scripted import ScriptedEngine


@pytest.fixture(autouse=True)
def all_mechanisms_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Turn all mechanisms on, even with ``--no-native``; the tests turn off what they need."""
    monkeypatch.delenv("DDIP_NATIVE", raising=False)


def test_a_variable_turns_off_all_or_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert switches.find_off() == []
    monkeypatch.setenv("DDIP_NATIVE_PAUSE", "0")
    assert switches.find_off() == [switches.PAUSE]
    monkeypatch.setenv("DDIP_NATIVE", "0")
    assert switches.find_off() == [*switches.LOST]


def test_ranks_on_all_hosts_get_the_variables(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDIP_NATIVE_PAUSE", "0")
    assert new_group(2).engine(1).environment["DDIP_NATIVE_PAUSE"] == "0"


def test_one_rank_without_unblocking_turns_unblocking_off_everywhere(new_group: NewGroup) -> None:
    def script(engine: ScriptedEngine) -> None:
        engine.hello["native_off"] = [switches.SOCKETS] * (engine.number == 1)

    group = new_group(2, script=script)
    assert not group.ranks.can_unblock
    group.scripted.end_engine(group.members[0].engine, -9)
    group.repair()
    assert not group.ranks.can_unblock


def test_a_mechanism_whose_test_fails_is_off_in_that_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switches, "_failed", set[str]())
    monkeypatch.setattr(sockets, "can_shut_down", lambda: False)
    monkeypatch.setattr(sockets, "can_fence", lambda: 1 / 0)
    self_tests.turn_off_failing.__wrapped__()
    assert switches.find_off() == [switches.SOCKETS, switches.LISTENERS]


@pytest.mark.skipif(sys.platform != "linux", reason="the filter is Linux's")
def test_native_mechanisms_work_here_and_their_self_tests_detect_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sockets.can_shut_down() and sockets.can_fence() and lost_waits.is_possible()
    monkeypatch.setenv("DDIP_NATIVE", "0")
    assert not sockets.can_shut_down() and not sockets.can_fence() and lost_waits.find_waits() == {}


def test_a_loaded_machine_turns_nothing_off(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sockets.shut_down

    def shut_down_late(connections: list[Ends]) -> int:
        threading.Timer(1.2, real, [connections]).start()
        return len(connections)

    monkeypatch.setattr(sockets, "shut_down", shut_down_late)
    assert sockets.can_shut_down()


def test_the_start_lists_disabled_mechanisms(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    def script(engine: ScriptedEngine) -> None:
        engine.hello["native_off"] = [switches.PAUSE]

    group = new_group(2, script=script)
    assert f"DDIP_NATIVE or a failed self-test turned off: {switches.LOST[switches.PAUSE]}" in capsys.readouterr().err
    assert group.ranks.can_unblock
