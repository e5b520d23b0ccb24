"""What a rank tells of itself, as the dicts that cross between the processes."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

Ends: TypeAlias = tuple[Any, ...]
"""Of a TCP connection: host and port of this end, host and port of the other."""

Begun: TypeAlias = "dict[str, tuple[int, int, list[int] | None]]"
"""What a rank has begun since its groups were formed, by group and device: collectives, sends and receives, and the
ranks of the group (None: all)."""


class Hello(TypedDict):
    """A process, and what its torch can do."""

    version: int
    """Of ``on_rank.py``."""
    pid: int
    host: str
    torch: str
    cuda: bool
    """Was it built for GPUs?"""
    backends: list[str]


GpuState: TypeAlias = Literal["done", "under way", "lost"]
"""What the GPU of a rank does when its cell has ended: nothing; what the cell has begun; or nothing ever again, since
its context is lost."""


class GpuFigures(TypedDict):
    """Memory of a GPU as torch has it, without the context's and nccl's own; bytes."""

    allocated: int
    reserved: int
    total: int


class Figures(TypedDict):
    """What a rank uses, and what it does."""

    memory: int | None
    """Bytes; None: it could not be found out."""
    gpu: GpuFigures | None
    busy: bool
    busy_for: float | None
    """Seconds."""
    doing: str
    """What ddip has asked for; empty for a cell."""
    seconds: float | None
    """That the last cell took."""
    collections: int
    """How often garbage was collected after a cell."""


Place: TypeAlias = "tuple[int, int, list[int]]"
"""Where a pickled object lies: in which load, where it begins there, and the sizes of its parts, bytes."""


class Packed(TypedDict):
    """Objects, pickled, by name."""

    values: dict[str, bytearray]
    """Those that are small enough to come with this."""
    sizes: dict[str, list[int]]
    """Bytes of the parts of each (``pickling.Pickled``)."""
    paths: dict[str, str]
    """Where processes of the same host can read some of the others."""
    errors: dict[str, str]
    missing: list[str]
    moved: list[str]
    """Names whose tensors were moved to the CPU."""
    wrappers: dict[str, str]
    """Which are a model in a wrapper of torch's that belongs to a process group, and the wrapper's name."""


class Going(TypedDict):
    """What goes with the groups that a rank leaves, until the user has been told."""

    wrappers: int
    """DDP, FSDP."""
    meshes: int
    """Device meshes."""
    subgroups: int
    rpc: bool
    """Was RPC begun? It is shut down now."""


class OptimizerState(TypedDict):
    """To compare with that of the other ranks."""

    name: str
    parameters: list[int]
    """Which of the parameters of the revived wrappers it has."""
    state: list[Any]
    """Checksums of its tensors, and its numbers."""


class Revived(TypedDict):
    """What goes on in the group that the ranks have joined."""

    wrappers: int
    optimizers: list[OptimizerState]


class TensorReport(TypedDict):
    """A parameter or a buffer of a model, and the part of it that a rank has."""

    name: str
    shape: list[int]
    """Of the whole."""
    dtype: str
    placement: str
    """torch's words for a DTensor; else ``plain``, ``DDP`` and the like."""
    local: list[int]
    """Shape of the part."""
    bytes: int
    """Of the part."""
    whole_bytes: int


class ShardsReport(TypedDict):
    """How a model lies on a rank."""

    kind: str
    """Name of its type."""
    is_there: bool
    tensors: list[TensorReport] | None
    """None: it is no module."""


class LineBegun(TypedDict):
    """Where a collective was begun."""

    place: dict[str, Any]
    """A `StackLocation`."""
    goes_on: bool
    """By a thread other than the main one that still runs."""


class Caught(TypedDict):
    """An error that a cell has caught and shown."""

    name: str
    message: str
    traceback: list[str]


class Released(TypedDict):
    """What a rank can always tell after a cell."""

    released: bool
    """Has the notebook released it, or an app given it up?"""
    state: Literal["ours", "none", "other"]
    """The group that it has joined, none, or one that the cell has formed."""


class CellReport(Released, total=False):
    """What became of a rank and its group in a cell."""

    rank: int
    """Its place in a group that the cell has formed."""
    size: int
    """Of that group."""
    begun: Begun
    groups: int
    """How many groups it has made."""
    changes: dict[str, int]
    """How often the cell has written to the parameters of what the ranks share: DDPs, sharded models' optimizers."""
    fault: str
    """Why it cannot tell."""
    at: float
    """When the cell ended, or raised; on ``time.time``."""
    seconds: float
    """That the cell took."""
    waited: str
    """Where it waited for others, if an error has ended that."""
    gpu: GpuState
    gpu_lost: str
    """What the GPU said, if its context is lost."""
    caught: Caught
    silent: bool
    """Has it shown nothing? Then no message follows that its output has ended."""
    replaced: dict[str, str]
    """What ``rank`` or ``world_size`` is now, in words, if the cell has given it another value."""
