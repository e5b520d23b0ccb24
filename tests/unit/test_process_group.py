"""The state of a process group after a cell: pure decisions."""

from __future__ import annotations

import errno
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from ddip.cluster.processes import on_host
from ddip.cluster.processes.host import HostLost, LocalHost
from ddip.group.process_group import network
from ddip.group.process_group.connections import between_ranks, has_unknown_connection
from ddip.group.process_group.meeting import RendezvousFactory
from ddip.group.process_group.network import Network
from ddip.group.process_group.process_group import ProcessGroupManager
from ddip.protocol import on_rank
from ddip.protocol.on_rank import RemoteCall

from .scripted import group_use


class _Ranks:
    """A stand-in for the ranks that `ProcessGroupManager.update_health` asks."""

    members: ClassVar[list[None]] = [None, None]
    cluster = SimpleNamespace(hosts=[LocalHost(Path())])

    def __init__(self) -> None:
        self.adopted = False

    def call_on_control_channel(self, ranks: Any, call: RemoteCall[Any], seconds: float = 0) -> dict[int, Any]:
        adopt = call.target == on_rank.adopt_group.target
        self.adopted = self.adopted or adopt
        return dict.fromkeys(ranks, True if adopt else None)


def cell_report(
    state: str = "ours", released: bool = False, begun: int = 0, sends: int = 0, changes: int | None = None
) -> dict[str, Any]:
    return {
        "state": state,
        "released": released,
        "begun": {"default cpu": group_use(begun, {"to 1": sends})},
        "groups": 1,
        "changes": {} if changes is None else {"model": changes},
        "rank": 0,
        "size": 2,
    }


OTHER = [cell_report("other"), {**cell_report("other"), "rank": 1}]


@pytest.mark.parametrize(
    ("reports", "failed", "healthy", "adopted"),
    [
        ([cell_report(), cell_report()], False, True, False),
        ([cell_report(), cell_report()], True, True, False),
        ([cell_report(begun=1), cell_report(begun=2)], True, False, False),
        ([cell_report(begun=1), cell_report(begun=2)], False, False, False),
        ([cell_report(begun=1)], False, False, False),
        ([cell_report(sends=1), cell_report()], True, False, False),
        ([cell_report(sends=1), cell_report()], False, True, False),
        ([cell_report(sends=1)], True, False, False),
        ([cell_report(changes=4), cell_report(changes=8)], True, False, False),
        ([cell_report(changes=4), cell_report(changes=8)], False, True, False),
        ([cell_report(changes=4), cell_report()], True, True, False),  # missing on one rank
        ([cell_report(changes=4)], True, True, False),
        ([cell_report(), cell_report(released=True)], True, False, False),
        ([cell_report(), None], True, False, False),
        ([cell_report("none"), cell_report("none")], False, False, False),
        ([cell_report("none"), cell_report()], False, False, False),
        (OTHER, False, True, True),
        (OTHER[::-1], False, False, False),
        ([OTHER[0], cell_report()], False, False, False),
        ([{**cell_report("other"), "size": 1}], False, False, False),
    ],
)
def test_the_group_is_kept_adopted_or_rebuilt(
    reports: list[dict[str, Any] | None], failed: bool, healthy: bool, adopted: bool
) -> None:
    ranks = _Ranks()
    manager = ProcessGroupManager(ranks)  # type: ignore[arg-type]
    manager.healthy = True
    manager.update_health(dict(enumerate(reports)), failed)
    assert (manager.healthy, ranks.adopted) == (healthy, adopted)


def test_a_good_cell_does_not_repair_an_aborted_group() -> None:
    manager = ProcessGroupManager(_Ranks())  # type: ignore[arg-type]
    manager.update_health({0: cell_report(), 1: cell_report()}, False)
    assert not manager.healthy


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("was_released", [True, False])
def test_a_failed_cell_reports_different_collectives_in_any_state(
    is_known: bool, was_released: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """The release may come after the reports, and one report may be missing."""
    ranks = _Ranks()
    ranks.members = [None] * 3
    manager = ProcessGroupManager(ranks)  # type: ignore[arg-type]
    manager.healthy = not was_released
    reports = [cell_report(begun=1), cell_report(begun=1), cell_report(begun=1) if is_known else None]
    reports[1]["begun"]["default cpu"]["digest"] = 5  # type: ignore[index]
    manager.update_health(dict(enumerate(reports)), failed=True)
    assert "different collectives" in capsys.readouterr().err and not manager.healthy


def test_a_group_without_reports_is_not_healthy() -> None:
    manager = ProcessGroupManager(_Ranks())  # type: ignore[arg-type]
    manager.healthy = True
    manager.update_health({}, True)
    assert not manager.healthy


def test_accepted_differences_keep_the_group_healthy_until_ranks_begin_more() -> None:
    manager = ProcessGroupManager(_Ranks())  # type: ignore[arg-type]
    manager.healthy = True
    manager.update_health({0: cell_report(begun=1)}, False, unmatched=True)
    manager.update_health({0: cell_report(begun=1), 1: cell_report()}, False)
    manager.update_health({0: cell_report(begun=1), 1: cell_report()}, True)
    assert manager.healthy
    manager.update_health({0: cell_report(begun=2), 1: cell_report(begun=1)}, False)
    assert not manager.healthy


def test_connections_between_ranks_have_a_rank_at_both_ends() -> None:
    forward, backward = ("127.0.0.1", 1, "127.0.0.1", 2), ("127.0.0.1", 2, "127.0.0.1", 1)
    others = ("127.0.0.1", 3, "127.0.0.1", 4)
    assert between_ranks({0: [forward, others], 1: [backward]}) == {0: [forward], 1: [backward]}
    assert between_ranks({0: [forward, backward], 1: [others]}) == {0: [], 1: []}  # a connection of a rank to itself


def test_a_connection_from_an_unknown_process_spoils_the_group() -> None:
    forward, backward = ("127.0.0.1", 1, "127.0.0.1", 2), ("127.0.0.1", 2, "127.0.0.1", 1)
    stranger = ("127.0.0.1", 1, "127.0.0.1", 9)
    assert not has_unknown_connection([([forward], [1]), ([backward], [7])])
    assert not has_unknown_connection([([forward, ("127.0.0.1", 5, "127.0.0.1", 6)], [1]), ([backward], [])])
    assert not has_unknown_connection([([], []), ([], [])])
    assert has_unknown_connection([([forward, stranger], [1]), ([backward], [])])


def test_no_rank_can_read_a_broken_store(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.write_text("keys")
    for _ in range(2):
        on_host.poison_store(str(store))
        with pytest.raises(OSError) as caught:
            store.open()
        assert caught.value.errno == errno.ELOOP
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


class _OtherHost(LocalHost):
    """A host that answers with errors as another machine does, or not at all."""

    name = "h2"
    answers = True

    def begin(self, function: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        if self.answers:
            try:
                answer.set_result(function(*args))
            except Exception as error:
                answer.set_exception(RuntimeError(str(error)))
        return answer


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_address_is_a_gap(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "_held_ports", {})
    hosts, addresses = [LocalHost(Path()), _OtherHost(Path())], ["127.0.0.1", "127.0.0.1"]
    addresses[lost] = on_host.ELSEWHERE
    (gap,) = network.find_gaps(hosts, [Network(address, "eth0") for address in addresses], 0.1)
    assert gap.target.endswith(on_host.ELSEWHERE) and gap.why == on_host.NO_ADDRESS
    assert not on_host._held_ports


def test_a_host_that_does_not_answer_leaves_no_open_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_host, "_held_ports", {})
    monkeypatch.setattr(_OtherHost, "answers", False)
    with pytest.raises(HostLost):
        network.find_gaps([LocalHost(Path()), _OtherHost(Path())], [Network("127.0.0.1", "lo")] * 2, 0.1, 0.1)
    assert not on_host._held_ports


class _DyingHost(_OtherHost):
    """A host that is lost when it is asked something."""

    def begin(self, function: Any, *args: Any, **kwargs: Any) -> Future[Any]:
        self.lost = "Broken pipe"
        answer: Future[Any] = Future()
        answer.set_exception(HostLost("h2 is lost: Broken pipe"))
        return answer


def test_a_host_lost_during_a_partition_search_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = [LocalHost(Path()), _DyingHost(Path())]
    monkeypatch.setattr(network, "of_hosts", lambda hosts: [Network("127.0.0.1", "lo")] * len(hosts))
    factory = RendezvousFactory(cast(Any, SimpleNamespace(cluster=SimpleNamespace(hosts=hosts))))
    factory.ensure_connected([0, 1])
    assert hosts[1].lost
