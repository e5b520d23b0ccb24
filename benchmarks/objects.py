"""Objects to every rank and back: ddip against ipyparallel on the same engines, and against one copy, in turns.

Usage: objects.py [TIMES] [RANKS ...]

The limit is one pickle whose buffers stand beside it, and one copy of it all in this process. What is pushed replaces
nothing: ranks let go of what is replaced after a push of ddip's, and within one of ipyparallel's.
"""

from __future__ import annotations

import pickle
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch
from rows import Row, seconds, show

from ddip import Group
from ddip.cluster.ipyparallel.own_cluster import OwnCluster
from ddip.group.objects.delivery import LARGE

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "8 MiB": 1 << 23, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
COPY = "pickle and one copy"


def in_turns(times: int, *calls: Callable[[], object]) -> list[tuple[float, ...]]:
    """Seconds of each."""
    rounds = [[seconds(call) for call in calls] for _ in range(times)]
    return list(zip(*rounds, strict=True))


def limit(value: object) -> None:
    """Pickle and copy it here."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    bytearray().join([data, *(buffer.raw() for buffer in buffers)])


def forget(group: Group, name: str) -> None:
    """Have every rank let go of a variable, and of the garbage after that cell."""
    group.run(f"{name} = None")
    time.sleep(0.1)
    group.run("pass")


def arrays(times: int, group: Group) -> list[Row]:
    """An array of bytes, by size."""
    assert isinstance(group.cluster, OwnCluster)
    client, ids = group.cluster.client, [member.engine for member in group.members]
    view, one = client.direct_view(ids), client.direct_view(ids[0])
    rows = []
    for name, size in SIZES.items():
        array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        values = {"array": array}
        push, pull, raw_pull, pull_all, copy, _, raw_push, _ = in_turns(
            times,
            lambda: group.push(values),  # noqa: B023
            lambda: group.pull(["array"]),
            lambda: one.pull("array", block=True),
            lambda: group.pull_all(["array"], range(len(ids))),
            lambda: limit(array),  # noqa: B023
            lambda: forget(group, "array"),
            lambda: view.push(values, block=True),  # noqa: B023
            lambda: forget(group, "array"),
        )
        one_copy = {COPY: copy} if size > LARGE else {}  # what is less takes as long as a message
        rows.append(Row(f"push {name}", "s", len(ids), push, {"ipyparallel": raw_push, **one_copy}))
        rows.append(Row(f"pull {name} from one", "s", len(ids), pull, {"ipyparallel": raw_pull, **one_copy}))
        rows.append(Row(f"pull {name} from all", "s", len(ids), pull_all, {"from one": pull}))
    return rows


def others(times: int, group: Group) -> list[Row]:
    """What is not one array."""
    numbers = np.arange(10_000_000)
    made: dict[str, Any] = {
        "10 000 tensors of 4 KB": {f"t{number}": torch.zeros(1000) for number in range(10_000)},
        "1000 tensors of 256 KB": [torch.zeros(1 << 16) for _ in range(1000)],
        "a frame of 1e7 rows": pd.DataFrame({"a": numbers, "b": numbers * 0.5}),
        "a module of 200 MB": torch.nn.Sequential(*(torch.nn.Linear(2000, 2500) for _ in range(10))),
    }
    rows = []
    for name, value in made.items():
        state = [*value.parameters()] if isinstance(value, torch.nn.Module) else value
        plain = [tensor.detach().numpy() for tensor in state] if isinstance(state, list) else state
        push, pull, best, _ = in_turns(
            times,
            lambda: group.push({"value": value}),  # noqa: B023
            lambda: group.pull(["value"]),
            lambda: limit(plain),  # noqa: B023
            lambda: forget(group, "value"),
        )
        rows.append(Row(f"push {name}", "s", group.world_size, push, {COPY: best}))
        rows.append(Row(f"pull {name}", "s", group.world_size, pull, {COPY: best}))
    return rows


def main() -> None:
    """Print one table."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    rows = []
    for count in sys.argv[2:] or ["2", "4", "8"]:
        with Group(int(count)) as group:
            rows += arrays(times, group)
            if count == "4":
                rows += others(times, group)
    show("objects", rows)


if __name__ == "__main__":
    main()
