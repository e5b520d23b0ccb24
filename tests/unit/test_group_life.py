"""Start, change, repair and end of a group of scripted engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.interactiveshell import InteractiveShell

from ddip import apps
from ddip.cluster import devices
from ddip.errors import BadInput, CellError, GroupError, RankError, RequestFailed, RequestInterrupted, TransferError
from ddip.group.members.placement import Request
from ddip.group.members.places import Allocation
from ddip.group.process_group import fitness
from ddip.notebook.magics import DipMagics
from ddip.protocol import on_rank

from .conftest import NewGroup
from .scripted import Deafness, EngineEnds, ScriptedEngine, ScriptedGroup, Silence, press_stop


def join_counts(group: ScriptedGroup) -> list[int]:
    """Return how often each rank's process has joined a group."""
    return [group.engine(rank).calls.count(on_rank.join_group.target) for rank in range(group.world_size)]


def raise_error(error: BaseException) -> Callable[..., Any]:
    """Return an answer function that raises `error`."""

    def answer(*_: Any) -> None:
        raise error

    return answer


def press_stop_and_answer(answer: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
    """Return an answer function that presses the stop button first."""

    def press(*args: Any) -> Any:
        press_stop()
        return answer(*args)

    return press


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a notebook that sees two GPUs."""
    monkeypatch.setattr(devices, "gpu_names", lambda: ["0", "1"])


@pytest.fixture
def frame_app(monkeypatch: pytest.MonkeyPatch) -> None:
    """Install an app ``frame``."""
    monkeypatch.setattr(apps, "find_module", lambda name: "frame.app" if name else "")


# -- start


def test_a_group_reports_its_progress(new_group: NewGroup) -> None:
    messages: list[str] = []
    group = new_group(2, progress=lambda text, share=None: messages.append(text))
    assert messages == [
        "ddip: starting the controller",
        "ddip: 1 of 2 engines are up",
        "ddip: 2 of 2 engines are up",
        "ddip: forming a group of 2 ranks",
    ]
    assert group.describe() == "ddip: 2 ranks on the CPU, gloo"


def test_a_group_on_gpus_sees_only_the_requested_gpus(new_group: NewGroup, gpus: None) -> None:
    group = new_group(None, gpus=[1, 0])
    assert [group.engine(rank).environment["CUDA_VISIBLE_DEVICES"] for rank in range(2)] == ["1,0"] * 2
    assert group.describe() == "ddip: 2 ranks on GPU 1, 0, cpu:gloo,cuda:nccl"


def test_torch_watchdogs_end_an_nccl_rank_only_on_request(
    new_group: NewGroup, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    variables = new_group(None, gpus=[1, 0]).engine(1).environment
    assert (variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"], variables["TORCH_NCCL_RETHROW_CUDA_ERRORS"]) == ("0", "0")
    assert not variables.keys() & {"TORCH_NCCL_ENABLE_MONITORING", "NCCL_MAX_CTAS"}
    assert not [name for name in new_group(2).engine(1).environment if "NCCL" in name]


def test_two_ranks_on_one_gpu_use_nccl_if_allowed(
    new_group: NewGroup, gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BadInput, match="NCCL_MULTI_RANK_GPU_ENABLE=1"):
        new_group(None, gpus=[0, 0], backend="nccl")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    group = new_group(None, gpus=[0, 0], backend="cpu:gloo,cuda:nccl")
    assert {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "1"}.items() <= group.engine(0).environment.items()
    assert group.describe() == "ddip: 2 ranks on GPU 0, 0, cpu:gloo,cuda:nccl"


def test_ranks_on_several_slices_of_gpus_are_refused(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "gpu_names", lambda: ["MIG-1", "MIG-2"])
    with pytest.raises(BadInput, match="^2 ranks .*MIG.* -g 0, "):
        new_group(None, gpus="all")
    assert new_group(None, gpus=[1]).engine(0).environment["CUDA_VISIBLE_DEVICES"] == "MIG-2"


def _with_hello(**facts: Any) -> Callable[[ScriptedEngine], None]:
    return lambda engine: engine.hello.update(facts)  # type: ignore[typeddict-item]


@pytest.mark.parametrize(
    ("facts", "options", "kind", "text"),
    [
        ({"version": 99}, {"n": 1}, GroupError, "version 99 "),
        ({"backends": ["nccl"]}, {"n": 1}, BadInput, "-b gloo: .*'gloo'.* nccl$"),
        ({"cuda": False}, {"n": None, "gpus": "all"}, BadInput, "CUDA.* -n 2$"),
    ],
)
def test_engines_without_a_needed_ability_are_refused(
    new_group: NewGroup, gpus: None, facts: dict[str, Any], options: dict[str, Any], kind: Any, text: str
) -> None:
    with pytest.raises(kind, match=text):
        new_group(script=_with_hello(**facts), **options)


def test_a_stopped_start_says_that_there_is_no_group(new_group: NewGroup) -> None:
    with pytest.raises(RequestInterrupted, match="no group$"):
        new_group(2, script=lambda engine: press_stop())


def test_a_rank_that_cannot_join_fails_the_start(new_group: NewGroup) -> None:
    def script(engine: ScriptedEngine) -> None:
        if engine.number == 1:
            engine.answers[on_rank.join_group.target] = raise_error(OSError("no interface"))

    with pytest.raises(RequestFailed) as caught:
        new_group(2, script=script)
    assert caught.value.by_rank[1].name == "OSError"


def test_a_group_that_fails_to_form_gets_another_attempt(new_group: NewGroup) -> None:
    def script(engine: ScriptedEngine) -> None:
        join = engine.answers[on_rank.join_group.target]

        def join_fails_once(spec: Any) -> Any:
            engine.answers[on_rank.join_group.target] = join
            raise RuntimeError("a stranger has connected")

        engine.answers[on_rank.join_group.target] = join_fails_once

    assert join_counts(new_group(2, script=script)) == [2, 2]


def test_an_unknown_connection_during_the_start_is_noticed(new_group: NewGroup) -> None:
    def script(engine: ScriptedEngine) -> None:
        engine.answers[on_rank.join_group.target] = lambda spec: ([("127.0.0.1", 1, "127.0.0.1", 9)], [1])

    with pytest.raises(GroupError, match="unknown process"):
        new_group(1, script=script)


def test_a_rank_that_misses_the_start_timeout_is_named(new_group: NewGroup) -> None:
    def script(engine: ScriptedEngine) -> None:
        if engine.number == 1:
            engine.answers[on_rank.join_group.target] = raise_error(Silence())

    text = "^rank 1 did not finish forming the group in time; -t SECONDS waits longer$"
    with pytest.raises(RequestFailed, match=text) as caught:
        new_group(2, script=script, timeout=0.01)
    assert caught.value.late == [1]


def test_an_ended_group_is_empty(new_group: NewGroup) -> None:
    with new_group() as group:
        assert group.alive
    assert not group.alive
    with pytest.raises(GroupError, match=r"ddip\.Group\(\)"):
        group.run("pass")


def test_a_stopped_end_still_frees_all_resources(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    group, given_back = new_group(), list[bool]()
    monkeypatch.setattr(Allocation, "give_back", lambda _: given_back.append(True))
    stop = group.cluster.stop
    monkeypatch.setattr(group.cluster, "stop", press_stop_and_answer(stop))
    with pytest.raises((KeyboardInterrupt, RequestInterrupted)):
        group.shutdown()
    assert given_back == [True]


# -- change


def test_a_group_that_grows_keeps_its_ranks(new_group: NewGroup) -> None:
    group = new_group(2)
    before = list(group.members)
    assert not group.change(Request(n=2))
    assert group.change(Request(n=3)) and group.members[:2] == before
    assert group.change(Request(n=1)) and group.members == before[:1]
    assert group.scripted.live == {0}


def test_a_change_whose_new_rank_is_missing_keeps_the_group(new_group: NewGroup) -> None:
    group = new_group(2)
    group.script = raise_error(GroupError("timed out"))
    with pytest.raises(GroupError, match="timed out"):
        group.change(Request(n=3))
    assert group.world_size == 2 and group.scripted.live == {0, 1}
    group.run("pass")


def test_a_stopped_change_describes_the_resulting_group(new_group: NewGroup) -> None:
    group = new_group(2)
    group.script = lambda engine: press_stop()
    with pytest.raises(RequestInterrupted, match=r"unchanged \(2 ranks"):
        group.change(Request(n=3))
    group.script = lambda engine: None
    leave = group.engine(0).answers[on_rank.leave_group.target]
    group.engine(0).answers[on_rank.leave_group.target] = press_stop_and_answer(leave)
    with pytest.raises(RequestInterrupted, match=r"\([23] ranks"):
        group.change(Request(n=3))
    group.engine(0).answers[on_rank.leave_group.target] = leave
    group.run("pass")


def test_a_change_lists_the_objects_lost_with_the_former_group(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    group = new_group(2)
    group.engine(0).answers[on_rank.leave_group.target] = lambda: {
        "wrappers": 0,
        "meshes": 0,
        "subgroups": 2,
        "rpc": False,
        "gpu_lost": "",
    }
    group.change(Request(n=1))
    assert "; subgroups that were made before must be recreated" in capsys.readouterr().err
    assert on_rank.revive_wrappers.target not in group.engine(0).calls


def test_a_change_completed_by_a_repair_refuses_stale_objects(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sampler of the former size would skip a part of the data."""
    group, refused = new_group(2), list[tuple[list[int], int]]()

    def refuse_objects(marks: list[int], size: int) -> list[str]:
        refused.append((marks, size))
        return ["sampler"]

    for rank in range(2):
        group.engine(rank).answers[on_rank.rank_marks.target] = lambda rank: [7]
    group.engine(0).answers[on_rank.refuse_stale.target] = refuse_objects
    group.engine(1).answers[on_rank.join_group.target] = raise_error(OSError("no interface"))
    with pytest.raises(GroupError, match="forming the group failed: rank 1: OSError"):
        group.change(Request(n=3))
    assert group.repair() == [1] and group.world_size == 3
    group.run("pass")
    assert refused == [([7], 2)]
    assert "former group of 2 ranks, and raise errors now; recreate them: sampler" in capsys.readouterr().err


def test_wrappers_survive_if_all_ranks_have_them(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    group = new_group(2)
    for engine in (group.engine(0), group.engine(1)):
        engine.answers[on_rank.leave_group.target] = lambda: {
            "wrappers": 2,
            "meshes": 0,
            "subgroups": 1,
            "rpc": False,
            "gpu_lost": "",
        }
        engine.answers[on_rank.revive_wrappers.target] = lambda: 1
        engine.answers[on_rank.forget_lost_objects.target] = lambda: ["model"]
    group.script = lambda engine: None
    with pytest.raises(CellError):
        group.run("0: raise ValueError\n1: wait")
    group.run("pass")
    stderr = capsys.readouterr().err
    assert "the DDP wrapper was rebuilt, with rank 0's parameters and buffers on every rank; other wrappers" in stderr
    assert "wrappers in model (DDP, FSDP) and subgroups that were made before must be recreated" in stderr


def test_a_failed_revival_fails_one_cell_before_a_rebuild(new_group: NewGroup) -> None:
    group = new_group(2)
    group.engine(0).answers[on_rank.leave_group.target] = lambda: {
        "wrappers": 1,
        "meshes": 0,
        "subgroups": 0,
        "rpc": False,
        "gpu_lost": "",
    }
    group.engine(1).answers[on_rank.revive_wrappers.target] = raise_error(MemoryError("too little"))
    with pytest.raises(CellError):
        group.run("0: raise ValueError\n1: wait")
    with pytest.raises(RequestFailed) as caught:
        group.run("pass")
    assert caught.value.by_rank[1].name == "MemoryError"
    group.engine(0).answers[on_rank.leave_group.target] = lambda: {
        "wrappers": 0,
        "meshes": 0,
        "subgroups": 0,
        "rpc": False,
        "gpu_lost": "",
    }
    group.run("pass")


def test_a_change_that_cannot_form_the_group_names_the_rank(new_group: NewGroup) -> None:
    group = new_group(2)
    group.engine(1).answers[on_rank.join_group.target] = raise_error(OSError("no interface"))
    with pytest.raises(GroupError, match="rank 1: OSError.*--repair"):
        group.change(Request(n=3))
    assert group.repair() == [1]
    group.run("pass")


def test_a_restart_begins_with_new_processes(new_group: NewGroup) -> None:
    group = new_group(2)
    group.engine(0).names["x"] = 1
    group.restart(Request(n=1))
    assert group.world_size == 1 and not group.has_name("x")


# -- repair


def test_a_healthy_group_needs_no_repair(new_group: NewGroup) -> None:
    group = new_group(2)
    assert group.repair() == []
    with pytest.raises(BadInput, match="^--from 0 x: .*%dipull"):
        group.repair(["x"], 0)


def test_the_source_of_a_repair_must_live(new_group: NewGroup) -> None:
    group = new_group(2)
    group.scripted.end_engine(1, -9)
    with pytest.raises(BadInput, match="rank 1 is lost itself"):
        group.repair(["x"], 1)
    with pytest.raises(TransferError, match="rank 0 .*variable x;"):
        group.repair(["x"], 0)
    assert group.repair() == [1]


def test_a_rank_that_fails_every_group_is_replaced(new_group: NewGroup) -> None:
    group = new_group(3)
    group.engine(1).answers[on_rank.join_group.target] = raise_error(OSError("no interface"))
    group.lifecycle.parts.manager.healthy = False
    with pytest.raises(GroupError, match="rank 1: OSError.*--repair"):
        group.run("pass")
    assert group.repair() == [1]
    group.run("pass")


def test_a_helper_reveals_a_rank_that_spoils_every_group(new_group: NewGroup) -> None:
    group = new_group(3)
    engine = group.engine(2)
    join = engine.answers[on_rank.join_group.target]

    def join_only_alone(spec: Any) -> Any:
        if spec.world_size > 1:
            raise OSError("not with others")
        return join(spec)

    engine.answers[on_rank.join_group.target] = join_only_alone
    group.lifecycle.parts.manager.healthy = False
    assert group.repair() == [2]
    group.run("pass")


def test_a_new_rank_gets_settings_on_which_the_others_agree(
    new_group: NewGroup, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    group, taken = new_group(3), list[dict[str, bytes]]()
    for rank, mine in ((0, b"0"), (1, b"1")):
        found = {"$LR": b"3", "$MINE": mine, "unchanged working directory": b"/home"}
        group.engine(rank).answers[on_rank.find_changed_settings.target] = lambda found=found: found

    def take_over(_: ScriptedEngine, changed: dict[str, bytes]) -> list[tuple[str, str]]:
        taken.append(changed)
        return [("LR", ""), ("the working directory /x", "FileNotFoundError: no such directory")]

    monkeypatch.setattr(ScriptedEngine, "take_over_settings", take_over)
    with pytest.raises(CellError):
        group.run("2: die")
    assert group.repair() == [2]
    assert taken == [{"$LR": b"3", "unchanged working directory": b"/home"}]
    stderr = capsys.readouterr().err
    assert "rank 2 could not copy the working directory /x from rank 0: FileNotFoundError: no such directory" in stderr
    assert "MINE differed on ranks 0, 1, so ddip did not set it on rank 2" in stderr


@pytest.mark.parametrize("lost", [1, 2])
def test_a_new_rank_gets_random_numbers_that_several_others_share(
    new_group: NewGroup, lost: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copy no random numbers if one other rank is left: the lost rank may have drawn different ones."""
    group, taken = new_group(lost + 1), list[dict[str, bytes]]()
    for rank in range(lost):
        found = {"torch's random numbers": b"7", "Python's random numbers": b"%d" % rank}
        group.engine(rank).answers[on_rank.find_changed_settings.target] = lambda found=found: found
    monkeypatch.setattr(ScriptedEngine, "take_over_settings", lambda _, changed: taken.append(changed) or [])
    with pytest.raises(CellError):
        group.run(f"{lost}: die")
    assert group.repair() == [lost]
    stderr = capsys.readouterr().err
    assert taken == [{} if lost == 1 else {"torch's random numbers": b"7"}]
    assert ("rank 2 got torch's random numbers from ranks 0, 1" in stderr) == (lost == 2)
    assert ("rank 1 drew new random numbers at the start: if all ranks" in stderr) == (lost == 1)
    assert "differed" not in stderr


def test_a_rank_on_which_every_cell_fails_is_replaced(new_group: NewGroup) -> None:
    group = new_group(2)
    run = group.engine(1).run

    def run_fails(request: Any, word: str, rest: str, listener: Any) -> None:
        run(request, "raise", "NameError __import__", listener)

    group.engine(1).run = run_fails  # type: ignore[method-assign]
    assert group.repair() == [1]


def test_a_stopped_repair_replaces_no_rank(new_group: NewGroup) -> None:
    group = new_group(2)
    group.scripted.end_engine(1, -9)
    group.script = lambda engine: press_stop()
    with pytest.raises(RequestInterrupted, match="rank 1 not replaced"):
        group.repair()
    group.script = lambda engine: None
    assert group.repair() == [1]


@pytest.mark.timeout(20)  # without the check, it took as long as a group may take to form
def test_a_repair_ends_when_the_controller_does(new_group: NewGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitness, "CELL", "deaf")
    group = new_group(2)

    def end_controller() -> None:
        while group.scripted.engines[0].running is None:
            time.sleep(0.001)
        group.scripted.controller_ended = True

    thread = threading.Thread(target=end_controller)
    thread.start()
    with pytest.raises(GroupError, match="controller.*%makedip -r"):
        group.repair()
    thread.join()


# -- app


def test_an_app_is_prepared_released_and_given_commands(new_group: NewGroup, frame_app: None) -> None:
    group = new_group(2, app="frame")
    assert group.command("status") == "frame.app: status"
    group.change(Request(n=1))
    assert group.engine(0).calls.count(on_rank.release_app.target) == 1
    assert group.engine(0).calls.count(on_rank.prepare_app.target) == 2
    assert group.engine(0).also == ["frame.app"]


def test_a_command_needs_an_app(new_group: NewGroup) -> None:
    with pytest.raises(BadInput, match="%makedip -a NAME"):
        new_group(1).command("status")


def test_an_app_that_fails_on_all_ranks_is_left_out(new_group: NewGroup, frame_app: None) -> None:
    group = new_group(2)
    for rank in range(2):
        group.engine(rank).answers[on_rank.prepare_app.target] = raise_error(ImportError("no frame"))
    with pytest.raises(GroupError, match="ImportError.*without the app"):
        group.change(Request(app="frame"))
    group.run("pass")


def test_an_app_that_fails_on_one_rank_suggests_a_repair(new_group: NewGroup, frame_app: None) -> None:
    group = new_group(2)
    group.engine(1).answers[on_rank.prepare_app.target] = raise_error(ImportError("no frame"))
    with pytest.raises(GroupError, match="rank 1: ImportError.*--repair"):
        group.change(Request(app="frame"))
    assert group.repair() == [1]
    group.run("pass")


def test_a_command_that_fails_on_some_ranks_rebuilds_the_group(new_group: NewGroup, frame_app: None) -> None:
    group = new_group(2, app="frame")
    group.engine(1).answers[on_rank.run_app_command.target] = raise_error(ValueError("odd"))
    before = join_counts(group)
    with pytest.raises(RequestFailed) as caught:
        group.command("status")
    assert caught.value.by_rank[1].name == "ValueError"
    group.run("pass")
    assert join_counts(group) == [count + 1 for count in before]


# -- requests to ranks


def test_a_stopped_request_frees_the_ranks(new_group: NewGroup, frame_app: None) -> None:
    group = new_group(2, app="frame")
    group.engine(0).answers[on_rank.run_app_command.target] = press_stop_and_answer()
    group.engine(1).answers[on_rank.run_app_command.target] = raise_error(Silence())
    with pytest.raises(RequestInterrupted, match="on rank 1$"):
        group.command("status")
    group.run("pass")


def test_a_rank_that_ignores_a_stopped_request_is_named(new_group: NewGroup, impatient: None, frame_app: None) -> None:
    group = new_group(2, app="frame")
    group.engine(0).answers[on_rank.run_app_command.target] = press_stop_and_answer()
    group.engine(1).answers[on_rank.run_app_command.target] = raise_error(Deafness())
    with pytest.raises(RequestInterrupted, match="(?s)on rank 1\n.*--repair"):
        group.command("status")
    with pytest.raises(GroupError, match="^rank 1 .*command"):
        group.run("pass")
    assert group.info()[1].state == "busy"
    assert group.repair() == [1]


@pytest.mark.parametrize("ends", [True, False], ids=["it ends", "it fails"])
def test_an_answer_just_after_the_timeout_counts_as_late(
    new_group: NewGroup, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """The answer may arrive at any moment, on another thread."""
    group = new_group(2)
    group.engine(1).answers[on_rank.check_group.target] = raise_error(Silence())
    problems = group.ranks._errors_of

    def read_errors_then_answer(requests: Any) -> Any:
        found = problems(requests)
        if group.engine(1).running is not None:
            group.scripted.end_engine(1, 1) if ends else group.engine(1).interrupt(None)
        return found

    monkeypatch.setattr(group.ranks, "_errors_of", read_errors_then_answer)
    monkeypatch.setattr(group.ranks, "_wait_for_all", lambda *_: None)
    with pytest.raises(RequestFailed) as caught:
        group.ranks.ask_each(dict.fromkeys([0, 1], on_rank.check_group()), 0.0)
    assert caught.value.late == [1] and caught.value.by_rank == {}


def test_only_the_rank_that_ended_is_named(new_group: NewGroup) -> None:
    """The others lost their connection to it."""
    group = new_group(2)
    group.engine(0).answers[on_rank.check_group.target] = raise_error(RuntimeError("Connection closed by peer"))
    group.engine(1).answers[on_rank.check_group.target] = raise_error(EngineEnds())
    with pytest.raises(RequestFailed, match=r"failed: rank 1: RankEnded: .*\(SIGKILL\)") as caught:
        group.ranks.ask([0, 1], on_rank.check_group())
    assert sorted(caught.value.by_rank) == [0, 1]


def test_a_rank_that_ends_during_a_request_is_reported(new_group: NewGroup, frame_app: None) -> None:
    group = new_group(2, app="frame")
    group.engine(1).answers[on_rank.run_app_command.target] = raise_error(EngineEnds())
    with pytest.raises(RequestFailed) as caught:
        group.command("status")
    assert caught.value.by_rank[1].name == "RankEnded" and "SIGKILL" in caught.value.by_rank[1].message
    with pytest.raises(GroupError, match="^rank 1: "):
        group.command("status")


def test_an_interrupted_completion_is_not_waited_for(new_group: NewGroup) -> None:
    group = new_group(1)
    group.engine(0).names["model"] = 1
    assert group.try_call(on_rank.complete_code("mo", 2), 0.01) == {"matches": ["model"]}
    group.engine(0).answers[on_rank.complete_code.target] = raise_error(Silence())
    assert group.try_call(on_rank.complete_code("mo", 2), 0.01) is None
    group.run("pass")
    assert group.scripted.interrupted == [0]


def test_a_rank_that_lost_its_heartbeat_is_reported(new_group: NewGroup) -> None:
    group = new_group(1)
    group.scripted.engines.clear()
    error = group.ranks.describe_end(0)
    assert isinstance(error, RankError) and "lost its heartbeat" in error.message


# -- figures


def test_the_table_of_ranks_shows_busy_and_ended_ranks(new_group: NewGroup) -> None:
    group = new_group(3)
    group.scripted.end_engine(2, 1)
    group.engine(1).answers[on_rank.rank_figures.target] = raise_error(Silence())
    infos = group.info()
    assert [info.state for info in infos] == ["idle", "no answer", "ended"]
    assert infos[0].memory == 1000 and infos[0].seconds == 0.5


def test_the_group_collects_stacks_of_all_ranks(new_group: NewGroup) -> None:
    group = new_group(3)
    group.scripted.end_engine(2, 1)
    group.engine(1).answers[on_rank.whole_stack.target] = raise_error(Silence())
    stacks = group.stacks()
    assert stacks[0] is not None and stacks[0].threads == {"main": "a stack"}
    assert stacks[1] is None
    assert stacks[2] is not None and str(stacks[2].place) == "ended"


def test_garbage_collection_is_turned_off_on_every_rank(new_group: NewGroup) -> None:
    group = new_group(2)
    group.set_collect(False)
    assert [group.engine(rank).calls[-1] for rank in range(2)] == [on_rank.set_collect.target] * 2


def test_a_restart_repeats_one_that_has_failed(shell: InteractiveShell, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(engine: object) -> None:
        raise GroupError("h2: No route to host")

    monkeypatch.setattr("ddip.group.group.Group", ScriptedGroup)
    magics = DipMagics(shell)
    try:
        magics.makedip("-n 3")
        assert isinstance(magics.group, ScriptedGroup)
        magics.group.script = fail
        with pytest.raises(GroupError):
            magics.makedip("-r")
        assert magics.group is None
        magics.makedip("-r")
        assert magics.group.world_size == 3
    finally:
        magics.end_group()
        magics.hints.close()
