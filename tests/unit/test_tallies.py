"""Signatures of collectives are computed in groups of many, and whenever someone asks for them."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddip.rank.process_group import tallies
from ddip.rank.process_group.tallies import MAX_LINES, MAX_UNSIGNED, Tally

NOWHERE = None, 0, False


class _Group:
    """A group without a backend that counts."""

    _device_types: tuple[torch.device, ...] = ()


@pytest.fixture
def tally() -> Tally:
    group = _Group()
    made: Any = Tally(group)  # type: ignore[arg-type]
    made.kept = group
    return made  # type: ignore[no-any-return]


def _begin(tally: Tally, number: int) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX if number % 7 == 0 else dist.ReduceOp.SUM
    tally.begin("all_reduce", NOWHERE, [torch.zeros(number % 5)], True, options)


def test_digests_do_not_depend_on_when_they_are_read(tally: Tally) -> None:
    often = Tally(tally.kept)  # type: ignore[attr-defined]
    for number in range(2 * MAX_UNSIGNED + 50):
        _begin(tally, number)
        _begin(often, number)
        assert often.digests()[0] == number + 1
    assert tally.digests() == often.digests()
    _begin(tally, 0)
    _begin(often, 1)
    assert tally.digests()[1] != often.digests()[1]


def test_a_thread_reads_digests_while_collectives_begin(tally: Tally) -> None:
    alone, end, seen = Tally(tally.kept), threading.Event(), [0]  # type: ignore[attr-defined]

    def read() -> None:
        while not end.is_set():
            seen.append(tally.digests()[0])

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(3 * MAX_LINES):
        _begin(tally, number)
        _begin(alone, number)
    end.set()
    reader.join()
    assert tally.digests() == alone.digests()
    assert seen == sorted(seen)
    assert not tally.knows_all()


def test_options_that_cannot_be_read_leave_one_collective_out(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tallies, "ROOTED", {str})
    tally.begin("all_reduce", NOWHERE, [torch.zeros(1)], True, "not options")
    _begin(tally, 1)
    assert tally.digests()[0] == 1
