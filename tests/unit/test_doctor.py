"""What the doctor concludes from what it has read: no processes, no GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddip
from ddip.cluster import boot
from ddip.cluster.ownership import Run
from ddip.cluster.processes import Proc
from ddip.doctor import cgroups, command, gpus, machine, report, software, torch_build, torch_probe, trial
from ddip.doctor.cgroups import Bound
from ddip.doctor.gpus import Gpu, GpuUser, Smi
from ddip.doctor.report import Check, failed, ok, warning
from ddip.doctor.torch_build import Facts
from ddip.group.engines import WATCHDOG

GB, NO_LIMIT = 10**9, float("inf")


# -- what is printed


def test_a_check_is_a_line_and_what_to_do_stands_below_it() -> None:
    assert str(ok("loopback", "lo is up")) == "ok       loopback       lo is up"
    assert str(warning("folder", "a.py\nb.py", "rename them")).splitlines() == [
        "warning  folder         a.py",
        "                        b.py",
        "                        -> rename them",
    ]


def test_only_a_failed_check_is_an_exit_code() -> None:
    fine, hint, bad = ok("a", ""), warning("b", "x", "y"), failed("c", "x", "y")
    assert [report.exit_code(checks) for checks in ([], [fine, hint], [fine, bad])] == [0, 0, 1]
    assert report.summary([fine, hint, bad, bad], 1.25) == "4 checks in 1.2 s: 2 failed, 1 warning"
    assert report.summary([fine, fine], 1) == "2 checks in 1.0 s: all ok"


def test_the_keys_of_the_json_object_stay() -> None:
    told = json.loads(report.as_json([failed("torch", "none", "install it")], 2.0))
    assert told == {
        "schema": 1,
        "ddip": ddip.__version__,
        "exit_code": 1,
        "seconds": 2.0,
        "checks": [{"name": "torch", "status": "failed", "found": "none", "advice": "install it"}],
    }


def test_a_check_that_raises_has_failed_and_the_others_go_on() -> None:
    def missing() -> Check:
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    def two() -> Iterator[Check]:
        yield ok("a", "")
        raise OSError(5, "Input/output error")

    (one,) = command.guarded("memory", missing)
    assert (
        one.status == "failed"
        and "No module named 'psutil'" in one.found
        and one.advice.startswith("install psutil again")
    )
    first, second = command.guarded("b", two)
    assert (first.status, second.status, second.name) == ("ok", "failed", "b") and "Input/output" in second.found


# -- the machine


@pytest.mark.parametrize(("name", "status"), [("linux", "ok"), ("darwin", "ok"), ("win32", "failed")])
def test_the_platform(name: str, status: str) -> None:
    check = machine.judge_platform(name, "System 1, x86_64", 4)
    assert check.status == status and "4 cores" in check.found and ("WSL" in check.advice) == (status == "failed")


@pytest.mark.parametrize(
    ("name", "figures", "status", "advice"),
    [
        ("linux", (25 * GB, 20 * GB), "ok", ""),
        ("linux", (64 << 20, 64 << 20), "warning", "--shm-size"),
        ("linux", (25 * GB, 0), "warning", "remove what ended programs have left"),
        ("linux", None, "failed", "--shm-size"),
        ("darwin", None, "ok", ""),
    ],
)
def test_shared_memory(name: str, figures: tuple[int, int] | None, status: str, advice: str) -> None:
    check = machine.judge_shared_memory(name, figures)
    assert check.status == status and advice in check.advice


@pytest.mark.parametrize(
    ("available", "bound", "address_space", "status", "found"),
    [
        (8 * GB, None, NO_LIMIT, "ok", "16.0 GB, 8.0 GB available"),
        (8 * GB, Bound(64 * GB, 0), NO_LIMIT, "ok", "16.0 GB, 8.0 GB available"),
        (8 * GB, Bound(2 * GB, GB), NO_LIMIT, "warning", "the control group allows 2.0 GB, 1.0 GB free"),
        (8 * GB, Bound(GB, GB), NO_LIMIT, "failed", "0 B free"),
        (GB // 5, None, NO_LIMIT, "failed", "200 MB available"),
        (8 * GB, None, 4e9, "warning", "ulimit -v 4.0 GB"),
    ],
)
def test_memory(available: int, bound: Bound | None, address_space: float, status: str, found: str) -> None:
    check = machine.judge_memory(16 * GB, available, bound, address_space)
    assert check.status == status and found in check.found


def test_limits() -> None:
    fine = machine.judge_limits(1024, NO_LIMIT, None, {2: "", 8: ""})
    assert str(fine) == "ok       limits         ulimit -n 1024, -u unlimited"
    for_two = machine.judge_limits(60, 4000, None, {2: "2 ranks: too few; raise it", 8: "8 ranks: too few; raise it"})
    assert for_two.status == "failed" and for_two.found.endswith("; 2 ranks: too few") and for_two.advice == "raise it"
    for_many = machine.judge_limits(180, 4000, None, {2: "", 8: "8 ranks: too few; raise it"})
    assert for_many.status == "warning" and "8 ranks" in for_many.found
    assert machine.judge_limits(1024, 4000, Bound(1000, 850), {2: ""}).status == "warning"
    tight = machine.judge_limits(1024, 4000, Bound(100, 90), {2: ""})
    assert tight.status == "failed" and "--pids-limit" in tight.advice and "10 free" in tight.found


@pytest.mark.parametrize(
    ("is_up", "error", "status", "said"),
    [
        (True, "", "ok", "lo is up"),
        (None, "", "failed", "no interface lo"),
        (False, "", "failed", "ip link set lo up"),
        (True, "timed out", "failed", "fails: timed out"),
    ],
)
def test_loopback(is_up: bool | None, error: str, status: str, said: str) -> None:
    check = machine.judge_loopback("lo", is_up, error)
    assert check.status == status and said in str(check)


def test_loopback_works_here() -> None:
    machine.talk_over_loopback()


def test_runs_of_notebooks_that_ended_are_listed() -> None:
    alive, dead = Run(Path("/run/a"), Proc(5, 1.0), True, 4), Run(Path("/run/b"), Proc(7, 1.0), False, 3)
    assert machine.judge_runs([]).status == machine.judge_runs([alive]).status == "ok"
    assert machine.judge_runs([alive]).found == "1 other notebook has a group"
    check = machine.judge_runs([alive, dead])
    assert check.status == "warning" and "%makedip" in check.advice
    assert check.found.splitlines() == [
        "1 run is left of notebooks that ended; 1 other notebook has a group",
        "/run/b, of process 7, which ended; 3 processes of it run",
    ]


# -- control groups


def write(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_limit_of_all_groups_around_the_process_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    write(root / "outer" / "inner", memory__max="max", memory__current=10, pids__max=300, pids__current=7)
    write(root / "outer", memory__max=1000, memory__current=700, memory__stat="anon 1\ninactive_file 200")
    assert cgroups.bound("memory", root, membership) == Bound(1000, 500)
    assert cgroups.bound("pids", root, membership) == Bound(300, 7)


def test_in_a_container_the_path_outside_is_not_there_and_the_root_is_ours(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/docker/abc\n")
    write(root, memory__max=1000, memory__current=100)
    assert cgroups.bound("memory", root, membership) == Bound(1000, 100)


def test_version_1_has_a_tree_for_each_controller(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("4:memory:/a\n3:cpu,pids:/b\n0::/\nnonsense\n")
    write(root / "memory" / "a", memory__limit_in_bytes=(1 << 63) - 4096, memory__usage_in_bytes=5)
    write(root / "cpu,pids" / "b", pids__max=9, pids__current=10)
    assert cgroups.bound("memory", root, membership) is None
    found = cgroups.bound("pids", root, membership)
    assert found == Bound(9, 10) and found.free == 0
    assert cgroups.bound("memory", root, tmp_path / "missing") is None


# -- GPUs

H100 = "0, GPU-aa, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4\n1, GPU-bb, NVIDIA H100, 550.54.15, 81559, 60000\n"
USERS = "GPU-bb, 4711, /usr/bin/python3, 59000\nGPU-bb, 4712, my, odd, name, [N/A]\n"


def test_gpus_and_their_users_are_read() -> None:
    one, two = gpus.parse(H100, USERS)
    assert one == Gpu(0, "GPU-aa", "NVIDIA H100 80GB HBM3", "550.54.15", 81559 << 20, 4 << 20)
    assert two.users == (GpuUser(4711, "python3", 59000 << 20), GpuUser(4712, "my, odd, name", None))


@pytest.mark.parametrize(
    ("gpu_text", "process_text", "count"),
    [
        ("", "", 0),
        ("No devices were found\n", "", 0),
        ("0, GPU-aa, H100\n", "", 0),
        ("0, GPU-aa, H100, 550, [N/A], [Insufficient Permissions]\n", "No running processes found\n", 1),
        ("0, GPU-aa, H100, 550, 1, 1\n\n", "GPU-aa, [N/A], [Not Found], 5\n, ,\nGPU-zz, 1, x, 1\n", 1),
    ],
)
def test_what_is_no_table_is_passed_over(gpu_text: str, process_text: str, count: int) -> None:
    found = gpus.parse(gpu_text, process_text)
    assert len(found) == count and all(gpu.users == () for gpu in found)


@pytest.mark.parametrize(
    ("smi", "in_machine", "counted", "visible", "statuses", "said"),
    [
        (None, 0, 0, [], ["ok", "ok"], "ranks run on the CPU"),
        (None, 2, 0, [], ["warning", "ok"], "2 NVIDIA GPUs are built in"),
        (None, 1, 1, ["0"], ["ok", "ok"], "nvidia-smi is not"),
        (Smi(error="nvidia-smi failed"), 1, 0, [], ["failed", "ok"], "install the driver again"),
        (Smi(gpus.parse(H100, "")[:1]), 2, 2, ["0", "1"], ["ok", "ok"], "2 GPUs, 2 visible to ddip"),
        (Smi(gpus.parse(H100, USERS)), 2, 2, ["0", "1"], ["ok", "warning"], "by pid 4711 (python3, 61.9 GB), pid 4712"),
        (Smi(gpus.parse(H100, "")), 2, 2, [], ["ok", "warning"], "CUDA_VISIBLE_DEVICES hides all of 2"),
        (Smi(gpus.parse(H100, "")), 2, 0, [], ["ok", "failed"], "libnvidia-ml.so.1"),
    ],
)
def test_the_driver_and_the_use_of_gpus(
    smi: Smi | None, in_machine: int, counted: int, visible: list[str], statuses: list[str], said: str
) -> None:
    checks = gpus.judge_gpus(smi, in_machine, counted, visible)
    assert [check.name for check in checks] == ["driver", "gpus"]
    assert [check.status for check in checks] == statuses
    assert said in "\n".join(map(str, checks))


def test_nvidia_smi_that_fails_or_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.ask() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'could not talk to the driver'\nexit 9\n")
    program.chmod(0o755)
    assert gpus.ask() == Smi(error="nvidia-smi failed (exit code 9): could not talk to the driver")
    program.write_text("#!/bin/sh\ncase $1 in *gpu=*) echo '0, GPU-aa, H100, 550, 80, 4';; *) exit 1;; esac\n")
    assert gpus.ask() == Smi((Gpu(0, "GPU-aa", "H100", "550", 80 << 20, 4 << 20),))


def test_gpus_on_the_bus_are_counted_without_a_driver(tmp_path: Path) -> None:
    write(tmp_path / "0000:01:00.0", vendor="0x10de", **{"class": "0x030200"})
    write(tmp_path / "0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # its sound
    write(tmp_path / "0000:02:00.0", vendor="0x8086", **{"class": "0x030000"})
    (tmp_path / "broken").mkdir()
    assert gpus.built_in(tmp_path) == 1
    assert gpus.built_in(tmp_path / "none") == 0


# -- torch


def facts(**changes: object) -> Facts:
    base = {
        "version": "2.15.0+cu132",
        "cuda": "13.2",
        "hip": "",
        "backends": ["gloo", "nccl"],
        "nccl": "2.30.7",
        "gpus": 0,
        "why_no_gpu": "",
        "warnings": [],
    }
    return {**base, **changes}  # type: ignore[typeddict-item, return-value]


@pytest.mark.parametrize(
    ("changes", "count", "statuses", "said"),
    [
        ({}, 0, ["ok", "ok"], "2.15.0+cu132, built for CUDA 13.2, no GPU"),
        ({"gpus": 2}, 2, ["ok", "ok"], "CUDA 13.2, 2 GPUs"),
        ({"cuda": "", "backends": ["gloo"]}, 0, ["ok", "ok"], "built without CUDA"),
        ({"cuda": "", "backends": ["gloo"]}, 1, ["failed", "failed"], "there is 1 GPU"),
        ({"why_no_gpu": "the driver is too old"}, 2, ["failed", "ok"], "cannot use: the driver is too old"),
        ({"gpus": 1, "warnings": ["sm_120 is not compatible"]}, 1, ["warning", "ok"], "sm_120 is not compatible"),
        ({"backends": []}, 0, ["ok", "failed"], "gloo is missing"),
    ],
)
def test_the_build_of_torch(changes: dict[str, object], count: int, statuses: list[str], said: str) -> None:
    checks = torch_build.judge_torch(facts(**changes), "", count)
    assert [check.name for check in checks] == ["torch", "backends"]
    assert [check.status for check in checks] == statuses
    assert said in "\n".join(map(str, checks))


@pytest.mark.parametrize(
    ("code", "errors", "found", "advice"),
    [
        (1, "ModuleNotFoundError: No module named 'torch'\n", "torch is not installed", "pip install torch"),
        (-11, "", "import torch failed (signal 11)", "--force-reinstall"),
        (1, f"RuntimeError: no\n/f/queue.py {boot.INSTEAD} queue; rename it\n", "/f/queue.py", "rename the file"),
        (0, "", "import torch failed (exit code 0)", "--force-reinstall"),
    ],
)
def test_an_import_of_torch_that_fails_is_told(code: int, errors: str, found: str, advice: str) -> None:
    known, why = torch_build.read(code, "", errors)
    assert known is None
    (check,) = torch_build.judge_torch(known, why, 0)
    assert check.status == "failed" and found in check.found and advice in check.advice


def test_what_the_probe_prints_is_what_is_read(capfd: pytest.CaptureFixture[str]) -> None:
    torch_probe.main()
    known, why = torch_build.read(0, "printed by a library\n" + capfd.readouterr().out, "")
    assert known is not None and why == ""
    assert known.keys() == Facts.__annotations__.keys()
    assert "gloo" in known["backends"]


# -- software

REQUIRES = ["ipyparallel<9.3,>=9.0", "torch>=2.4", 'fastai>=2.8; extra == "fastai"', 'x; python_version < "3"']


@pytest.mark.parametrize(
    ("version", "wanted", "status"),
    [("3.12.1", ">=3.11,<3.15", "ok"), ("3.15.0", "<3.15,>=3.11", "failed"), ("3.9.2", "", "ok")],
)
def test_the_version_of_python(version: str, wanted: str, status: str) -> None:
    assert software.judge_python(version, wanted, "cpython").status == status


@pytest.mark.parametrize(
    ("requires", "versions", "status", "said"),
    [
        (REQUIRES, {"ipyparallel": "9.2.0", "torch": "2.4.0+cu121"}, "ok", "ipyparallel 9.2.0, ipykernel missing"),
        (REQUIRES, {"ipyparallel": "9.3.0", "torch": "2.15.0"}, "failed", 'pip install "ipyparallel<9.3,>=9.0"'),
        (REQUIRES, {"ipyparallel": "9.0.1"}, "failed", "torch is missing"),
        (None, {}, "warning", "without being installed"),
    ],
)
def test_versions_of_packages(requires: list[str] | None, versions: dict[str, str], status: str, said: str) -> None:
    check = software.judge_packages(requires, versions.get)
    assert check.status == status and said in str(check)


@pytest.mark.parametrize(
    ("versions", "environment", "has_code", "status", "found"),
    [
        ({}, {}, False, "ok", "none in this environment"),
        (
            {"ipython": "9.1"},
            {"JPY_PARENT_PID": "7"},
            False,
            "ok",
            "a terminal; this runs in a notebook of Jupyter Server",
        ),
        ({"jupyterlab": "4.4.1", "notebook": "7.4"}, {}, True, "ok", "JupyterLab 4.4.1, Notebook 7.4, VS Code"),
        ({"notebook": "6.5.7"}, {"TERM_PROGRAM": "vscode"}, False, "warning", "Notebook 6.5.7, VS Code"),
    ],
)
def test_the_front_end(
    versions: dict[str, str], environment: dict[str, str], has_code: bool, status: str, found: str
) -> None:
    check = software.judge_front_end(versions.get, environment, has_code)
    assert check.status == status and found in check.found


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, []),
        ({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ENABLE_MONITORING": "0", "TMPDIR": ""}, []),
        (
            {"GLOO_SOCKET_IFNAME": "eth0"},
            ["GLOO_SOCKET_IFNAME=eth0 is not followed: the ranks of one host talk over lo"],
        ),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, ["TORCH_NCCL_ASYNC_ERROR_HANDLING=3: torch's watchdog may end"]),
        ({"RANK": "0", "MASTER_PORT": "29500"}, ["RANK=0, MASTER_PORT=29500: the ranks get their own"]),
        ({"OMP_NUM_THREADS": "16"}, ["OMP_NUM_THREADS=16: every rank", "two ranks 4"]),
        ({"PYTHONSTARTUP": "/s.py"}, ["PYTHONSTARTUP=/s.py runs in the notebook's kernel and on each rank"]),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, ["CUDA_LAUNCH_BLOCKING is set"]),
        ({"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, ["ranks may share a GPU"]),
        ({"TMPDIR": "tmp"}, ["TMPDIR=tmp is a relative path"]),
        ({"RANK": "0", "NCCL_DEBUG": "INFO"}, ["NCCL_DEBUG=INFO is passed on to the ranks"]),
    ],
)
def test_variables_that_get_in_the_way(environment: dict[str, str], said: list[str]) -> None:
    interfaces = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    check = software.judge_environment(environment, interfaces, 4, WATCHDOG, "NCCL_MULTI_RANK_GPU_ENABLE")
    assert check.status == ("warning" if said else "ok")
    assert all(text in check.found for text in said)


def test_what_nccl_is_told_is_told_and_no_warning() -> None:
    check = software.judge_environment({"NCCL_DEBUG": "INFO"}, {}, 4, WATCHDOG, "")
    assert (check.status, check.found) == ("ok", "no variable gets in the way; ranks get NCCL_DEBUG=INFO")


def test_files_that_hide_modules() -> None:
    entries = ["random.py", "queue", "torch.py", "train.py", "os.py", "sys.py", "random.txt", "random.cfg.py", "data"]
    assert software.hiding(entries) == ["queue", "random.py", "torch.py"]
    assert software.judge_folder([], {}).status == "ok"
    assert software.judge_folder(["random.py"], {}).advice == "rename it"
    check = software.judge_folder(["random.py"], {"queue": "/f/queue.py"})
    assert check.status == "failed" and "/f/queue.py is found instead of the standard library's queue" in check.found


def test_the_current_folder_is_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert software.check_folder().found.startswith("random in the current folder")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert software.check_folder().status == "failed"


# -- a start


def test_what_came_of_a_start() -> None:
    good = trial.Trial(2, 1.25, 0.002, (1.5, 1.5), "")
    wrong = trial.judge("gloo", good)
    assert wrong.status == "failed" and "the wrong sum: 1.5, 1.5 instead of 3" in wrong.found
    fine = trial.judge("gloo", trial.Trial(2, 1.25, 0.002, (3.0, 3.0), ""))
    assert str(fine) == "ok       start-gloo     2 ranks on the CPU in 1.2 s, all_reduce in 0.002 s"
    alone = trial.judge("nccl", trial.Trial(1, 1.25, 0.002, (1.0,), ""))
    assert alone.found.startswith("1 rank on GPUs")
    spawned = trial.judge("gloo", trial.Trial(2, 4.0, 0.002, (3.0, 3.0), "the warm process ended"))
    assert spawned.status == "warning" and "spawned, not forked: the warm process ended" in spawned.found


def test_a_start_that_fails_says_what_ddip_says() -> None:
    assert trial.judge_failure("gloo", "timed out").found == "timed out"
    assert "NCCL_DEBUG=INFO" in trial.judge_failure("nccl", "no").advice
