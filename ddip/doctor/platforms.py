"""Recognize hosted notebooks and Slurm, and report the limits that matter to ranks there.

A platform is recognized by the environment variables and files that its documentation or its images name. ddip has not
run on any of them, except Slurm.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ddip.doctor.doctor_report import Check, failed, ok, warning
from ddip.doctor.machine import TIGHT_BYTES
from ddip.output.tables.tables import size_text

RESOURCE_FILE = "opt/ml/metadata/resource-metadata.json"
"""Present in SageMaker Studio and on SageMaker's notebook instances."""


@dataclass(frozen=True)
class Platform:
    """A recognized platform: name, limits as lines, and advice if the user must change something."""

    name: str
    limits: tuple[str, ...]
    advice: str = ""


def check_platform() -> Check:
    """Report operating system and cores, and the limits of the platform that the process runs on."""
    from ddip.cluster import devices
    from ddip.cluster.processes import on_host

    found = f"{platform.system()} {platform.release()}, {platform.machine()}, cores: {on_host.count_cores()}"
    if sys.platform not in ("linux", "darwin"):
        return failed("platform", found, "use Linux or macOS; on Windows, WSL 2 is Linux")
    return judge_platforms(found, list(find_platforms(os.environ, Path("/"), len(devices.gpu_names()))))


def judge_platforms(found: str, platforms: list[Platform]) -> Check:
    """Judge the recognized platforms; `found` describes the operating system."""
    lines = [found, *(f"{one.name}: {limit}" for one in platforms for limit in one.limits)]
    advice = "; ".join(one.advice for one in platforms if one.advice)
    return warning("platform", "\n".join(lines), advice) if advice else ok("platform", "\n".join(lines))


def find_platforms(environment: Mapping[str, str], root: Path, gpus: int) -> Iterator[Platform]:
    """Yield the platforms that the variables and the files below `root` show; `gpus`: number of GPUs."""
    if "KAGGLE_KERNEL_RUN_TYPE" in environment or (root / "kaggle/working").is_dir():
        yield _describe_kaggle(root, gpus)
    elif "COLAB_RELEASE_TAG" in environment or "COLAB_GPU" in environment:  # Kaggle's image is made from Colab's
        yield _describe_colab(gpus)
    if "SM_CURRENT_HOST" in environment or (root / RESOURCE_FILE).exists():
        yield _describe_sagemaker(environment, gpus)
    if "DATABRICKS_RUNTIME_VERSION" in environment:
        yield _describe_databricks(environment["DATABRICKS_RUNTIME_VERSION"], gpus)
    if "JUPYTERHUB_USER" in environment:
        yield _describe_jupyterhub(environment.get("MEM_LIMIT", ""))
    if "SLURM_JOB_ID" in environment:
        yield _describe_slurm(environment)


def _describe_kaggle(root: Path, gpus: int) -> Platform:
    start = f"GPUs: {gpus}, type %makedip -g all"
    if not gpus:
        start = "GPUs: 0, type %makedip -n 2 for ranks on the CPU, or choose GPU T4 x2 as accelerator"
    shared = root / "dev/shm"
    size = size_text(shutil.disk_usage(shared).total) if shared.is_dir() else "missing"
    return Platform(
        "Kaggle",
        (
            start,
            f"/dev/shm: {size}, for the data loader workers of all ranks together",
            "pip needs the Internet switch in the notebook's settings, which this check does not test",
            "without it, add wheels as a dataset: %pip install --no-index --find-links /kaggle/input/NAME ddip",
            "only files in /kaggle/working are kept",
        ),
    )


def _describe_colab(gpus: int) -> Platform:
    start = f"GPUs: {gpus}, type %makedip -g all"
    if not gpus:
        start = "GPUs: 0, type %makedip -n 2 for ranks on the CPU, or choose a GPU in Runtime > Change runtime type"
    elif gpus == 1:
        start = "GPUs: 1, one rank; type %makedip -g 0,0 for two ranks on it, over gloo"
    return Platform("Colab", (start, "files in /content are lost when the runtime ends"))


def _describe_sagemaker(environment: Mapping[str, str], gpus: int) -> Platform:
    limits = [f"GPUs: {gpus}, those of this instance"]
    hosts = _parse_names(environment.get("SM_HOSTS", ""))
    if len(hosts) > 1:
        limits.append(
            f"the job has {len(hosts)} instances; ranks start on this one, since --hosts needs ssh to the rest"
        )
    if "SM_MODEL_DIR" in environment:
        limits.append(f"only files in {environment['SM_MODEL_DIR']} and in S3 are kept after the job")
    return Platform("SageMaker", tuple(limits))


def _parse_names(text: str) -> list[str]:
    """Parse a JSON list of names; an unreadable text gives no names."""
    try:
        names = json.loads(text)
    except ValueError:
        return []
    return names if isinstance(names, list) else []


def _describe_databricks(version: str, gpus: int) -> Platform:
    return Platform(
        f"Databricks {version}",
        (
            f"GPUs: {gpus}, those of the driver; ranks start there, and never on the workers of the cluster",
            "files outside /Volumes, /Workspace and /dbfs are lost when the cluster ends",
        ),
    )


def _describe_jupyterhub(memory_limit: str) -> Platform:
    limit = int(memory_limit) if memory_limit.isdecimal() else 0
    if not limit:
        return Platform("JupyterHub", ("it names no memory limit (MEM_LIMIT)",))
    text = f"{size_text(limit)} of memory for the notebook and all ranks together (MEM_LIMIT)"
    advice = "choose a server with more memory: two ranks start in this, with little left for data"
    return Platform("JupyterHub", (text,), advice if limit < TIGHT_BYTES else "")


def _describe_slurm(environment: Mapping[str, str]) -> Platform:
    job, step = environment["SLURM_JOB_ID"], environment.get("SLURM_STEP_ID", "")
    nodes, tasks = environment.get("SLURM_JOB_NUM_NODES", "?"), environment.get("SLURM_STEP_NUM_TASKS", "1")
    limits = [f"nodes: {nodes}; %makedip --here starts ranks on all of them, -n and -g on this host only"]
    if not step:
        return Platform(f"Slurm job {job}", tuple(limits))
    limits.append(
        f"this process is in step {step} of srun and has the cores and GPUs of that step; "
        "--here starts steps of its own, which overlap with it and may use the whole job"
    )
    advice = ""
    if tasks.isdecimal() and int(tasks) > 1:
        limits.append(f"the step has {tasks} tasks, each of which would start a group of its own")
        advice = "start the notebook or script once: srun --ntasks=1, or without srun"
    return Platform(f"Slurm job {job}", tuple(limits), advice)
