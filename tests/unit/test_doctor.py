"""The doctor's conclusions from given figures: no processes, no GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

import ddip
from ddip.cluster import limits
from ddip.cluster.processes import boot
from ddip.cluster.processes.ownership import Run
from ddip.cluster.processes.processes import Proc
from ddip.doctor import command, doctor_report, gpus, machine, platforms, private_names, software, torch_build, trial
from ddip.doctor.doctor_report import Check, failed, ok, warning
from ddip.doctor.gpus import Gpu
from ddip.doctor.private_names import NamesReport
from ddip.doctor.torch_build import Facts
from ddip.group.members.engines import WATCHDOG

GB, NO_LIMIT = 10**9, float("inf")


# -- the printed report


def test_a_check_prints_a_line_with_its_advice_below() -> None:
    assert str(ok("loopback", "lo is up")) == "ok       loopback       lo is up"
    assert str(warning("folder", "a.py\nb.py", "rename them")).splitlines() == [
        "warning  folder         a.py",
        "                        b.py",
        "                        -> rename them",
    ]


def test_only_a_failed_check_is_an_exit_code() -> None:
    fine, hint, bad = ok("a", ""), warning("b", "x", "y"), failed("c", "x", "y")
    assert [doctor_report.exit_code(checks) for checks in ([], [fine, hint], [fine, bad])] == [0, 0, 1]
    assert doctor_report.summary_line([fine, hint, bad, bad], 1.25) == "4 checks in 1.2 s: 2 failed, 1 warning"
    assert doctor_report.summary_line([fine, fine], 1) == "2 checks in 1.0 s: all ok"


def test_the_keys_of_the_json_object_stay() -> None:
    report = json.loads(doctor_report.as_json([failed("torch", "none", "install it")], 2.0))
    assert report == {
        "schema": 1,
        "ddip": ddip.__version__,
        "exit_code": 1,
        "seconds": 2.0,
        "checks": [{"name": "torch", "status": "failed", "found": "none", "advice": "install it"}],
    }


def test_a_check_that_raises_fails_and_other_checks_still_run() -> None:
    def raise_missing_module() -> Check:
        raise ModuleNotFoundError("No module named 'psutil'", name="psutil")

    def fail_after_one_check() -> Iterator[Check]:
        yield ok("a", "")
        raise OSError(5, "Input/output error")

    (one,) = command.guard_check("memory", raise_missing_module)
    assert (
        one.status == "failed"
        and "No module named 'psutil'" in one.found
        and one.advice.startswith("install psutil again")
    )
    first, second = command.guard_check("b", fail_after_one_check)
    assert (first.status, second.status, second.name) == ("ok", "failed", "b") and "Input/output" in second.found


# -- the machine


def test_the_doctor_checks_the_operating_system(monkeypatch: pytest.MonkeyPatch) -> None:
    assert platforms.check_platform().status in ("ok", "warning")
    monkeypatch.setattr(platforms.sys, "platform", "win32")
    assert platforms.check_platform().status == "failed"


KAGGLE = {"KAGGLE_KERNEL_RUN_TYPE": "Batch", "COLAB_RELEASE_TAG": "release-colab"}
SAGEMAKER = {"SM_CURRENT_HOST": "algo-1", "SM_HOSTS": '["algo-1", "algo-2"]', "SM_MODEL_DIR": "/opt/ml/model"}
HUB = {"JUPYTERHUB_USER": "me"}
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("environment", "file", "gpus", "name", "said"),
    [
        (KAGGLE, "dev/shm/", 2, "Kaggle", "GPUs: 2, type %makedip -g all"),
        (KAGGLE, "", 0, "Kaggle", "GPU T4 x2"),
        (KAGGLE, "", 2, "Kaggle", "/dev/shm: missing"),
        ({}, "kaggle/working/", 2, "Kaggle", "Internet switch"),
        ({"COLAB_RELEASE_TAG": "release-colab"}, "", 1, "Colab", "%makedip -g 0,0 for two ranks"),
        ({"COLAB_GPU": ""}, "", 0, "Colab", "%makedip -n 2"),
        (SAGEMAKER, "", 8, "SageMaker", "the job has 2 instances"),
        ({**SAGEMAKER, "SM_HOSTS": "algo-1"}, "", 8, "SageMaker", "in /opt/ml/model and in S3"),
        ({}, platforms.RESOURCE_FILE, 4, "SageMaker", "GPUs: 4, those of this instance"),
        ({"DATABRICKS_RUNTIME_VERSION": "17.3"}, "", 1, "Databricks 17.3", "those of the driver"),
        ({**HUB, "MEM_LIMIT": "8000000000"}, "", 0, "JupyterHub", "8.0 GB of memory"),
        (HUB, "", 0, "JupyterHub", "no memory limit"),
        (SLURM, "", 0, "Slurm job 7", "nodes: 2; %makedip --here"),
        ({**SLURM, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}, "", 0, "Slurm job 7", "step 0 of srun"),
    ],
)
def test_a_platform_is_recognized_with_its_limits(
    environment: dict[str, str], file: str, gpus: int, name: str, said: str, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    if file.endswith("/"):
        (tmp_path / file).mkdir(parents=True)
    elif file:
        (tmp_path / file).touch()
    (recognized,) = platforms.find_platforms(environment, tmp_path, gpus)
    check = platforms.judge_platforms("Linux", [recognized])
    assert recognized.name == name and said in check.found and check.status == "ok"


@pytest.mark.parametrize(
    ("environment", "advice"),
    [
        ({**HUB, "MEM_LIMIT": "1000000000"}, "more memory"),
        ({**SLURM, "SLURM_STEP_ID": "3", "SLURM_STEP_NUM_TASKS": "4"}, "srun --ntasks=1"),
    ],
)
def test_a_platform_that_is_too_small_is_a_warning(environment: dict[str, str], advice: str, tmp_path: Path) -> None:
    check = platforms.judge_platforms("Linux", list(platforms.find_platforms(environment, tmp_path, 0)))
    assert check.status == "warning" and advice in check.advice


def test_a_machine_can_be_no_platform_or_several(tmp_path: Path) -> None:
    assert list(platforms.find_platforms({}, tmp_path, 8)) == []
    both = platforms.find_platforms({**HUB, **SLURM}, tmp_path, 8)
    assert [platform.name for platform in both] == ["JupyterHub", "Slurm job 7"]


@pytest.mark.parametrize(
    ("figures", "status", "advice"),
    [
        ((25 * GB, 20 * GB), "ok", ""),
        ((64 << 20, 64 << 20), "warning", "--shm-size"),
        ((25 * GB, 0), "warning", "remove what ended programs have left"),
    ],
)
def test_the_doctor_checks_shared_memory(
    figures: tuple[int, int], status: str, advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    total, free = figures
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free))
    check = machine.check_shared_memory()
    assert check.status == status and advice in check.advice


def test_missing_shared_memory_fails_only_on_linux(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(machine.sys, "platform", "linux")
    assert machine.check_shared_memory().status == "failed"
    monkeypatch.setattr(machine.sys, "platform", "darwin")
    assert machine.check_shared_memory().status == "ok"


@pytest.mark.parametrize(
    ("available", "bound", "address_space", "status", "found"),
    [
        (8 * GB, (0, 0), NO_LIMIT, "ok", "16.0 GB, 8.0 GB available"),
        (8 * GB, (64 * GB, 0), NO_LIMIT, "ok", "16.0 GB, 8.0 GB available"),
        (8 * GB, (2 * GB, GB), NO_LIMIT, "warning", "the control group allows 2.0 GB, 1.0 GB free"),
        (8 * GB, (GB, 2 * GB), NO_LIMIT, "failed", "0 B free"),
        (GB // 5, (0, 0), NO_LIMIT, "failed", "200 MB available"),
        (8 * GB, (0, 0), 4e9, "warning", "ulimit -v 4.0 GB"),
    ],
)
def test_the_doctor_checks_memory(
    available: int, bound: tuple[int, int], address_space: float, status: str, found: str
) -> None:
    check = machine.judge_memory(16 * GB, available, *bound, address_space)
    assert check.status == status and found in check.found


def test_the_doctor_checks_limits() -> None:
    fine = machine.judge_limits(1024, NO_LIMIT, 0, 0, {2: "", 8: ""})
    assert str(fine) == "ok       limits         ulimit -n 1024, -u unlimited"
    for_two = machine.judge_limits(60, 4000, 0, 0, {2: "2 ranks: too few; raise it", 8: "8 ranks: too few; raise it"})
    assert for_two.status == "failed" and for_two.found.endswith("; 2 ranks: too few") and for_two.advice == "raise it"
    for_many = machine.judge_limits(180, 4000, 0, 0, {2: "", 8: "8 ranks: too few; raise it"})
    assert for_many.status == "warning" and "8 ranks" in for_many.found
    assert machine.judge_limits(1024, 4000, 1000, 850, {2: ""}).status == "warning"
    tight = machine.judge_limits(1024, 4000, 100, 90, {2: ""})
    assert tight.status == "failed" and "--pids-limit" in tight.advice and "10 free" in tight.found


def test_the_doctor_checks_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine.check_loopback().status == "ok"

    def refuse_connection(*args: object) -> None:
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(machine.socket, "create_connection", refuse_connection)
    assert machine.check_loopback().status == "failed"
    monkeypatch.setattr(machine.psutil, "net_if_stats", dict)
    assert "is missing" in machine.check_loopback().found


def test_runs_of_notebooks_that_ended_are_listed() -> None:
    alive, dead = Run(Path("/run/a"), Proc(5, 1.0), True, 4), Run(Path("/run/b"), Proc(7, 1.0), False, 3)
    assert machine.judge_runs([]).status == machine.judge_runs([alive]).status == "ok"
    check = machine.judge_runs([alive, dead])
    assert check.status == "warning" and "process 7" in check.found and "/run/a" not in check.found


# -- control groups


def write_files(folder: Path, **files: object) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")


def test_the_tightest_limit_of_all_groups_around_the_process_counts(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/outer/inner\n")
    write_files(root / "outer" / "inner", memory__max="max", pids__max=300, pids__current=7)
    write_files(root / "outer", memory__max=1000, memory__current=700, memory__stat="anon 1\ninactive_file 200")
    assert limits.control_group("memory", root, membership) == (1000, 500)
    assert limits.control_group("pids", root, membership) == (300, 7)
    (tmp_path / "empty").touch()
    assert limits.control_group("memory", root, tmp_path / "missing") == (0, 0)
    assert limits.control_group("memory", root, tmp_path / "empty") == (0, 0)


def test_a_container_reads_its_limits_from_the_root_control_group(tmp_path: Path) -> None:
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    membership.write_text("0::/docker/abc\n")
    write_files(root, memory__max=1000, memory__current=100, memory__stat="inactive_file 0")
    assert limits.control_group("memory", root, membership) == (1000, 100)


# -- GPUs

H100 = "0, 550.54.15, 81559, 4, NVIDIA H100 80GB HBM3\n1, 550.54.15, 81559, 60000, NVIDIA H100, odd\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            H100,
            [
                Gpu(0, "550.54.15", 81559 << 20, 4 << 20, "NVIDIA H100 80GB HBM3"),
                Gpu(1, "550.54.15", 81559 << 20, 60000 << 20, "NVIDIA H100, odd"),
            ],
        ),
        ("No devices were found\n\n0, 550, 1, 1\n", []),
        ("0, 550, [N/A], [Insufficient Permissions], H100\n", [Gpu(0, "550", 0, 0, "H100")]),
    ],
)
def test_the_output_of_nvidia_smi_is_read(text: str, found: list[Gpu]) -> None:
    assert gpus.parse_table(text) == found


@pytest.mark.parametrize(
    ("text", "error", "in_machine", "counted", "visible", "statuses", "said"),
    [
        ("", "", 0, 0, [], ["ok", "ok"], "ranks run on the CPU"),
        ("", "", 2, 0, [], ["warning", "ok"], "docker run --gpus all"),
        ("", "", 1, 1, ["0"], ["ok", "ok"], "nvidia-smi is not"),
        ("", "nvidia-smi failed", 1, 0, [], ["failed", "ok"], "NVIDIA's driver"),
        (H100.splitlines()[0], "", 2, 2, ["0", "1"], ["ok", "ok"], "2, 2 visible to ddip"),
        (H100, "", 2, 2, ["0", "1"], ["ok", "warning"], "end the processes on GPU 1"),
        (H100, "", 2, 2, [], ["ok", "warning"], "unset CUDA_VISIBLE_DEVICES"),
        (H100, "", 2, 0, [], ["ok", "failed"], "libnvidia-ml.so.1"),
    ],
)
def test_the_doctor_checks_the_driver_and_gpu_use(
    text: str, error: str, in_machine: int, counted: int, visible: list[str], statuses: list[str], said: str
) -> None:
    checks = gpus.judge_gpus(gpus.parse_table(text), error, in_machine, counted, visible)
    assert [check.name for check in checks] == ["driver", "gpus"]
    assert [check.status for check in checks] == statuses
    assert said in "\n".join(map(str, checks))


def test_nvidia_smi_may_fail_or_be_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus.query_nvidia_smi() == []
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'could not talk to the driver'\nexit 9\n")
    program.chmod(0o755)
    with pytest.raises(RuntimeError, match="could not talk"):
        gpus.query_nvidia_smi()
    program.write_text("#!/bin/sh\necho '0, 550, 80, 4, H100'\n")
    assert gpus.query_nvidia_smi() == [Gpu(0, "550", 80 << 20, 4 << 20, "H100")]


def test_gpus_on_the_bus_are_counted_without_a_driver(tmp_path: Path) -> None:
    write_files(tmp_path / "0000:01:00.0", vendor="0x10de", **{"class": "0x030200"})
    write_files(tmp_path / "0000:01:00.1", vendor="0x10de", **{"class": "0x040300"})  # the GPU's audio device
    write_files(tmp_path / "0000:02:00.0", vendor="0x8086", **{"class": "0x030000"})
    (tmp_path / "broken").mkdir()
    assert gpus.built_in(tmp_path) == 1
    assert gpus.built_in(tmp_path / "none") == 0


# -- torch


def names_report(**changes: object) -> NamesReport:
    base = {"library": "torch", "version": "2.15.0", "tested": "2.4 to 2.15", "lacks": [], "off": {}}
    return {**base, **changes}  # type: ignore[typeddict-item, return-value]


def torch_facts(**changes: object) -> Facts:
    base = {
        "version": "2.15.0+cu132",
        "cuda": "13.2",
        "hip": "",
        "backends": ["gloo", "nccl"],
        "gpus": 0,
        "why_no_gpu": "",
        "warnings": [],
        "names": names_report(),
    }
    return {**base, **changes}  # type: ignore[typeddict-item, return-value]


@pytest.mark.parametrize(
    ("changes", "count", "statuses", "said"),
    [
        ({}, 0, ["ok", "ok", "ok"], "2.15.0+cu132, built for CUDA 13.2, GPUs: 0"),
        ({"gpus": 2}, 2, ["ok", "ok", "ok"], "GPUs: 2"),
        ({"cuda": "", "backends": ["gloo"]}, 0, ["ok", "ok", "ok"], "built without CUDA"),
        ({"cuda": "", "backends": ["gloo"]}, 1, ["failed", "failed", "ok"], "GPUs: 0 of 1"),
        ({"why_no_gpu": "the driver is too old"}, 2, ["failed", "ok", "ok"], "the driver is too old"),
        ({"gpus": 1, "warnings": ["sm_120 is not compatible"]}, 1, ["warning", "ok", "ok"], "sm_120 is not compatible"),
        ({"backends": []}, 0, ["ok", "failed", "ok"], "missing: gloo"),
        ({"names": names_report(lacks=["torch.x"])}, 0, ["ok", "ok", "failed"], "torch 2.15.0: missing: torch.x"),
        ({"names": names_report(off={"no y": ["torch.y"]})}, 0, ["ok", "ok", "warning"], "no y (missing: torch.y)"),
        ({"names": names_report(version="2.99.1")}, 0, ["ok", "ok", "warning"], "torch 2.99.1: newer than 2.15"),
    ],
)
def test_the_doctor_checks_the_build_of_torch(
    changes: dict[str, object], count: int, statuses: list[str], said: str
) -> None:
    checks = torch_build.judge_torch(torch_facts(**changes), "", count)
    assert [check.name for check in checks] == ["torch", "backends", "torch-names"]
    assert [check.status for check in checks] == statuses
    assert said in "\n".join(map(str, checks))


def test_names_of_several_libraries_are_one_check() -> None:
    kernel = names_report(library="ipykernel", version="8.0", tested="7.4", off={"no x": ["ipykernel.x"]})
    check = private_names.judge_names("names", [names_report(), kernel, kernel, names_report(version="2.16")])
    assert check.status == "warning" and check.advice == "ddip is tested with ipykernel 7.4, torch 2.4 to 2.15"
    assert check.found == (
        "ipykernel 8.0: no x (missing: ipykernel.x)\ntorch 2.16: newer than 2.15, and has all private names"
    )
    fine = private_names.judge_names(
        "names", [names_report(), names_report(library="fastai", version="2.8.12", tested="2.8")]
    )
    assert (fine.status, fine.found) == ("ok", "torch, fastai: all private names that ddip uses exist")


@pytest.mark.parametrize(
    ("code", "errors", "found", "advice"),
    [
        (1, "ModuleNotFoundError: No module named 'torch'\n", "torch is not installed", "pip install torch"),
        (-11, "", "import torch failed (signal 11)", "--force-reinstall"),
        (1, f"RuntimeError: no\n/f/queue.py {boot.INSTEAD} queue; rename it\n", "/f/queue.py", "rename the file"),
        (0, "", "import torch failed (exit code 0)", "--force-reinstall"),
    ],
)
def test_a_failed_import_of_torch_is_reported(code: int, errors: str, found: str, advice: str) -> None:
    known, why = torch_build.read_facts(code, "", errors)
    assert known is None
    (check,) = torch_build.judge_torch(known, why, 0)
    assert check.status == "failed" and found in check.found and advice in check.advice


def test_the_doctor_reads_the_output_of_its_probe(capfd: pytest.CaptureFixture[str]) -> None:
    torch_build.main()
    known, why = torch_build.read_facts(0, "printed by a library\n" + capfd.readouterr().out, "")
    assert known is not None and why == ""
    assert known.keys() == Facts.__annotations__.keys()
    assert "gloo" in known["backends"]


# -- software

REQUIRES = ["ipyparallel<9.3,>=9.0", "torch>=2.4", 'fastai>=2.8; extra == "fastai"', 'x; python_version < "3"']


def test_the_doctor_checks_the_version_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    assert software.check_python().status == "ok"
    monkeypatch.setattr(software.sys, "version_info", (3, 9, 2))
    assert software.check_python().status == "failed"


@pytest.mark.parametrize(
    ("requires", "versions", "status", "said"),
    [
        (REQUIRES, {"ipyparallel": "9.2.0", "torch": "2.4.0+cu121"}, "ok", "ipyparallel 9.2.0"),
        (REQUIRES, {"ipyparallel": "9.3.0", "torch": "2.15.0"}, "failed", 'pip install "ipyparallel<9.3,>=9.0"'),
        (REQUIRES, {"ipyparallel": "9.0.1"}, "failed", "torch is missing"),
        (None, {}, "warning", "without being installed"),
        ([], {"notebook": "6.5.7"}, "warning", 'pip install "notebook>=7"'),
        ([], {"notebook": "7.4"}, "ok", "notebook 7.4"),
    ],
)
def test_the_doctor_checks_versions_of_packages(
    requires: list[str] | None, versions: dict[str, str], status: str, said: str
) -> None:
    check = software.judge_packages(requires, versions.get)
    assert check.status == status and said in str(check)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, []),
        ({"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TORCH_NCCL_ENABLE_MONITORING": "0", "TMPDIR": ""}, []),
        (
            {"GLOO_SOCKET_IFNAME": "eth0"},
            ["GLOO_SOCKET_IFNAME=eth0 is ignored: the ranks of one host communicate over lo"],
        ),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, ["TORCH_NCCL_ASYNC_ERROR_HANDLING=3: torch's watchdog may end"]),
        ({"RANK": "0", "MASTER_PORT": "29500"}, ["RANK=0, MASTER_PORT=29500: the ranks get their own"]),
        ({"OMP_NUM_THREADS": "16"}, ["OMP_NUM_THREADS=16", "each of two ranks 4"]),
        ({"RANK": "0", "NCCL_DEBUG": "INFO"}, ["passed on to the ranks: NCCL_DEBUG=INFO"]),
    ],
)
def test_the_doctor_warns_of_conflicting_variables(environment: dict[str, str], said: list[str]) -> None:
    interfaces = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    check = software.judge_environment(environment, interfaces, 4, WATCHDOG)
    assert check.status == ("warning" if said else "ok")
    assert all(text in check.found for text in said)


def test_nccl_settings_are_listed_without_a_warning() -> None:
    check = software.judge_environment({"NCCL_DEBUG": "INFO"}, {}, 4, WATCHDOG)
    assert (check.status, check.found) == ("ok", "passed on to the ranks: NCCL_DEBUG=INFO")


def test_the_doctor_warns_of_files_that_hide_modules() -> None:
    entries = ["random.py", "queue", "torch.py", "train.py", "os.py", "sys.py", "random.txt", "random.cfg.py", "data"]
    assert software.hiding_entries(entries) == ["queue", "random.py", "torch.py"]
    assert software.judge_folder([], {}).status == "ok"
    assert software.judge_folder(["random.py"], {}).status == "warning"
    check = software.judge_folder(["random.py"], {"queue": "/f/queue.py"})
    assert check.status == "failed" and "/f/queue.py is found instead of the standard library's queue" in check.found


def test_the_doctor_checks_the_current_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "queue").mkdir()
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    assert software.check_folder().found.endswith("hide modules: random")
    removed = tmp_path / "gone"
    removed.mkdir()
    monkeypatch.chdir(removed)
    removed.rmdir()
    assert software.check_folder().status == "failed"


# -- a start


def test_a_trial_start_passes_or_fails() -> None:
    wrong = trial.judge_start("gloo", [1.5, 1.5], 1.25, 0.002, "")
    assert wrong.status == "failed" and "the wrong sum: 1.5, 1.5 instead of 3" in wrong.found
    assert trial.judge_start("gloo", [3.0, 3.0], 1.25, 0.002, "").status == "ok"
    assert trial.judge_start("nccl", [1.0], 1.25, 0.002, "").status == "ok"
    spawned = trial.judge_start("gloo", [3.0, 3.0], 4.0, 0.002, "the preload process ended")
    assert spawned.status == "warning" and "spawned, not forked: the preload process ended" in spawned.found


def test_a_failed_trial_start_shows_the_error_of_ddip() -> None:
    assert trial.judge_failure("gloo", "timed out").found == "timed out"
    assert "NCCL_DEBUG=INFO" in trial.judge_failure("nccl", "no").advice
