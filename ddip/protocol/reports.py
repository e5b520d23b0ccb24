"""Reports that a rank sends to the notebook, as plain dicts."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, TypedDict

Ends: TypeAlias = tuple[Any, ...]
"""Ends of a TCP connection: local host and port, remote host and port."""

MayBegin: TypeAlias = Literal["no", "maybe", "yes"]
"""Possibility that a thread other than the main one begins collectives in a group. ``maybe``: its code may do anything,
but it has not used the group so far."""


class GroupUse(TypedDict):
    """The operations that a rank has begun in a group since the group was formed."""

    collectives: int
    messages: dict[str, int]
    """Number of sends and receives by direction: ``to 1``, ``from 0``, ``from any``, with ranks of the group."""
    ranks: list[int] | None
    """Ranks of the group; None: all."""
    by_python: int
    """Number of collectives begun by Python code."""
    digest: int
    """Digest of their operations, sizes, dtypes, reductions and roots, which is equal on all ranks of a group."""
    positions: int
    """Digest of their positions among all collectives of the group, including those that C++ has begun."""
    by_main: bool
    """True if Python code in the main thread has begun all of the collectives."""
    by_threads: bool
    """True if Python code in another thread that Python started has begun any operation."""
    may_begin: MayBegin


Digests: TypeAlias = tuple[int, int, int]
"""The items ``by_python``, ``digest`` and ``positions`` of `GroupUse`."""
Begun: TypeAlias = dict[str, GroupUse]
"""Use of each group, by name of the group and device."""


class PendingWait(TypedDict):
    """A rank whose main thread waits for other ranks."""

    position: int
    """Number that changes when the main thread moves."""
    begun: Begun
    """The operations begun that it may wait for: all, unless it waits for a known work."""


class Hello(TypedDict):
    """Facts about a process and its torch, sent when the process starts."""

    version: int
    """``VERSION`` of ``on_rank.py``."""
    pid: int
    host: str
    torch: str
    cuda: bool
    """True if torch was built for GPUs."""
    backends: list[str]
    off: dict[str, dict[str, list[str]]]
    """Features that are off, by library and version: their loss in words, and the missing private names."""
    native_off: list[str]
    """Names of the mechanisms of ``switches.py`` that are off."""


GpuState: TypeAlias = Literal["done", "under way", "lost"]
"""State of a rank's GPU after a cell. ``done``: idle. ``under way``: kernels of the cell are running. ``lost``: the
GPU is unusable because its context is lost."""


class GpuFigures(TypedDict):
    """GPU memory in bytes as torch counts it, without the memory of the CUDA context and of NCCL."""

    allocated: int
    reserved: int
    total: int


class Figures(TypedDict):
    """Resources that a rank uses, and its current work."""

    memory: int | None
    """Bytes; None: unknown."""
    gpu: GpuFigures | None
    busy: bool
    busy_for: float | None
    """Seconds since the cell or request began."""
    doing: str
    """Request of ddip that the rank is serving; empty for a cell."""
    seconds: float | None
    """Duration of the last cell."""
    collections: int
    """Number of garbage collections after cells."""


class DeviceFigures(TypedDict):
    """Figures of a GPU from its driver, for all processes that use the GPU."""

    use: float
    """Share of the driver's last sample period in which a kernel was running, from 0 to 1."""
    memory: int
    """Bytes in use."""
    total: int
    temperature: int | None
    """Degrees Celsius."""


class Vitals(Figures):
    """Live figures of a rank; counts begin at the start of its process."""

    at: float
    """Time of the reading on the ``time.monotonic`` clock of its host, seconds."""
    cell: int | None
    """Number of the running cell."""
    place: dict[str, Any]
    """A `StackLocation`."""
    cpu: float
    """Seconds of CPU time, including child processes."""
    steps: int
    """Steps of all optimizers."""
    collectives: int
    """Number of collectives begun in the rank's current groups."""
    bars: list[tuple[int, int | None]]
    """Position and total (None: unknown) of each progress bar, outermost first."""
    waited: float | None
    """Seconds that the main thread waited for other ranks while it was sampled; None: unknown."""
    looked: float
    """Seconds of cells during which the main thread was sampled."""
    device: DeviceFigures | None


Place: TypeAlias = "tuple[str, int, int, list[int]]"
"""Position of a pickled object: name, number of its load, offset in the load, and sizes of its parts; bytes."""


Paths: TypeAlias = dict[int, tuple[str, int]]
"""Path and size in bytes of each load, by number, for processes of the same host to read."""


class PushResult(TypedDict):
    """Result of a push on one rank."""

    errors: dict[str, str]
    """Errors of unpickling, by name. If there are any, the rank has kept nothing of the push."""
    unread: bool
    """True if the rank could not read a path. Then it has kept nothing of the push either."""
    replaces: bool
    """True if the rank still keeps a replaced value that may be large or hold resources."""
    trained: list[str]
    """Names of replaced models, optimizers and leaf tensors that require a gradient, if other objects may hold them."""


class PackedObjects(TypedDict):
    """Pickled objects of a rank, by name."""

    values: dict[str, bytearray]
    """Pickled objects that are small enough for this message."""
    sizes: list[tuple[str, list[int]]]
    """Sizes in bytes of the parts of each object (``pickling.Pickled``), in the order of loading."""
    paths: dict[str, str]
    """Paths at which processes of the same host can read other objects."""
    errors: dict[str, str]
    missing: list[str]
    moved: list[str]
    """Names whose tensors were moved to the CPU."""
    along: list[str]
    """Names that were not requested, but that functions read."""
    shares: list[str]
    """Links to variables that are not pickled: ``opt holds parameters of net``."""
    wrappers: dict[str, str]
    """Objects that are a model in a torch wrapper bound to a process group, with the wrapper's name."""


class CallNotes(TypedDict):
    """Variables of a rank whose names a call of ``in_torchddp`` uses."""

    other: list[str]
    """Variables whose value differs from the notebook's; the call used the notebook's."""
    used: dict[str, str]
    """Variables that the call used because the notebook's was not sent, with the reason."""


class Peeked(PackedObjects):
    """Pickled objects of a rank, read while a cell may be running."""

    inside: str
    """Operation that the cell was inside while tensor memory was copied; empty: none."""


class LostObjects(TypedDict):
    """Objects lost with the groups that a rank has left, until the user has been told."""

    wrappers: int
    """Number of DDP and FSDP wrappers."""
    meshes: int
    """Number of device meshes."""
    subgroups: int
    rpc: bool
    """True if RPC is running; it refers to the processes of the former group."""


class LeaveReport(LostObjects):
    """Report of a rank that has left its group."""

    gpu_lost: str
    """Error of a GPU context that is no longer usable; empty if it is."""


class TensorReport(TypedDict):
    """A parameter or buffer of a model, and the part of it on one rank."""

    name: str
    shape: list[int]
    """Shape of the whole tensor."""
    dtype: str
    placement: str
    """torch's notation for a DTensor; otherwise ``plain``, ``DDP`` and so on."""
    local: list[int]
    """Shape of the part on this rank."""
    bytes: int
    """Bytes of the part on this rank."""
    whole_bytes: int


class ShardsReport(TypedDict):
    """Layout of a model on one rank."""

    kind: str
    """Name of the type of the variable."""
    is_there: bool
    tensors: list[TensorReport] | None
    """None: the variable is not a module."""


class ChangedConstant(TypedDict):
    """A flag, constant or empty container that was the same after good cells and that a fault has changed."""

    path: str
    before: str
    now: str
    owner: str
    part: str


class Compared(TypedDict):
    """State of a rank's variables: per path, hashes of path, value and version, 8 bytes each (0: none)."""

    now: bytes
    good: bytes
    """State after the last good cell; empty: unknown."""
    former: bytes
    """State after the second to last good cell; empty: unknown."""
    has_history: bool
    at_rest: list[ChangedConstant]
    is_cut: bool
    """True if there are more objects than ddip compares."""


class Described(TypedDict):
    """A path in the variables of a rank."""

    path: str
    value: str | None
    """Value in words; None: only the version differs."""
    owner: str
    """Path of the object to name in a message about the difference."""
    part: str
    """Part of the owner that the path is in: ``gradients``, ``state`` and so on."""
    counts: bool
    """True if such values seldom differ by design: counters, flags, lengths, generators."""
    is_new_evidence: bool
    """True if the value is evidence even if no good cell had the path: counters, enums, generators."""
    is_trained: bool
    """True for a parameter, or an optimizer's state of one."""
    role: str
    """Role of its object in training: ``module``, ``optimizer``, ``generator`` and so on; otherwise empty."""
    sharded: bool
    """True if its variable holds sharded parameters."""


class Advice(TypedDict):
    """A probable mistake in the training on one rank."""

    path: str
    what: str
    todo: str


class AdviceReport(TypedDict):
    """Advice of ``%dipcheck`` that needs no comparison between ranks."""

    advice: list[Advice]
    names: list[str]
    """Variables that were checked."""
    objects: int
    """Number of variables and generators that were compared."""


class Synced(TypedDict):
    """Result of a copy of one rank's state into the other ranks' objects."""

    copied: list[str]
    """Paths that now have the source's values."""
    refused: dict[str, str]
    """Paths that could not be copied, and why."""


class SaveReport(TypedDict):
    """Result of a save of the ranks' variables; the same on all ranks."""

    error: str
    """Reason why nothing was saved; empty if it was."""
    size: int
    """Bytes of all tensors and pickles."""
    variables: dict[str, str]
    """``equal``, ``sharded`` or ``per rank`` for each saved variable."""
    left_out: dict[str, str]
    """Reasons why variables could not be saved, by name."""
    seconds: float
    """Time that the ranks were busy."""


class SaveStatus(TypedDict):
    """The saves of one rank so far."""

    warned: int
    """Complete saves at points of a loop after a scheduler's warning."""
    writing: bool
    """True while a thread writes a save."""
    error: str
    """Reason why the last save in the background failed; empty if it did not."""


class LoadReport(TypedDict):
    """Result of a load of saved variables."""

    error: str
    """Reason why nothing was loaded; empty if it was."""
    time: float
    """Unix time of the save, in seconds."""
    ranks: int
    """Number of ranks that saved."""
    loaded: list[str]
    in_place: list[str]
    """Those of the loaded variables whose existing objects were filled."""
    not_loaded: dict[str, str]
    """Reasons why saved variables were not loaded, or variables were not saved, by name."""
    kept: dict[str, str]
    """Reasons why functions and classes of this session were kept, by name."""
    holders: list[str]
    """Variables that hold an object that the load has replaced."""


class IterationReport(TypedDict):
    """Position of a rank in its training when a cell ended."""

    forward: bool
    """True if a forward pass has begun since the last backward pass or optimizer step."""
    unfinished: bool
    """True if the cell ended within a backward pass or an optimizer step."""
    in_step: bool
    """True if the last step of an optimizer has begun and not ended, or steps ended in a backward pass that failed."""
    backwards: int
    """Number of finished backward passes."""
    steps: int
    """Number of finished optimizer steps."""
    in_thread: bool
    """True if a thread that outlives the cell is training. Then the other values are unknown."""


class IterationFacts(TypedDict):
    """Further evidence that a rank is within an iteration."""

    unfinished: bool
    """True if shards are still gathered, or gradients are not reduced or only unscaled."""
    gradients: dict[str, list[int | None]]
    """Per DDP over the default group, by number: a flag per parameter, 1 if it has a gradient, then checksums of these
    gradients."""
    models: list[str]
    """Variables whose model had gradients changed by the cell; an empty name for a model that no variable holds."""


class IterationReset(TypedDict):
    """Result of the reset of an iteration on one rank."""

    cleared: list[str]
    """Variables of the models whose gradients were cleared."""
    hooks: list[str]
    """Variables of DDP models whose communication hooks, which are the user's, may keep values of the iteration."""


class AbortedTensor(TypedDict):
    """A tensor that an aborted collective may have written in part."""

    place: dict[str, Any]
    """A `StackLocation`: the line that began the collective."""
    restored: bool


class CaughtError(TypedDict):
    """An error that the cell itself caught and displayed."""

    name: str
    message: str
    traceback: list[str]


class ChangedSetting(TypedDict):
    """A setting of the process that a cell has left with a different value."""

    left: str
    """Description for users, such as ``gradients disabled``."""
    restore: str
    """Code that restores the former value."""
    differs_by_rank: bool
    """True if different values on different ranks are normal."""


class Released(TypedDict):
    """The part of a cell's report that is always present."""

    released: bool
    """True if the notebook released the group, an app gave it up, or a collective lost its connection."""
    state: Literal["ours", "none", "other"]
    """Default group of the rank: ddip's, none, or one that the cell has formed."""


class CellReport(Released, total=False):
    """State of a rank and its group after a cell."""

    rank: int
    """Rank of this process in the group that the cell has formed."""
    size: int
    """Size of that group."""
    begun: Begun
    groups: int
    """torch's count of the groups that the rank has made."""
    changes: dict[str, int]
    """Number of times the cell wrote parameters that ranks share, by object: DDPs, optimizers of sharded models."""
    fault: str
    """Reason why the rank cannot report its group."""
    unchecked: list[str]
    """Internal errors of ddip in its checks before and after the cell."""
    iteration: IterationReport
    at: float
    """Time at which the cell ended or raised, on the ``time.time`` clock."""
    seconds: float
    """Duration of the cell."""
    waited: str
    """Location at which the rank waited for others until an error ended the wait."""
    gpu: GpuState
    gpu_lost: str
    """Error message of the GPU if its context is lost."""
    caught: CaughtError
    aborted: list[AbortedTensor]
    settings: list[ChangedSetting]
    """Settings of the process that the cell has left changed."""
    replaced: dict[str, str]
    """New value, in words, of ``rank`` or ``world_size`` if the cell has overwritten it."""
    hidden: str
    """End of the text of a cell that raised, if the notebook does not show this rank."""


CollectiveRow: TypeAlias = "tuple[str, list[int], int, str, list[list[int]], list[str], int, int]"
"""A collective in a profile: name and ranks of its group, number in the group, operation, shapes and dtypes of the
inputs, and the times at which this rank began it and had its result, in nanoseconds of the rank's ``time.time_ns``."""


class ProfileReport(TypedDict):
    """Breakdown of a cell's time on one rank: times on ``time.time_ns``, sums in seconds."""

    fault: str
    """Reason why there is no profile; empty if there is one."""
    note: str
    """Reason why the recording ended before the cell did; otherwise empty."""
    begin: int
    end: int
    compute: float
    python: float
    """Part of `compute`."""
    loading: float
    idle: float
    communication: list[tuple[int, int, float]]
    """Intervals with communication: begin, end, and share of the interval spent communicating."""
    collectives: list[CollectiveRow]
    events: int
    size: int
    """Size of the trace, bytes."""
