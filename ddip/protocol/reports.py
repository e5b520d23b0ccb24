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


class DeviceFigures(TypedDict):
    """A GPU as its driver has it, with all processes that use it."""

    use: float
    """Share of the last moments in which it computed anything, from 0 to 1."""
    memory: int
    """In use, bytes."""
    total: int
    temperature: int | None
    """Degrees Celsius."""


class Vitals(Figures):
    """What a rank does just now; what is counted is counted from the start of its process."""

    at: float
    """When it was asked; on the ``time.monotonic`` of its host."""
    cell: int | None
    """Number of the cell that runs."""
    place: dict[str, Any]
    """A `StackLocation`."""
    cpu: float
    """Seconds of CPU time, with its children's."""
    steps: int
    """Of all optimizers."""
    collectives: int
    """Begun in the groups that it is in."""
    bars: list[tuple[int, int | None]]
    """How far progress bars are, and of how much (None: unknown), the outermost first."""
    waited: float | None
    """Seconds that the main thread has waited for other ranks while it was looked at; None: it cannot be known."""
    looked: float
    """Seconds of cells in which it was looked at."""
    device: DeviceFigures | None


Place: TypeAlias = "tuple[int, int, list[int]]"
"""Where a pickled object lies: in which load, where it begins there, and the sizes of its parts, bytes."""


Paths: TypeAlias = dict[int, tuple[str, int]]
"""Where processes of a host can read loads, by number, and how many bytes each has."""


class Put(TypedDict):
    """What became of a push on one rank."""

    errors: dict[str, str]
    """Of what cannot be unpickled there, by name; then none of it is there."""
    unread: bool
    """Could it not be read where it was said to be? Then nothing is there either."""
    replaces: bool
    """Is something kept that it has replaced, and that may be large, or hold something?"""


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


class Peeked(Packed):
    """Objects as they were at this moment, pickled beside the cell that may run."""

    busy: bool
    """Does a cell run?"""


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
    replaced: dict[str, str]
    """What ``rank`` or ``world_size`` is now, in words, if the cell has given it another value."""


CollectiveRow: TypeAlias = "tuple[str, list[int], int, str, list[list[int]], list[str], int, int]"
"""A collective of a profile: name and ranks of its group, its number there, the operation, shapes and dtypes of what
goes in, and when this rank has begun it and had its result; nanoseconds on ``time.time_ns`` of the rank."""


class ProfileReport(TypedDict):
    """Where the time of a cell went on a rank, between two moments on ``time.time_ns``; sums in seconds."""

    fault: str
    """Why there is none; empty if there is."""
    note: str
    """Why the recording has ended before the cell; empty if it has not."""
    begin: int
    end: int
    compute: float
    python: float
    """Part of `compute`."""
    loading: float
    idle: float
    communication: list[tuple[int, int, float]]
    """From when to when, and which part of that time."""
    collectives: list[CollectiveRow]
    events: int
    size: int
    """Of the trace, bytes."""
