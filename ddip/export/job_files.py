"""Write job files that run an exported script on hosts like those of the group, under Slurm or Kubernetes.

Both start one torchrun per host, with the hosts' numbers as its node ranks, so that each rank has the same number, and
the same random state, in each run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ddip.errors import BadInput

SLURM = """\
#!/bin/bash
# Runs {script} as the session did. Add what your cluster requires, such as --time, --partition or --account.
# Options of the script follow the name of this file: sbatch {file} --lr 0.1
{options}
{setup}export OMP_NUM_THREADS={threads}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
srun bash -c '{torchrun} --nnodes {hosts} --node-rank "$SLURM_NODEID" --nproc-per-node {per_host} \\
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" {script} "$@"' {script} "$@"
"""
KUBERNETES = """\
# Runs {script} as the session did. Set the image, which needs the packages of the notebook, then:
#   kubectl create configmap {name} {from_files}    (1 MiB at most)
#   kubectl apply -f {file}
# The script writes its files to /work, which ends with the pod: mount a volume there to keep them.
apiVersion: v1
kind: Service
metadata:
  name: "{name}"
spec:
  clusterIP: None
  selector:
    job-name: "{name}"
---
apiVersion: batch/v1
kind: Job
metadata:
  name: "{name}"
spec:
  completionMode: Indexed
  completions: {hosts}
  parallelism: {hosts}
  backoffLimit: 0
  template:
    spec:
      subdomain: "{name}"
      restartPolicy: Never
      containers:
        - name: "{name}"
          image: registry.example.org/torch:1
          workingDir: /work
          command: [torchrun, --nnodes, "{hosts}", --node-rank, $(JOB_COMPLETION_INDEX), --nproc-per-node, "{per_host}",
                    --master-addr, {name}-0.{name}, --master-port, "29500", /scripts/{script}]
          env:
            - name: OMP_NUM_THREADS
              value: "{threads}"
{limits}          volumeMounts:
            - {{name: scripts, mountPath: /scripts}}
            - {{name: work, mountPath: /work}}
            - {{name: shm, mountPath: /dev/shm}}
      volumes:
        - name: scripts
          configMap: {{name: "{name}"}}
        - name: work
          emptyDir: {{}}
        - name: shm
          emptyDir: {{medium: Memory}}
"""


@dataclass(frozen=True)
class JobShape:
    """The hosts that a job needs."""

    ranks: tuple[int, ...]
    """Number of ranks on each host."""
    on_gpus: bool
    threads: int
    """Number of torch's threads on each rank."""
    options: Mapping[str, str]
    """The group's options of ``sbatch``; an option without a value has an empty one."""
    setup: str = ""
    """The group's line of bash that runs first on each host."""
    python: str = ""
    """Path of the hosts' Python; empty for the ``torchrun`` on their path."""


def write_slurm_file(shape: JobShape, script: Path) -> str:
    """Return a batch script for ``sbatch``.

    Raises BadInput if the hosts have different numbers of ranks, or if a path has other characters than letters,
    digits, ``/``, ``.``, ``+``, ``-`` and ``_``.
    """
    per_host = _ranks_per_host(shape, script, "--slurm")
    cores = f"{per_host * shape.threads}"
    own = {"job-name": script.stem, "nodes": f"{len(shape.ranks)}", "ntasks-per-node": "1", "cpus-per-task": cores}
    if shape.on_gpus:
        own["gpus-per-node"] = f"{per_host}"
    options = own | {name: value for name, value in shape.options.items() if name != "nodes"}
    return SLURM.format(
        script=script,
        file=script.with_suffix(".sbatch"),
        options="\n".join(f"#SBATCH --{name}{f'={value}' if value else ''}" for name, value in options.items()),
        setup=f"{shape.setup}\n" if shape.setup else "",
        threads=shape.threads,
        torchrun=f"{shape.python} -m torch.distributed.run" if shape.python else "torchrun",
        hosts=len(shape.ranks),
        per_host=per_host,
    )


def write_kubernetes_file(shape: JobShape, script: Path, data: str) -> str:
    """Return the manifest of a Job, and of the Service by which its pods find the first one.

    `data`: name of the file with pushed values; empty if there is none. Raises BadInput as `write_slurm_file` does.
    """
    per_host = _ranks_per_host(shape, script, "--k8s")
    files = " ".join(f"--from-file={name}" for name in filter(None, (script.name, data)))
    limits = f"          resources:\n            limits: {{nvidia.com/gpu: {per_host}}}\n" if shape.on_gpus else ""
    return KUBERNETES.format(
        script=script.name,
        file=script.with_suffix(".yaml").name,
        name=re.sub(r"[^a-z0-9]+", "-", f"run-{script.stem.lower()}")[:50].strip("-"),
        from_files=files,
        hosts=len(shape.ranks),
        per_host=per_host,
        threads=shape.threads,
        limits=limits,
    )


def _ranks_per_host(shape: JobShape, script: Path, option: str) -> int:
    for path in (str(script), shape.python):
        if not re.fullmatch(r"[\w./+-]*", path, re.ASCII):
            raise BadInput(f"{option}: a job file cannot have the path {path}; type letters, digits, -, _, . and /")
    if len(set(shape.ranks)) > 1:
        counts = ", ".join(map(str, shape.ranks))
        raise BadInput(f"{option}: the hosts have {counts} ranks, and such a job has the same number on each host")
    return shape.ranks[0]
