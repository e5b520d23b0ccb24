"""Decisions about ranks and devices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from ddip.cluster import ssh
from ddip.errors import BadInput
from ddip.group.members.placement import (
    DeviceBinding,
    GroupSpec,
    HostDevices,
    HostRequest,
    Request,
    check_ranks,
    match_engines,
    parse_count,
    parse_gpus,
    parse_hosts,
    place_group,
)
from ddip.notebook.arguments import parse_ranks


def resolve_request(request: Request, gpus: int) -> GroupSpec:
    """Resolve a request on a machine with `gpus` GPUs."""
    return place_group(request, [HostDevices("", gpus)])


def on_cpu(count: int) -> GroupSpec:
    return resolve_request(Request(n=count), 0)


def on_gpus(*gpus: int) -> GroupSpec:
    return resolve_request(Request(gpus=gpus), 8)


def new_bindings(made: GroupSpec) -> list[DeviceBinding]:
    """Return the device bindings of the engines that a new group starts."""
    return [DeviceBinding(made.visible(), gpu) for gpu in made.gpus]


def test_a_count_is_a_number_from_1() -> None:
    assert parse_count("3") == 3
    for typed in ("0", "two", "-1", "1.5", ""):
        with pytest.raises(BadInput, match=f"^-n {typed}: "):
            parse_count(typed)


@pytest.mark.parametrize(
    ("words", "gpus"),
    [
        (["all"], [0, 1, 2, 3]),
        (["0,2,3"], [0, 2, 3]),
        (["3", "1"], [3, 1]),
        (["3,", "1"], [3, 1]),
        (["0,0"], [0, 0]),
        (["2"], [2]),
    ],
)
def test_gpus_come_in_the_order_given_with_gaps_and_twice(words: list[str], gpus: list[int]) -> None:
    assert parse_gpus(words, 4) == gpus


@pytest.mark.parametrize(
    ("words", "available", "fact"),
    [
        (["99"], 4, "GPU 99; .*GPU 0 to 3"),
        (["0,1"], 1, "GPU 1; .*only GPU 0"),
        (["0,x"], 4, "'x' .*-g 0,1, or -g all"),
        (["all", "1"], 4, "'all' "),
        (["-1"], 4, "'-1' "),
        ([","], 4, "-g 0,1, or -g all"),
        (["0"], 0, "%makedip -n 2"),
        (["all"], 0, "%makedip -n 2"),
    ],
)
def test_invalid_gpus_are_named(words: list[str], available: int, fact: str) -> None:
    with pytest.raises(BadInput, match=f"^-g {' '.join(words)}: .*{fact}"):
        parse_gpus(words, available)


def test_ranks_keep_the_order_typed_each_once() -> None:
    assert parse_ranks(["2,0,2"], 4, "-r") == [2, 0]
    assert parse_ranks(["1-3"], 4, "-r") == [1, 2, 3]
    assert parse_ranks(["0", "2"], 4, "-r") == [0, 2]
    assert parse_ranks(["all"], 3, "-S") == [0, 1, 2]


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["9"], "rank 9; .*ranks 0 to 3"),
        (["2-9"], "rank 4; "),
        (["x"], "'x' .*0 to 3: .*-r 0, -r 0,1 or -r all"),
        (["1-"], "'1-' "),
        (["3-1"], "'3-1' "),
        (["3-1,0"], "'3-1' "),
        (["-1"], "'-1' "),
    ],
)
def test_invalid_ranks_are_named(words: list[str], fact: str) -> None:
    with pytest.raises(BadInput, match=f"^-r {' '.join(words)}: .*{fact}"):
        parse_ranks(words, 4, "-r")


def test_a_group_of_one_has_only_rank_0() -> None:
    with pytest.raises(BadInput, match="^-r 1: .*only rank 0"):
        parse_ranks(["1"], 1, "-r")


def test_the_default_is_all_gpus_or_two_cpu_ranks() -> None:
    assert resolve_request(Request(), 3) == GroupSpec((0, 1, 2), "cpu:gloo,cuda:nccl")
    assert resolve_request(Request(), 0) == GroupSpec((None, None), "gloo")


def test_a_count_asks_for_the_cpu_even_with_gpus() -> None:
    assert resolve_request(Request(n=3), 8).gpus == (None, None, None)


def test_two_ranks_on_one_gpu_use_gloo_and_say_so() -> None:
    shared = resolve_request(Request(gpus=(0, 0)), 1)
    assert shared.backend == "gloo"
    assert "two ranks share a GPU, which nccl does not support" in shared.notice
    assert resolve_request(Request(gpus=(0, 1)), 2).notice == ""


def test_a_requested_backend_is_used() -> None:
    assert resolve_request(Request(n=2, backend="mpi"), 0).backend == "mpi"
    assert resolve_request(Request(gpus=(0, 1), backend="nccl"), 2).backend == "nccl"


def test_nccl_without_a_gpu_for_each_rank_is_refused() -> None:
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(BadInput, match=f"-b {backend}: .*on the CPU"):
            resolve_request(Request(n=2, backend=backend), 2)
        with pytest.raises(BadInput, match=f"-b {backend}: .*share a GPU"):
            resolve_request(Request(gpus=(0, 0), backend=backend), 1)


def test_a_count_that_differs_from_the_gpus_is_refused() -> None:
    with pytest.raises(BadInput, match="^-n 3 .*-g .*2 GPUs"):
        resolve_request(Request(n=3, gpus=(0, 1)), 4)
    assert resolve_request(Request(n=2, gpus=(0, 1)), 4).size == 2


def test_calls_from_python_are_also_checked() -> None:
    with pytest.raises(BadInput, match="^-g 5: .*GPU 5"):
        resolve_request(Request(gpus=(5,)), 2)
    for n in (-1, 0):
        with pytest.raises(BadInput, match=f"-n {n}"):
            resolve_request(Request(n=n), 0)
    with pytest.raises(BadInput, match="^-g : .*-g all"):
        resolve_request(Request(gpus=()), 2)


def test_the_device_of_a_rank_is_numbered_by_local_rank() -> None:
    gaps = on_gpus(0, 2, 3)
    assert gaps.visible() == (0, 2, 3)
    assert [gaps.device(rank) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [gaps.device_name(rank) for rank in range(3)] == ["GPU 0", "GPU 2", "GPU 3"]
    order = on_gpus(3, 1)
    assert (order.visible(), order.device(0), order.device_name(0)) == ((3, 1), "cuda:0", "GPU 3")
    shared = on_gpus(1, 1, 0)
    assert [shared.device(rank) for rank in range(3)] == ["cuda:0", "cuda:0", "cuda:1"]
    assert on_cpu(1).device(0) == on_cpu(1).device_name(0) == "cpu"


def test_engines_on_the_cpu_stay_in_rank_order() -> None:
    assert match_engines(new_bindings(on_cpu(2)), on_cpu(3)) == [0, 1, None]
    assert match_engines(new_bindings(on_cpu(3)), on_cpu(1)) == [0]


def test_engines_keep_their_gpu_only_as_their_local_rank() -> None:
    assert match_engines(new_bindings(on_gpus(0, 1)), on_gpus(0, 1, 2)) == [0, 1, None]
    assert match_engines(new_bindings(on_gpus(0, 1, 2)), on_gpus(0, 1)) == [0, 1]
    assert match_engines(new_bindings(on_gpus(0, 1)), on_gpus(1, 0)) == [None, None]
    assert match_engines(new_bindings(on_gpus(0, 2)), on_gpus(0, 3)) == [0, None]
    assert match_engines(new_bindings(on_gpus(0, 0)), on_gpus(0)) == [0]
    assert match_engines(new_bindings(on_gpus(0)), on_gpus(0, 0)) == [0, None]


def test_engines_do_not_move_between_cpu_and_gpu() -> None:
    assert match_engines(new_bindings(on_cpu(2)), on_gpus(0, 1)) == [None, None]
    assert match_engines(new_bindings(on_gpus(0, 1)), on_cpu(2)) == [None, None]


def test_options_that_are_not_given_stay_unchanged() -> None:
    old = Request(gpus=(0, 1), backend="gloo", app="fastai")
    assert Request().after(old) == old
    assert Request(app="other").after(old) == Request(gpus=(0, 1), backend="gloo", app="other")
    assert Request(backend="nccl").after(old) == Request(gpus=(0, 1), backend="nccl", app="fastai")
    assert Request(n=3).after(old) == Request(n=3, app="fastai")


def test_ranks_of_a_program_are_taken_in_the_order_given() -> None:
    assert check_ranks([2, 0], 3, "ranks") == [2, 0]
    assert check_ranks(range(3), 3, "ranks") == [0, 1, 2]
    assert check_ranks({np.int64(1)}, 3, "ranks") == [1]
    assert check_ranks([], 3, "see") == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([0, 9], r"ranks=\[0, 9\]: .*rank 9; .*0 to 2"),
        ([-1], r"ranks=\[-1\]: .*rank -1; "),
        ([1, 0, 1], r"ranks=\[1, 0, 1\]: rank 1 .*twice"),
        ([1.0], r"ranks=\[1.0\]: 1.0 "),
        (["1"], r"ranks=\['1'\]: '1' "),
        ([True], r"ranks=\[True\]: True "),
        ([None], r"ranks=\[None\]: None "),
        (1, r"ranks=1: .*\[0\]; "),
        ("01", r"ranks='01': .*\[0\]; "),
    ],
)
def test_invalid_ranks_of_a_program_are_named(given: object, said: str) -> None:
    with pytest.raises(BadInput, match=f"^{said}"):
        check_ranks(given, 3, "ranks")


@pytest.mark.parametrize("typed", ["h1:two", "h1:", "h1:-1", "me@h1:2x"])
def test_text_after_the_colon_of_a_host_is_a_number(typed: str) -> None:
    with pytest.raises(BadInput, match="such as (me@)?h1:4"):
        parse_hosts(typed)


@pytest.mark.parametrize("make", [lambda: parse_hosts("h1:00"), lambda: HostRequest("h1", 0)])
def test_a_host_has_at_least_one_rank(make: Callable[[], object]) -> None:
    with pytest.raises(BadInput, match="h1:0"):
        make()


def test_hosts_are_named_as_ssh_knows_them() -> None:
    found = [(host.name, host.count) for host in parse_hosts("h1,me@h2.lab:3,[::1]:2")]
    assert found == [("h1", None), ("me@h2.lab", 3), ("[::1]", 2)]
    assert ssh.agent_command("me@[::1]", "", "")[-2] == "me@::1"


@pytest.mark.parametrize("typed", ["fd00::1", "h1,fe80::2:4"])
def test_an_address_without_brackets_is_refused(typed: str) -> None:
    with pytest.raises(BadInput, match=r"brackets, such as \[fd00::1\]:4"):
        parse_hosts(typed)
