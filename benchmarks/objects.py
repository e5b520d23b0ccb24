"""Objects to every rank and back: ddip against ipyparallel on the same engines, and against one copy, in turns.

Usage: objects.py [TIMES] [RANKS ...]

The limit is one pickle whose buffers stand beside it, and one copy of it all in this process.
"""

from __future__ import annotations

import pickle
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import torch

from ddip import Group

SIZES = (1 << 10, 1 << 20, 1 << 23, 1 << 26, 1 << 28)
"""Bytes."""


def seconds(call: Callable[[], object]) -> float:
    """Time one call."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_turns(times: int, *calls: Callable[[], object]) -> list[float]:
    """The median of each."""
    rounds = [[seconds(call) for call in calls] for _ in range(times)]
    return [statistics.median(column) for column in zip(*rounds, strict=True)]


def limit(value: object) -> None:
    """Pickle and copy it here."""
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    bytearray().join([data, *(buffer.raw() for buffer in buffers)])


def arrays(times: int, group: Group) -> None:
    """One table: an array of bytes, by size."""
    client, ids = group.cluster.client, [member.engine for member in group.members]
    view, one = client.direct_view(ids), client.direct_view(ids[0])
    print(f"\n{len(ids)} ranks, an array; medians of {times} in turns, seconds")
    heads = f"{'KiB':>8} {'push':>7} {'raw':>7} {'ratio':>6} {'pull':>8} {'raw':>7} {'ratio':>6}"
    print(f"{heads} {'pull all':>9} {'copy':>7}")
    for size in SIZES:
        array = np.random.default_rng(0).integers(0, 256, size, np.uint8)
        values = {"array": array}
        push, raw_push, pull, raw_pull, pull_all, copy = in_turns(
            times,
            lambda: group.push(values),  # noqa: B023
            lambda: view.push(values, block=True),  # noqa: B023
            lambda: group.pull(["array"]),
            lambda: one.pull("array", block=True),
            lambda: group.pull_all(["array"], range(len(ids))),
            lambda: limit(array),  # noqa: B023
        )
        columns = (
            f"{push:7.3f} {raw_push:7.3f} {push / raw_push:6.2f} {pull:8.3f} {raw_pull:7.3f} {pull / raw_pull:6.2f}"
        )
        print(f"{size >> 10:>8} {columns} {pull_all:9.3f} {copy:7.3f}", flush=True)


def others(times: int, group: Group) -> None:
    """One table: what is not one array."""
    rows = np.arange(10_000_000)
    made: dict[str, Any] = {
        "10 000 tensors of 4 KB": {f"t{number}": torch.zeros(1000) for number in range(10_000)},
        "1000 tensors of 256 KB": [torch.zeros(1 << 16) for _ in range(1000)],
        "frame of 1e7 rows": pd.DataFrame({"a": rows, "b": rows * 0.5}),
        "module of 200 MB": torch.nn.Sequential(*(torch.nn.Linear(2000, 2500) for _ in range(10))),
    }
    print(f"\n{group.world_size} ranks, other objects; medians of {times} in turns, seconds")
    print(f"{'':>24} {'push':>7} {'limit':>7} {'ratio':>6} {'pull':>8} {'ratio':>6}")
    for name, value in made.items():
        state = [*value.parameters()] if isinstance(value, torch.nn.Module) else value
        plain = [tensor.detach().numpy() for tensor in state] if isinstance(state, list) else state
        push, pull, best = in_turns(
            times,
            lambda: group.push({"value": value}),  # noqa: B023
            lambda: group.pull(["value"]),
            lambda: limit(plain),  # noqa: B023
        )
        print(f"{name:>24} {push:7.3f} {best:7.3f} {push / best:6.2f} {pull:8.3f} {pull / best:6.2f}", flush=True)


def main() -> None:
    """Print the tables."""
    times = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    for count in sys.argv[2:] or ["2", "4", "8"]:
        with Group(int(count)) as group:
            arrays(times, group)
            if count == "4":
                others(times, group)


if __name__ == "__main__":
    main()
