"""What torch tells of itself, in a process of its own: an import that crashes or hangs takes nothing else along.

``torch_build.py`` starts it and reads what it prints.
"""

from __future__ import annotations

import json
import warnings


def main() -> None:
    """Print one line of JSON, a `ddip.doctor.torch_build.Facts`."""
    import torch
    import torch.distributed as dist

    built = torch.version.cuda or torch.version.hip
    why, gpus = "", 0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if built:
            try:
                torch.cuda.init()
                gpus = torch.cuda.device_count()
                for gpu in range(gpus):
                    torch.cuda.get_device_capability(gpu)
            except Exception as error:  # RuntimeError, AssertionError, and what a broken driver may raise
                why = _one_line(error)
    has_distributed = dist.is_available()
    backends = [name for name in ("gloo", "nccl", "mpi", "ucc") if has_distributed and _has(dist, name)]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in backends else ""
    facts = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or "",
        "hip": torch.version.hip or "",
        "backends": backends,
        "nccl": nccl,
        "gpus": gpus,
        "why_no_gpu": why,
        "warnings": [_one_line(one.message) for one in caught if one.category is UserWarning],
    }
    print(json.dumps(facts))


def _has(dist: object, backend: str) -> bool:
    return bool(getattr(dist, f"is_{backend}_available", lambda: False)())


def _one_line(message: object) -> str:
    return " ".join(str(message).split())
