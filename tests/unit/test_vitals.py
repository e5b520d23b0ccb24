"""``%dipwatch`` without processes: rates, the straggler, the table, and ranks that do not answer."""

from __future__ import annotations

import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import pytest

from ddip.cluster.cluster_api import Recipient
from ddip.errors import GroupError
from ddip.group.members.placement import Request
from ddip.group.watching import vitals
from ddip.group.watching.vitals import Rates, Sampler, compute_rates, sample_period, with_answer
from ddip.output.tables.vitals_table import RankVitals, find_stragglers, table_html, table_text, time_text
from ddip.protocol.location import StackLocation
from ddip.protocol.reports import DeviceFigures, Vitals
from ddip.rank.process_group import rank_vitals as on_the_rank
from ddip.rank.runtime import nvml
from ddip.rank.streams.streams import RankStream

from .scripted import Deafness, ScriptedGroup


def vitals_at(at: float, busy_for: float | None = None, **known: Any) -> Vitals:
    """Return a rank's answer at a time; `busy_for` is the time since its cell began."""
    vitals: dict[str, Any] = {
        "memory": 5_000_000,
        "gpu": None,
        "busy": busy_for is not None,
        "busy_for": busy_for,
        "doing": "",
        "seconds": 3.0,
        "collections": 0,
        "at": at,
        "cell": 4,
        "place": {"cell": 4, "line": 2, "source": "step()"},
        "cpu": 0.0,
        "steps": 0,
        "collectives": 0,
        "bars": [],
        "waited": 0.0,
        "looked": 0.0,
        "device": None,
    }
    return {**vitals, **known}  # type: ignore[typeddict-item]


def busy_rank(number: int, waited: float | None = None, **known: Any) -> RankVitals:
    """Return the vitals of a busy rank."""
    return RankVitals(number, "here", 7 + number, "cpu", **{"state": "busy", "cell": 4, "waited": waited, **known})


# -- rates


def test_a_rate_is_the_change_in_the_cells_last_seconds() -> None:
    first = vitals_at(100, 2, steps=50, collectives=200, cpu=10, waited=1.0, looked=2.0)
    now = vitals_at(104, 6, steps=90, collectives=400, cpu=16, waited=4.0, looked=6.0)
    assert compute_rates([first, now]) == Rates(steps=10, collectives=50, waited=0.75, cores=1.5)
    assert compute_rates([vitals_at(80, 1, steps=0), first, now]) == compute_rates(
        [first, now]
    )  # ignored: more than ten seconds ago


def test_work_before_the_cell_does_not_count_in_its_rate() -> None:
    before = vitals_at(100, 7, steps=50, cpu=10)
    assert compute_rates([before, vitals_at(104, 1.5, steps=90, cpu=12)]) == Rates(cores=0.5)
    assert compute_rates([vitals_at(100, None, cpu=10), vitals_at(104, 1.5, cpu=12)]) == Rates(cores=0.5)


def test_one_answer_or_two_simultaneous_answers_give_no_rate() -> None:
    assert compute_rates([vitals_at(100, 5)]) == Rates()
    assert compute_rates([vitals_at(100, 5), vitals_at(100.2, 5.2)]).steps is None


def test_after_a_rest_cpu_time_counts_since_the_last_look() -> None:
    assert (
        compute_rates([vitals_at(0, None, cpu=0), vitals_at(50, None, cpu=10), vitals_at(70, None, cpu=30)]).cores
        == 1.0
    )


def test_a_share_that_is_rarely_sampled_or_unknown_is_hidden() -> None:
    assert compute_rates([vitals_at(0, 1), vitals_at(4, 5, looked=0.1, waited=0.1)]).waited is None
    assert compute_rates([vitals_at(0, 1, waited=None), vitals_at(4, 5, looked=4, waited=None)]).waited is None


def test_leaving_a_process_group_gives_no_negative_rate() -> None:
    assert compute_rates([vitals_at(0, 1, collectives=100), vitals_at(4, 5, collectives=0)]).collectives == 0


def test_many_ranks_are_sampled_less_often() -> None:
    assert [sample_period(size) for size in (1, 2, 8, 64)] == [1.0, 1.0, 3.2, 10.0]


# -- the straggler


@pytest.mark.parametrize(
    ("waited", "slow"),
    [
        ([0.8, 0.03], [1]),
        ([0.03, 0.8, 0.7, 0.9], [0]),
        ([0.9, 0.05, 0.9, 0.1], [1, 3]),  # two on a slow host
        ([0.5, 0.55, 0.45, 0.5], []),  # all wait for the network
        ([0.05, 0.02, 0.1, 0.0], []),  # no rank waits
        ([0.3, 0.15], []),
        ([0.1, 0.05, 0.1, 0.9], []),  # one rank waits for the majority
        ([0.9], []),
        ([None, None], []),
        ([], []),
    ],
)
def test_the_straggler_waits_least_while_the_others_wait_long(waited: list[float | None], slow: list[int]) -> None:
    assert find_stragglers([busy_rank(number, share) for number, share in enumerate(waited)]) == slow


def test_ranks_of_other_cells_are_compared_among_themselves() -> None:
    ranks = [
        busy_rank(0, 0.8),
        busy_rank(1, 0.0),
        busy_rank(2, 0.0, cell=5),
        busy_rank(3, 0.0, cell=5),
        busy_rank(4, 0.9, state="idle"),
    ]
    assert find_stragglers(ranks) == [1]
    assert find_stragglers([busy_rank(0, 0.8), busy_rank(1, 0.0, doing="pushing")]) == []


# -- the table

PLACE = StackLocation("backward", 4, 2, "loss.backward()")


def test_the_table_has_only_columns_with_known_values() -> None:
    assert table_text([busy_rank(0, state="idle", cell=None), busy_rank(1, state="ended", cell=None)]) == (
        "rank  state\n   0  idle\n   1  ended"
    )
    ranks = [
        busy_rank(0, 0.81, seconds=75, place=PLACE, steps_per_second=41.23, bars=((3, 10), (63, 100)), cores=1.02),
        busy_rank(1, 0.02, seconds=75, place=PLACE, steps_per_second=41.23, memory=512_000_000),
    ]
    head, first, second, note = table_text(ranks).splitlines()
    assert head.split() == ["rank", "state", "cell", "time", "rate", "bar", "waits", "CPU", "memory", "where"]
    where = "backward, line 2: loss.backward()"
    rate = ["1 min 15 s", "41.2 steps/s"]
    assert re.split("  +", first.strip()) == ["0", "busy", "[4]", *rate, "3/10 · 63/100", "81 %", "102 %", where]
    assert re.split("  +", second.strip()) == ["1◀", "busy", "[4]", *rate, "2 %", "512 MB", where]
    assert note == "rank 1 is the straggler: it waits 2 % of the time in collectives, rank 0 81 %"
    assert head.index("where") == first.index("backward") == second.index("backward")


def test_several_stragglers_and_several_others_are_named_together() -> None:
    text = table_text([busy_rank(0, 0.9), busy_rank(1, 0.04), busy_rank(2, 0.85), busy_rank(3, 0.02)])
    assert text.endswith(
        "ranks 1, 3 are the stragglers: they wait 4 % or less of the time in collectives, the others 85 % or more"
    )


def test_extreme_waiting_shares_are_stated_exactly() -> None:
    text = table_text([busy_rank(0, 1.0), busy_rank(1, 0.0), busy_rank(2, 1.0), busy_rank(3, 0.0)])
    assert text.endswith("ranks 1, 3 are the stragglers: they wait 0 % of the time in collectives, the others 100 %")


def test_gpus_have_columns_and_ranks_without_steps_show_collectives() -> None:
    gpu = {"gpu_use": 0.97, "gpu_memory": 12_300_000_000, "gpu_memory_total": 80_000_000_000, "gpu_temperature": 61}
    head, row = table_text([busy_rank(0, collectives_per_second=240.4, **gpu)]).splitlines()
    assert head.split() == ["rank", "state", "cell", "rate", "GPU", "GPU", "memory", "°C"]
    assert row.split("  ")[-3:] == ["97 %", "12.3 GB of 80.0 GB", "61"] and "240 collectives/s" in row


def test_a_function_of_another_cell_is_named_with_that_cell() -> None:
    place = dataclasses.replace(PLACE, cell=2)
    assert table_text([busy_rank(0, place=place)]).endswith("  backward, cell [2] line 2: loss.backward()")


def test_long_lines_are_cut_in_text_but_not_html() -> None:
    place = dataclasses.replace(PLACE, source="x = " + " + ".join(["y"] * 40))
    assert re.search(r"x = y \+.*…$", table_text([busy_rank(0, place=place)]))
    assert place.source in table_html([busy_rank(0, place=place)])


def test_the_page_escapes_code_and_marks_the_straggler() -> None:
    place = dataclasses.replace(PLACE, source="if a < b: f('<script>')")
    page = table_html([busy_rank(0, 0.8, place=place), busy_rank(1, 0.0, place=place)])
    assert "<script" not in page and "&lt;script&gt;" in page
    assert page.count('class="ddip-slow"') == 1 and "rank 1 is the straggler" in page
    assert 'style="--share:80"' in page and 'style="--share:0"' in page


def test_a_bar_within_a_bar_fills_a_part_of_it() -> None:
    assert 'style="--share:36"' in table_html([busy_rank(0, bars=((3, 10), (63, 100)))])
    assert "--share:" not in table_html([busy_rank(0, bars=((3, None),))]).partition("<table>")[2]


def test_the_table_says_how_to_continue_a_suspended_rank() -> None:
    text = table_text([busy_rank(0, state="stopped", doing="stopped (SIGSTOP); kill -CONT 7 continues it", cell=None)])
    assert text == "rank  state\n   0  stopped\nrank 0: stopped (SIGSTOP); kill -CONT 7 continues it"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (7.2, "7 s"), (59.4, "59 s"), (125, "2 min 05 s"), (7620, "2 h 07 min")],
)
def test_seconds_are_shown_in_readable_units(seconds: float, text: str) -> None:
    assert time_text(seconds) == text


# -- samples of ranks


def test_a_look_shows_the_activity_of_each_rank() -> None:
    with ScriptedGroup(3) as group:
        group.scripted.execute("1: sleep", [Recipient(group.members[1].engine, lambda message: None)], {})
        group.scripted.end_engine(group.members[2].engine, 1)
        idle, busy, ended = group.vitals(seconds=0)
    assert (idle.state, idle.seconds, idle.place) == ("idle", 0.5, None)
    assert (busy.state, busy.cell, busy.seconds, str(busy.place)) == ("busy", 1, 2.0, "cell [1] line 2")
    assert (ended.state, ended.memory) == ("ended", None)


def test_a_silent_rank_is_asked_once_until_it_answers() -> None:
    with ScriptedGroup(2) as group:
        sampler = Sampler(group.lifecycle)
        engine = group.engine(1)
        ordinary = engine.answers["process_group.rank_vitals.current_vitals"]

        def raise_deafness(every: float, keep: float) -> None:
            raise Deafness

        engine.answers["process_group.rank_vitals.current_vitals"] = raise_deafness
        for _ in range(3):
            assert [one.state for one in sampler.look()] == ["idle", "no answer"]
        assert engine.calls.count("process_group.rank_vitals.current_vitals") == 1
        engine.answers["process_group.rank_vitals.current_vitals"] = ordinary
        sampler._asked[engine.number].set_result(engine.answer(vitals.on_rank.current_vitals(1.0, 1.0)))
        assert [one.state for one in sampler.look()] == ["idle", "idle"]


def test_a_rank_that_fails_to_answer_is_asked_later() -> None:
    with ScriptedGroup(1) as group:
        sampler = Sampler(group.lifecycle)
        assert [one.state for one in sampler.look()] == ["idle"]
        ordinary = group.engine(0).answers["process_group.rank_vitals.current_vitals"]
        group.engine(0).answers["process_group.rank_vitals.current_vitals"] = lambda every, keep: 1 / 0
        assert [one.state for one in sampler.look()] == ["no answer"]
        group.engine(0).answers["process_group.rank_vitals.current_vitals"] = ordinary
        assert [one.state for one in sampler.look()] == ["idle"]


def test_the_last_answer_stands_in_for_a_slightly_late_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedGroup(1) as group:
        sampler = Sampler(group.lifecycle)
        sampler.look()

        def raise_deafness(every: float, keep: float) -> None:
            raise Deafness

        group.engine(0).answers["process_group.rank_vitals.current_vitals"] = raise_deafness
        assert [one.state for one in sampler.look()] == ["idle"]
        monkeypatch.setattr(vitals, "LATE_SECONDS", 0.0)
        assert [one.state for one in sampler.look()] == ["no answer"]


def test_a_watch_follows_restarts_changes_and_the_end() -> None:
    with ScriptedGroup(2) as group:
        sampler = Sampler(group.lifecycle)
        sampler.look()
        group.restart()
        assert [one.state for one in sampler.look()] == ["idle", "idle"]
        group.change(Request(n=3))
        assert [one.rank for one in sampler.look()] == [0, 1, 2]
    with pytest.raises(GroupError):
        sampler.look()


def test_an_idle_rank_with_a_computing_thread_shows_its_use() -> None:
    known = with_answer(busy_rank(0), vitals_at(1), Rates(cores=0.9), "idle")
    assert (known.state, known.cores) == ("idle", 0.9)
    assert with_answer(busy_rank(0), vitals_at(1), Rates(cores=0.02), "GPU lost").cores is None


# -- the rank's side


@pytest.mark.parametrize(
    ("uuid", "visible", "index", "name"),
    [
        ("5c1e", "3,1", 0, "GPU-5c1e"),
        ("GPU-5c1e", None, 0, "GPU-5c1e"),
        ("", None, 2, 2),
        ("", "3,1", 1, 1),
        ("", "3,1", 0, 3),
        ("", "GPU-77", 0, "GPU-77"),
    ],
)
def test_the_driver_is_asked_for_the_gpu_that_cuda_means(
    uuid: str, visible: str | None, index: int, name: str | int
) -> None:
    assert nvml.device_name(uuid, visible, index) == name


class SimulatedDriver:
    """A stand-in for ``pynvml`` with given values."""

    NVML_TEMPERATURE_GPU = 0
    NVMLError = KeyError

    def __init__(self, temperature: int | None) -> None:
        self.temperature = {0: temperature} if temperature is not None else {}

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        return SimpleNamespace(gpu=87, memory=12)

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(used=12, total=80)

    def nvmlDeviceGetTemperature(self, handle: str, sensor: int) -> int:
        return self.temperature[sensor]


@pytest.mark.parametrize("temperature", [61, None])
def test_the_answer_of_the_driver_is_read(temperature: int | None) -> None:
    wanted: DeviceFigures = {"use": 0.87, "memory": 12, "total": 80, "temperature": temperature}
    assert nvml.read_figures(SimulatedDriver(temperature), "a handle") == wanted
    known = with_answer(busy_rank(0), vitals_at(1, device=wanted), Rates(), "idle")
    assert (known.gpu_use, known.gpu_memory, known.gpu_memory_total) == (0.87, 12, 80)
    assert known.gpu_temperature == temperature


def test_on_the_cpu_no_driver_is_asked() -> None:
    assert nvml.Driver().figures() is None


@pytest.mark.parametrize(
    ("text", "bars"),
    [
        ("\r 63%|██████▎   | 63/100 [00:01<00:00, 49.9it/s]", [(63, 100)]),
        ("epoch 2\n\r|-----| 12.50% [5/40 00:01<00:07 0.32]", [(5, 40)]),
        ("\r 63%|██████▎   | 63/100 [00:01<00:00]\ndone 1/2\n", []),
        ('<progress max="3" value="1"></progress> 33.33% [1/3 00:00&lt;00:00]', [(1, 3)]),
        ("loss 0.3 [1/2 of it]", []),
        ("", []),
    ],
)
def test_the_bar_written_last_is_read(text: str, bars: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankStream, "last_text", text)
    assert on_the_rank.list_bars() == bars
