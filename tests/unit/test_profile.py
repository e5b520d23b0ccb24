"""The division of a profiled cell's time, and the ranks that kept others waiting, as pure functions."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from ddip.errors import BadInput
from ddip.group.profiling import stragglers, traces
from ddip.group.profiling.profile import clock_offset, folder_for
from ddip.output.tables import profile_report
from ddip.output.tables.profile_report import Profile
from ddip.protocol.reports import CollectiveRow, ProfileReport
from ddip.rank.process_group import flight_recorder
from ddip.rank.profiling import profile_events, timeline, trace_file
from ddip.rank.profiling.profile_events import RecordedEvents
from ddip.rank.profiling.profiling import _Recording
from ddip.rank.profiling.timeline import Layers, TimeBreakdown

S = 1_000_000_000


def nanoseconds(*seconds: float) -> Any:
    return tuple(round(each * S) for each in seconds)


def layers_of(**which: Any) -> Layers:
    return Layers(0, 10 * S, **{name: [nanoseconds(*moment) for moment in moments] for name, moments in which.items()})


def communication_seconds(divided: TimeBreakdown) -> float:
    return sum((b - a) * share for a, b, share in divided.communication) / S


def total_seconds(divided: TimeBreakdown) -> float:
    return divided.compute + divided.loading + divided.idle + communication_seconds(divided)


def test_a_blocked_thread_waits_for_gloo_or_data_or_nothing() -> None:
    """Block the thread from 2 s on; gloo works from 2 to 5 s, the loader from 6 to 8 s."""
    samples = [(0, 0), (2, 2), (10, 2)]
    divided = timeline.divide_time(layers_of(ops=[(0, 1)], transfers=[(2, 5)], loading=[(6, 8)], samples=samples))
    assert divided == TimeBreakdown(
        compute=pytest.approx(2),
        python=pytest.approx(1),
        loading=2,
        idle=pytest.approx(3),
        communication=[nanoseconds(2, 5, 0)[:2] + (1.0,)],
    )


def test_gloo_costs_nothing_beside_a_computing_thread() -> None:
    divided = timeline.divide_time(layers_of(ops=[(0, 4)], transfers=[(1, 9)], samples=[(0, 0), (10, 10)]))
    assert (divided.compute, divided.python, divided.idle, communication_seconds(divided)) == (10, 6, 0, 0)


def test_between_samples_a_thread_is_blocked_where_it_can_be() -> None:
    """Attribute half of the time to the collective: 3 of 5 s count, and Python code hid one."""
    divided = timeline.divide_time(layers_of(ops=[(0, 4)], transfers=[(4, 9)], samples=[(0, 0), (10, 7)]))
    assert communication_seconds(divided) == pytest.approx(3)
    assert (divided.compute, divided.idle) == (pytest.approx(7), pytest.approx(0))
    assert total_seconds(divided) == pytest.approx(10)


def test_a_wait_for_a_core_counts_as_late() -> None:
    """Wait for a core from 2 to 6 s.

    The sample at 6 s reports all of it, and that the thread has run since 5 s.
    """
    divided = timeline.divide_time(layers_of(transfers=[(0, 10)], samples=[(0, 0), (2, 2), (4, 2), (6, 6), (10, 6)]))
    assert (divided.python, communication_seconds(divided)) == (pytest.approx(6), pytest.approx(4))


def test_without_samples_a_thread_is_blocked_outside_operations() -> None:
    divided = timeline.divide_time(layers_of(ops=[(0, 4)], transfers=[(3, 6)]))
    assert (divided.compute, communication_seconds(divided), divided.idle) == (4, 2, 4)


def test_gpu_kernels_hide_everything_and_nccl_kernels_are_communication() -> None:
    divided = timeline.divide_time(
        layers_of(kernels=[(1, 4)], network=[(3, 6)], loading=[(5, 8)], samples=[(0, 0), (10, 10)])
    )
    assert (communication_seconds(divided), divided.loading, divided.compute) == (2, 2, pytest.approx(6))
    assert total_seconds(divided) == pytest.approx(10)


class Event:
    """A profiler event like Kineto's."""

    def __init__(self, name: str, begin: float, end: float, thread: int = 1, kind: str = "cpu_op") -> None:
        self._name, self._moment, self._thread, self._activity = name, nanoseconds(begin, end), thread, kind

    def __getattr__(self, name: str) -> Any:
        values = {
            "name": self._name,
            "start_ns": self._moment[0],
            "duration_ns": self._moment[1] - self._moment[0],
            "device_resource_id": self._thread,
            "activity_type": self._activity,
            "is_user_annotation": self._activity == "user_annotation",
            "device_type": "DeviceType.CUDA"
            if "kernel" in self._activity or "gpu" in self._activity
            else "DeviceType.CPU",
        }
        return lambda: values[name]


def test_events_belong_to_layers_by_their_names_and_threads() -> None:
    recorded = RecordedEvents(Layers(0, 10 * S))
    note = "user_annotation"
    profile_events.read_events(
        [
            Event("aten::mm", 0, 1),
            Event("Optimizer.step#SGD.step", 0, 3, kind=note),
            Event("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 1, 2, kind=note),
            Event("c10d::allreduce_", 2, 3),
            Event("gloo:all_reduce", 2, 5, thread=7, kind=note),
            Event("aten::copy_", 3, 4, thread=7),
            Event("aten::mm", 5, 6, thread=8),
            Event("ncclDevKernel_AllReduce", 6, 7, kind="kernel"),
            Event("gemm", 7, 8, kind="kernel"),
            Event("cudaLaunchKernel", 0, 9, kind="cuda_runtime"),
        ],
        1,
        recorded,
    )
    layers = recorded.layers
    assert layers.ops == [nanoseconds(0, 1), nanoseconds(5, 6)]
    assert layers.loading == [nanoseconds(1, 2)]
    assert layers.network == [nanoseconds(2, 3), nanoseconds(6, 7)]
    assert layers.transfers == recorded.work["gloo:all_reduce"] == [nanoseconds(2, 5)]
    assert layers.kernels == [nanoseconds(7, 8)]


def test_recorded_collectives_are_matched_with_work_of_their_backend() -> None:
    recorded = RecordedEvents(Layers(1 * S, 10 * S))
    recorded.work["gloo:all_reduce"] = [nanoseconds(4, 6), nanoseconds(2, 3), nanoseconds(0.2, 0.5)]
    of = {"formed": 0, "number": 0, "shapes": [[4]], "dtypes": ["float32"], "is_done": True}
    entries = [
        flight_recorder.Entry("0", op="gloo:all_reduce", begun=round(at * S), record=(0, i), **{**of, "number": i})
        for i, at in enumerate((0.2, 1.9, 3.9, 7), 4)
    ]
    rows = profile_events.collective_rows(recorded, entries, {"0": [0, 1]}, [0, 1])
    assert [(row[2], row[3], row[6] / S, row[7] / S) for row in rows] == [
        (5, "all_reduce", 1.9, 3),
        (6, "all_reduce", 3.9, 6),
        (7, "all_reduce", 7, 10),  # has not ended
    ]


def test_without_a_flight_recorder_calls_count_in_their_order() -> None:
    recorded = RecordedEvents(
        Layers(0, 10 * S), calls=[(*nanoseconds(5, 6), "c10d::barrier"), (*nanoseconds(1, 2), "c10d::allreduce_")]
    )
    rows = profile_events.collective_rows(recorded, [], {}, [0, 1])
    assert [(row[0], row[2], row[3]) for row in rows] == [("?", 1, "allreduce"), ("?", 2, "barrier")]


def collective_row(
    number: int, begin: float, end: float, group: str = "0", ranks: tuple[int, ...] = (0, 1)
) -> CollectiveRow:
    return (group, list(ranks), number, "all_reduce", [[4]], ["float32"], *nanoseconds(begin, end))


def report_of_ten_seconds(
    collectives: list[CollectiveRow], exposed: list[tuple[float, float]], ahead: float = 0, **more: Any
) -> ProfileReport:
    """Return the report of a cell of ten seconds, on a clock that is `ahead` of the notebook's."""
    rest = 10 - sum(b - a for a, b in exposed) - sum(more.values())
    base: dict[str, Any] = {"compute": rest, "python": 0.0, "loading": 0.0, "idle": 0.0, **more}
    shift = round(ahead * S)
    return {
        **base,
        "fault": "",
        "note": "",
        "begin": shift,
        "end": 10 * S + shift,
        "communication": [(a + shift, b + shift, 1.0) for a, b in (nanoseconds(*moment) for moment in exposed)],
        "collectives": [(*each[:6], each[6] + shift, each[7] + shift) for each in collectives],
        "events": 0,
        "size": 0,
    }  # type: ignore[typeddict-item]


def profile_of(reports: dict[int, ProfileReport], ahead: dict[int, float] | None = None) -> Profile:
    offsets = {rank: round((ahead or {}).get(rank, 0) * S) for rank in reports}
    found = stragglers.compute_waits(reports, offsets, 2)
    return Profile(found.ranks, found.collectives, found.waited_for)


@pytest.mark.parametrize("ahead", [0, 3600, -5], ids=["one clock", "an hour ahead", "behind"])
def test_a_rank_waits_for_the_last_one_despite_different_clocks(ahead: float) -> None:
    waits = report_of_ten_seconds([collective_row(1, 1, 4.5)], [(1, 4.5)])
    late = report_of_ten_seconds([collective_row(1, 4, 4.5)], [(4, 4.5)], ahead, idle=3)
    profile = profile_of({0: waits, 1: late}, {1: ahead})
    assert (profile.ranks[0].waiting, profile.ranks[0].communication) == (pytest.approx(3), pytest.approx(0.5))
    assert (profile.ranks[1].waiting, profile.ranks[1].communication) == (0, pytest.approx(0.5))
    assert profile.waited_for == {1: pytest.approx(3)} and profile.slowest_rank == 1
    assert "slowest: rank 1; rank 0 waited 3.00 s for it, while it was idle, 3.00 s more than rank 0" in str(
        profile_report.profile_remarks(profile)
    )
    slowest = profile.slowest_collective
    assert slowest is not None and str(slowest) == "number 1 of the default group, all_reduce of (4,) float32"
    assert (slowest.last, slowest.seconds, slowest.waiting) == (1, pytest.approx(3.5), pytest.approx(3))


def test_the_slowest_collective_is_known_if_only_calls_are_recorded() -> None:
    early = report_of_ten_seconds([collective_row(1, 1, 1.01), collective_row(2, 6, 6.1)], [(1, 4), (6, 6.1)])
    late = report_of_ten_seconds([collective_row(1, 4, 4.01), collective_row(2, 6, 6.1)], [(4, 4.01), (6, 6.1)])
    slowest = profile_of({0: early, 1: late}).slowest_collective
    assert slowest is not None and (slowest.number, slowest.seconds) == (1, pytest.approx(3))


def test_time_in_simultaneous_collectives_counts_once() -> None:
    """Overlap collectives, as DDP's buckets do."""
    first = report_of_ten_seconds([collective_row(1, 1, 5), collective_row(2, 2, 5), collective_row(3, 3, 5)], [(3, 5)])
    second = report_of_ten_seconds(
        [collective_row(1, 4, 5), collective_row(2, 4, 5), collective_row(3, 4.5, 5)], [(4.5, 5)]
    )
    profile = profile_of({0: first, 1: second})
    assert profile.ranks[0].waiting == pytest.approx(1.5)
    assert profile.waited_for[1] == pytest.approx(1.5)
    assert [each.waiting for each in profile.collectives] == [pytest.approx(1), 0, pytest.approx(0.5)]


def test_a_missing_rank_is_waited_for_until_the_end() -> None:
    profile = profile_of(
        {0: report_of_ten_seconds([collective_row(1, 2, 10)], [(2, 10)]), 1: report_of_ten_seconds([], [])}
    )
    assert profile.ranks[0].waiting == pytest.approx(8) and profile.slowest_rank == 1
    assert "waiting for ranks that never joined it" in str(profile_report.profile_remarks(profile))


def test_ranks_do_not_wait_for_a_rank_with_missing_events() -> None:
    short = report_of_ten_seconds([], [])
    short["note"] = "too many events"
    profile = profile_of({0: report_of_ten_seconds([collective_row(1, 2, 10)], [(2, 10)]), 1: short})
    assert (profile.ranks[0].waiting, profile.ranks[0].communication) == (0, pytest.approx(8))


def test_ranks_that_begin_different_operations_are_not_compared() -> None:
    other = (*collective_row(1, 4, 5)[:3], "barrier", *collective_row(1, 4, 5)[4:])
    profile = profile_of(
        {0: report_of_ten_seconds([collective_row(1, 2, 5)], [(2, 5)]), 1: report_of_ten_seconds([other], [])}
    )  # type: ignore[list-item]
    assert profile.ranks[0].waiting == 0


def test_ranks_that_wait_for_each_other_have_no_slowest() -> None:
    first = report_of_ten_seconds([collective_row(1, 1, 3), collective_row(2, 6, 6)], [(1, 3)])
    second = report_of_ten_seconds([collective_row(1, 3, 3), collective_row(2, 4.1, 6)], [(4.1, 6)])
    assert "no rank is consistently slow" in str(profile_report.profile_remarks(profile_of({0: first, 1: second})))


def test_the_report_lists_shares_slow_ranks_and_missing_data() -> None:
    found = profile_of(
        {
            0: report_of_ten_seconds([collective_row(1, 1, 4)], [(1, 4)], loading=1),
            1: report_of_ten_seconds([collective_row(1, 4, 4)], [], loading=5),
        }
    )
    profile = Profile(found.ranks, found.collectives, found.waited_for, {2: "its process has <ended>"}, Path("out"))
    bundle = profile._repr_mimebundle_()
    text = bundle["text/plain"]
    assert "3.00 (30 %)" in text and "rank 2: no profile" in text and "loaded data, 4.00 s more than rank 0" in text
    assert "rank 0  |####" in text and "all_reduce of (4,) float32      1     3.00     3.00  rank 1 (1 of 1)" in text
    assert "<svg" in bundle["text/html"] and "its process has &lt;ended&gt;" in bundle["text/html"]
    assert profile_report.report_text(Profile({}, [], missing={0: "why"})).endswith("rank 0: no profile: why")


def trace_of(path: Path, pid: int, base: int, *events: dict[str, Any], rank: int = 0) -> Path:
    labels = {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "ts": 0, "args": {"labels": "CPU"}}
    text = json.dumps(
        {"schemaVersion": 1, "distributedInfo": {"rank": rank}, traces.BASE: base, "traceEvents": [labels, *events]},
        indent=1,
    )
    path.write_bytes(gzip.compress(text.encode()))
    return path


def test_traces_merge_with_a_process_per_rank_and_one_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "PIECE", 50)
    op = {"ph": "X", "name": "aten::mm", "pid": 77, "tid": 77, "ts": 2_000_000.5, "dur": 10}
    gpu = {**op, "pid": 0, "tid": 7, "name": "gemm"}
    flow = {"ph": "s", "name": "fwdbwd", "pid": 77, "tid": 77, "ts": 2_000_000.5, "id": 3}
    span = {**op, "pid": "Spans"}
    paths = {
        0: trace_of(tmp_path / "a.gz", 77, 5 * S, op, flow, span),
        2: trace_of(tmp_path / "b.gz", 77, 6 * S, op, gpu, flow),
    }
    to = tmp_path / "all"
    traces.merge_files(paths, {0: 0, 2: 1 * S}, 6 * S, to)
    events = json.loads(gzip.decompress(to.read_bytes()))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "rank 0", 3: "rank 2"}
    ops = {event["pid"]: event["ts"] for event in events if event["name"] == "aten::mm"}
    assert ops == {1: 1_000_000.5, 3: 1_000_000.5}  # both one second after the beginning
    assert {event["id"] for event in events if event["name"] == "fwdbwd"} == {"0.3", "2.3"}
    assert [event["tid"] for event in events if event["name"] == "gemm"] == [10_000_007]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.gz", "all", "b.gz"]


def test_an_invalid_trace_leaves_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"{}"))
    with pytest.raises(ValueError, match="not a trace"):
        traces.merge_files({0: tmp_path / "a.gz"}, {0: 0}, 0, tmp_path / "all")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gz"]


def test_the_parts_of_a_recording_are_one_trace(tmp_path: Path) -> None:
    files = []
    for number in (1, 2, 3):
        path = tmp_path / str(number)
        path.write_text(f'{{ "rank": 0, "traceEvents": [ {{"n": {number}, "a": [1]}} ],"traceName": "x[]" }}')
        files.append(path.open("rb"))
    with (tmp_path / "all").open("wb") as to:
        trace_file.write_trace([*files], to)
    whole_trace = json.loads(gzip.decompress((tmp_path / "all").read_bytes()))
    assert [event["n"] for event in whole_trace["traceEvents"]] == [1, 2, 3] and whole_trace["rank"] == 0
    assert all(file.closed for file in files)


def test_the_quickest_answer_sets_the_clock() -> None:
    assert clock_offset([]) == 0
    assert clock_offset([(0, 900, 1000), (2000, 2105, 2010), (3000, 3950, 4000)]) == 100


def test_an_unwritable_folder_is_refused_and_a_former_profile_removed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="--profile .*/file: "):
        folder_for(str(tmp_path / "file"))
    for name in ("rank_3.pt.trace.json.gz", "all_ranks.perfetto-trace", "mine.json"):
        (tmp_path / name).write_text("")
    assert folder_for(str(tmp_path)) == tmp_path
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "mine.json"]


def test_a_trace_cut_off_by_a_full_disk_raises(tmp_path: Path) -> None:
    for text in (b"", b'{"traceEvents": [{"name": "a"}'):
        (tmp_path / "part").write_bytes(text)
        part = (tmp_path / "part").open("rb")
        with part, (tmp_path / "to").open("wb") as to, pytest.raises(OSError, match="is the disk full"):
            trace_file.write_trace([part], to)


def test_a_recording_on_a_full_disk_is_dropped_silently() -> None:
    recording = _Recording.__new__(_Recording)
    recording._profiler, recording._parts, recording.trace = None, [], Path("/dev/full").open("wb")  # noqa: SIM115
    recording.trace.write(b"x")
    recording.drop()
    assert recording.trace.closed
