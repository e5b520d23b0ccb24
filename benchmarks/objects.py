"""Time pushes and pulls: ddip against ipyparallel on the same engines, and against one copy, alternating.

Usage: objects.py [TIMES] [RANKS ...]

The lower bound is one pickle with out-of-band buffers, and one copy of all of it in this process. Pushes replace
nothing: ranks free a replaced object after a ddip push, but within an ipyparallel push.
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
from rows import Row, report_rows, time_call

from ddip import Group
from ddip.cluster.ipyparallel.own_cluster import OwnCluster
from ddip.group.objects.delivery import LARGE

SIZES = {"1 KiB": 1 << 10, "1 MiB": 1 << 20, "8 MiB": 1 << 23, "64 MiB": 1 << 26, "256 MiB": 1 << 28}
COPY = "pickle and one copy"


def time_alternately(times: int, *calls: Callable[[], object]) -> list[tuple[float, ...]]:
    """Return the seconds of each call, alternating."""
    rounds = [[time_call(call) for call in calls] for _ in range(times)]
    return list(zip(*rounds, strict=True))


def pickle_and_copy(value: object) -> None:
    """Pickle and copy `value` in this process, the lower bound of a transfer."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    bytearray().join([data, *(buffer.raw() for buffer in buffers)])


def free_variable(group: Group, name: str) -> None:
    """Free a variable on every rank, and the garbage that is collected after that cell."""
    group.run(f"{name} = None")
    time.sleep(0.1)
    group.run("pass")


def measure_arrays(times: int, group: Group) -> list[Row]:
    """Measure byte arrays, by size."""
    assert isinstance(group.cluster, OwnCluster)
    client, ids = group.cluster.client, [member.engine for member in group.members]
    view, single_view = client.direct_view(ids), client.direct_view(ids[0])
    rows = []
    for name, size in SIZES.items():
        array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        values = {"array": array}
        push, pull, raw_pull, pull_all, copy, _, raw_push, _ = time_alternately(
            times,
            lambda: group.push(values),  # noqa: B023
            lambda: group.pull(["array"]),
            lambda: single_view.pull("array", block=True),
            lambda: group.pull_all(["array"], range(len(ids))),
            lambda: pickle_and_copy(array),  # noqa: B023
            lambda: free_variable(group, "array"),
            lambda: view.push(values, block=True),  # noqa: B023
            lambda: free_variable(group, "array"),
        )
        one_copy = {COPY: copy} if size > LARGE else {}  # a smaller array takes as long as any message
        rows.append(Row(f"push {name}", "s", len(ids), push, {"ipyparallel": raw_push, **one_copy}))
        rows.append(Row(f"pull {name} from one", "s", len(ids), pull, {"ipyparallel": raw_pull, **one_copy}))
        rows.append(Row(f"pull {name} from all", "s", len(ids), pull_all, {"from one": pull}))
    return rows


def measure_collections(times: int, group: Group) -> list[Row]:
    """Measure collections of tensors, a data frame and a module."""
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
        push, pull, best, _ = time_alternately(
            times,
            lambda: group.push({"value": value}),  # noqa: B023
            lambda: group.pull(["value"]),
            lambda: pickle_and_copy(plain),  # noqa: B023
            lambda: free_variable(group, "value"),
        )
        rows.append(Row(f"push {name}", "s", group.world_size, push, {COPY: best}))
        rows.append(Row(f"pull {name}", "s", group.world_size, pull, {COPY: best}))
    return rows


def main() -> None:
    """Print one table of results."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    rows = []
    for count in sys.argv[2:] or ["2", "4", "8"]:
        with Group(int(count)) as group:
            rows += measure_arrays(times, group)
            if count == "4":
                rows += measure_collections(times, group)
    report_rows("objects", rows)


if __name__ == "__main__":
    main()
