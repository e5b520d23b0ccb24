"""Signatures of collectives are computed in groups of many, and whenever someone asks for them."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

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


def _begin_one(tally: Tally, number: int) -> None:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX if number % 7 == 0 else dist.ReduceOp.SUM
    tally.begin("all_reduce", NOWHERE, [torch.zeros(number % 5)], True, options)


def test_digests_do_not_depend_on_when_they_are_read(tally: Tally) -> None:
    often = Tally(tally.kept)  # type: ignore[attr-defined]
    for number in range(2 * MAX_UNSIGNED + 50):
        _begin_one(tally, number)
        _begin_one(often, number)
        assert often.digests()[0] == number + 1
    assert tally.digests() == often.digests()
    _begin_one(tally, 0)
    _begin_one(often, 1)
    assert tally.digests()[1] != often.digests()[1]


def test_a_thread_reads_digests_while_collectives_begin_one(tally: Tally) -> None:
    alone, end, seen = Tally(tally.kept), threading.Event(), [0]  # type: ignore[attr-defined]

    def read_all() -> None:
        while not end.is_set():
            seen.append(tally.digests()[0])

    reader = threading.Thread(target=read_all)
    reader.start()
    for number in range(3 * MAX_LINES):
        _begin_one(tally, number)
        _begin_one(alone, number)
    end.set()
    reader.join()
    assert tally.digests() == alone.digests()
    assert seen == sorted(seen)
    assert not tally.knows_all()


def test_options_are_those_of_the_beginning(tally: Tally) -> None:
    again, options = Tally(tally.kept), dist.BroadcastOptions()  # type: ignore[attr-defined]
    for root in (0, 1):
        options.rootRank = root
        tally.begin("broadcast", NOWHERE, [torch.zeros(1)], True, options)
        again.begin("broadcast", NOWHERE, [torch.zeros(1)], True, options)
        again.digests()
    assert tally.digests() == again.digests()


def test_no_tensor_is_kept(tally: Tally) -> None:
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    tally.begin("allgather", NOWHERE, [tensor], False, [tensor])  # torch 2.4 passes no options
    del tensor
    assert kept() is None


class _Work:
    """A stand-in for what torch returns."""


def test_a_pending_work_is_known_after_many_others(tally: Tally) -> None:
    first = _Work()
    tally.note_work(first, tally.begin("barrier", NOWHERE))
    works = []
    for _ in range(3 * MAX_LINES):
        works.append(_Work())
        tally.note_work(works[-1], tally.begin("barrier", NOWHERE))
    assert tally.number_of(first) == 1


def test_complete_works_are_forgotten(tally: Tally) -> None:
    for _ in range(3 * MAX_LINES):
        tally.note_work(_Work(), tally.begin("barrier", NOWHERE))
    assert len(tally._works) == 1


def test_a_signal_handler_may_begin_a_collective_while_signatures_are_computed(tally: Tally) -> None:
    _begin_one(tally, 1)
    with tally._signing:
        for number in range(2, 2 * MAX_UNSIGNED):
            _begin_one(tally, number)
    assert tally.digests()[0] == 2 * MAX_UNSIGNED - 1
