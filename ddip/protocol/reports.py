"""What a rank tells of itself, as the dicts that cross between the processes."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

Ends: TypeAlias = tuple[Any, ...]
"""Of a TCP connection: host and port of this end, host and port of the other."""

MayBegin: TypeAlias = Literal["no", "maybe", "yes"]
"""May a thread other than the main one begin collectives in a group? ``maybe``: its code may do anything, but it has
not used the group so far."""


class GroupUse(TypedDict):
    """The operations that a rank has begun in a group since the group was formed."""

    collectives: int
    messages: dict[str, int]
    """Sends and receives by direction: ``to 1``, ``from 0``, ``from any``, with ranks of the group."""
    ranks: list[int] | None
    """Ranks of the group; None: all."""
    by_main: bool
    """Has Python code in the main thread begun all of the collectives?"""
    by_threads: bool
    """Has Python code in another thread that Python started begun any operation?"""
    may_begin: MayBegin


Begun: TypeAlias = dict[str, GroupUse]
"""By group and device."""


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
    off: dict[str, dict[str, list[str]]]
    """By library and version: features that are off, as a line tells them, with the private names that they lack."""
    native_off: list[str]
    """Names of ``switches.py`` that are off."""


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


Place: TypeAlias = "tuple[str, int, int, list[int]]"
"""Where a pickled object lies: its name, in which load, where it begins there, and the sizes of its parts, bytes."""


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
    sizes: list[tuple[str, list[int]]]
    """Bytes of the parts of each (``pickling.Pickled``), in the order in which they are to be loaded."""
    paths: dict[str, str]
    """Where processes of the same host can read some of the others."""
    errors: dict[str, str]
    missing: list[str]
    moved: list[str]
    """Names whose tensors were moved to the CPU."""
    along: list[str]
    """Names that were not asked for, and that functions read."""
    shares: list[str]
    """What belongs to a variable that stays: ``opt holds parameters of net``."""
    wrappers: dict[str, str]
    """Which are a model in a wrapper of torch's that belongs to a process group, and the wrapper's name."""


class CallNotes(TypedDict):
    """Variables of a rank that a call of ``in_torchddp`` met."""

    other: list[str]
    """They have another value than the notebook's, which the call used."""
    used: dict[str, str]
    """The call used them, as the notebook's was not sent: why."""


class Peeked(Packed):
    """Objects as they were at this moment, pickled beside the cell that may run."""

    busy: bool
    """Does a cell run?"""
    inside: str
    """The operation that the cell was inside while the memory of tensors was copied; empty: it was in none."""


class Going(TypedDict):
    """What goes with the groups that a rank leaves, until the user has been told."""

    wrappers: int
    """DDP, FSDP."""
    meshes: int
    """Device meshes."""
    subgroups: int
    rpc: bool
    """Does RPC run? It knows the processes of the former group."""


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


class AtRest(TypedDict):
    """A flag, constant or empty container that was the same after each good cell, and that a fault has changed."""

    path: str
    before: str
    now: str
    owner: str
    part: str


class Compared(TypedDict):
    """State of a rank's variables: per path its hash, its value's and its version's, 8 bytes each (0: none)."""

    now: bytes
    good: bytes
    """After the last good cell; empty: not known."""
    former: bytes
    """After the good cell before."""
    has_history: bool
    at_rest: list[AtRest]
    is_cut: bool
    """Whether there are more objects than are compared."""


class Described(TypedDict):
    """A path in the variables of a rank."""

    path: str
    value: str | None
    """In words; None: only its version differs."""
    owner: str
    """Path of the object to name for it."""
    part: str
    """Which part of the owner it is: ``gradients``, ``state`` and so on."""
    counts: bool
    """Whether such values seldom differ by design: counters, flags, lengths, generators."""
    is_new_evidence: bool
    """Whether that holds even if no good cell had the path: counters, enums, generators."""
    is_trained: bool
    """Whether it is a parameter, or an optimizer's state of one."""
    role: str
    """What its object is in a training: ``module``, ``optimizer``, ``generator`` and so on; empty for any other."""
    sharded: bool
    """Whether its variable holds parameters of which each rank has a part."""


class Advice(TypedDict):
    """Something about one rank's training that is seldom meant."""

    path: str
    what: str
    todo: str


class Checked(TypedDict):
    """Advice of ``%dipcheck`` that one rank alone can give."""

    advice: list[Advice]
    names: list[str]
    """The variables that were looked at."""
    objects: int
    """Variables and generators that were compared."""


class Synced(TypedDict):
    """Result of a copy of one rank's state into the other ranks' objects."""

    copied: list[str]
    """Paths that have the source's values now."""
    refused: dict[str, str]
    """Paths that could not be copied, and why."""


class IterationReport(TypedDict):
    """Position of a rank in its training when a cell ended."""

    forward: bool
    """Has a forward pass begun since the last backward pass, or step?"""
    unfinished: bool
    """Was it within a backward pass, or within an optimizer's step?"""
    backwards: int
    """Backward passes that it has finished."""
    steps: int
    """Steps of optimizers."""
    in_thread: bool
    """Does a thread train that outlives the cell? Then all else is unknown."""


class IterationFacts(TypedDict):
    """Further evidence that a rank is within an iteration."""

    unfinished: bool
    """Are shards gathered, or gradients not reduced or only unscaled?"""
    gradients: dict[str, list[int | None]]
    """Of each DDP over the default group, by its number: which of its gradients there are, and checksums of these."""
    models: list[str]
    """Variables that hold a model of which the cell has changed gradients; empty for one that no variable holds."""


class AbortedTensor(TypedDict):
    """A tensor that an aborted collective has written in part."""

    place: dict[str, Any]
    """A `StackLocation`: the line that began the collective."""
    restored: bool


class Caught(TypedDict):
    """An error that a cell has caught and shown."""

    name: str
    message: str
    traceback: list[str]


class SettingLeft(TypedDict):
    """A setting of the process that has another value after a cell than before it."""

    left: str
    """As a user would call it, such as ``gradients disabled``."""
    restore: str
    """What a user types to have the former value again."""
    differs_by_rank: bool
    """May ranks have different values without anybody asking why?"""


class Released(TypedDict):
    """What a rank can always tell after a cell."""

    released: bool
    """Has the notebook released it, an app given it up, or a collective lost a connection?"""
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
    unchecked: list[str]
    """Errors of ddip in what it does before and after each cell to find out what a fault has left."""
    iteration: IterationReport
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
    aborted: list[AbortedTensor]
    settings: list[SettingLeft]
    """Of the process, that the cell has left changed."""
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
