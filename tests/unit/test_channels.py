"""Conversion of an engine's answer to the types of the cluster interface."""

from __future__ import annotations

from typing import Any

import pytest
from ipyparallel.error import RemoteError, TaskAborted

from ddip.cluster import ipp_private
from ddip.cluster.ipyparallel import channels

REPORT: Any = {"released": False, "state": "ours"}


def test_an_ended_engine_differs_from_an_error_of_that_name() -> None:
    assert channels._read_result_safely(RemoteError("EngineError", "", "", {})).ended
    reply = channels._read_result_safely(RemoteError("EngineError", "mine", "where", {"engine_id": 1}))
    assert not reply.ended
    assert reply.raised is not None and (reply.raised.name, reply.raised.message) == ("EngineError", "mine")


def test_an_aborted_call_counts_as_interrupted_before_it_began() -> None:
    reply = channels._read_result_safely(TaskAborted())
    assert reply.raised is not None and reply.raised.name == "KeyboardInterrupt" and reply.raised.at > 0


def test_an_error_raised_by_ipyparallel_is_an_error() -> None:
    reply = channels._read_result_safely(OSError("no route"))
    assert reply.raised is not None and (reply.raised.name, reply.raised.message) == ("OSError", "no route")


def test_an_aborted_cell_counts_as_interrupted_before_it_began() -> None:
    reply = ipp_private.cell_reply({"status": "aborted"})
    assert reply.raised is not None and reply.raised.name == "KeyboardInterrupt" and reply.raised.at > 0


def test_a_failed_cell_has_its_error_and_its_report() -> None:
    reply = ipp_private.cell_reply(
        {"status": "error", "ename": "EngineError", "evalue": "mine", "traceback": ["a", "b"], "report": REPORT}
    )
    assert reply.raised is not None and not reply.ended and reply.report == REPORT
    assert (reply.raised.name, reply.raised.message, reply.raised.traceback) == ("EngineError", "mine", "a\nb")


def test_a_good_cell_has_its_report_and_its_pages() -> None:
    page = {"source": "page"}
    reply = ipp_private.cell_reply({"status": "ok", "report": REPORT, "payload": [page]})
    assert (reply.raised, reply.report, reply.payload) == (None, REPORT, [page])


@pytest.mark.parametrize("content", [{}, {"status": "error", "ename": "E"}, {"status": "odd"}])
def test_an_unreadable_answer_is_an_error_and_ends_the_wait(content: Any) -> None:
    reply = ipp_private.cell_reply(content)
    assert reply.raised is not None and "its answer cannot be read" in reply.raised.message
