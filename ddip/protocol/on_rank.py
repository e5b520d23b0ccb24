"""List the functions of ``ddip.rank`` that the notebook calls, one row per function: its types and a label for users.

    notebook    ranks.ask(to, on_rank.clock())  -->  RemoteCall("profiling.profiling.clock", ())  -->  message
    rank        message  -->  call("profiling.profiling.clock")  -->  ddip.rank.profiling.profiling.clock()

``tests/unit/test_on_rank.py`` compares these types with those of the functions. Calls on the control channel travel as
JSON, so that a tuple arrives as a list. Answers may contain bytes.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from ddip.protocol.rank_spec import RankSpec
from ddip.protocol.reports import (
    Begun,
    CallNotes,
    Checked,
    Compared,
    Described,
    Ends,
    Figures,
    Going,
    Hello,
    IterationFacts,
    Packed,
    Paths,
    Peeked,
    Place,
    ProfileReport,
    Put,
    ShardsReport,
    Synced,
    Vitals,
)

VERSION = 20
"""Version of the protocol; raise it when a row or a report changes. A rank sends its version in the `Hello`, and the
notebook refuses any other version."""
IMPORTED = "is imported already"
"""Answer of `take_modules` for a module that it has left unchanged."""
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class RemoteCall(Generic[R_co]):
    """Request to call a function on a rank, where it returns an ``R_co``."""

    target: str
    """``module.function`` below ``ddip.rank``."""
    args: tuple[Any, ...]
    label: str
    """Description for users, such as "pushing"."""
    own_thread: bool = False
    """True if the control channel runs the call in a separate thread, so that it can answer other calls meanwhile."""


@dataclass(frozen=True)
class Remote(Generic[P, R]):
    """A function of a rank; calling it in the notebook makes a `RemoteCall`."""

    target: str
    label: str
    signature: Callable[P, R]
    own_thread: bool = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> RemoteCall[R]:
        assert not kwargs, "arguments travel by position"
        return RemoteCall(self.target, args, self.label, self.own_thread)


def remote(target: str, label: str = "", *, own_thread: bool = False) -> Callable[[Callable[P, R]], Remote[P, R]]:
    """Return a decorator that makes a `Remote` of a function without a body."""
    return lambda signature: Remote(target, label or target, signature, own_thread)


# -- on the main thread, where a cell runs


@remote("process_group.membership.join", "forming the group")
def join(rank_spec: RankSpec) -> tuple[list[Ends], list[int]]: ...


@remote("process_group.membership.leave", "leaving the group")
def leave() -> Going: ...


@remote("objects.wrappers.revive", "reviving DDP wrappers")
def revive() -> int: ...


@remote("runtime.process_settings.find_changed", "reading settings of the process")
def find_changed_settings() -> dict[str, bytes]: ...


@remote("runtime.process_settings.take_over", "setting up a new rank")
def take_over_settings(changed: dict[str, bytes]) -> list[tuple[str, str]]: ...


@remote("objects.iteration.facts", "looking at the training state")
def iteration_facts() -> IterationFacts: ...


@remote("objects.iteration.reset", "resetting the training iteration")
def reset_iteration(broken: bool, models: list[str], is_same_group: bool) -> list[str]: ...


@remote("process_group.membership.check", "using the group")
def check() -> None: ...


@remote("objects.rank_transfer.put", "pushing")
def put(
    push: int, places: list[Place], along: list[str], small: bytes | bytearray = b"", paths: Paths | None = None
) -> Put: ...


@remote("objects.rank_transfer.lacking", "pushing")
def lacking(names: list[str]) -> list[str]: ...


@remote("objects.rank_transfer.add", "pushing")
def add(load: int, part: bytes, first: bool, share: bool) -> str: ...


@remote("objects.rank_transfer.attach", "pushing")
def attach(load: int, path: str, size: int) -> bool: ...


@remote("objects.rank_transfer.settle", "pushing")
def settle() -> None: ...


@remote("objects.rank_transfer.drop", "pushing")
def drop(push: int = 0) -> None: ...


@remote("objects.rank_modules.write", "pushing modules")
def write_modules(folder: str, name: str, files: dict[str, bytes]) -> None: ...


@remote("objects.rank_modules.take", "pushing modules")
def take_modules(folder: str, names: list[str], reload: bool) -> dict[str, str]: ...


@remote("objects.rank_transfer.pack", "pulling")
def pack(names: list[str], most: int, share: bool, known: str) -> Packed: ...


@remote("objects.rank_transfer.part", "pulling")
def part(name: str, begin: int, end: int) -> bytes: ...


@remote("kernel.app_hooks.prepare", "preparing the app")
def prepare_app(module: str) -> None: ...


@remote("kernel.app_hooks.release", "releasing the app")
def release_app(module: str) -> None: ...


@remote("kernel.app_hooks.rejoined", "notifying the app of the rebuilt group")
def tell_app_rejoined(module: str) -> None: ...


@remote("kernel.app_hooks.command", "the app's command")
def command_app(module: str, text: str) -> str | None: ...


@remote("objects.shards_report.describe", "looking at the model")
def describe_shards(name: str) -> ShardsReport: ...


@remote("profiling.profiling.prepare", "preparing the profile")
def prepare_profile() -> None: ...


@remote("profiling.profiling.collect", "collecting the profile")
def collect_profile(path: str) -> ProfileReport: ...


@remote("profiling.profiling.part", "fetching the trace")
def trace_part(begin: int, end: int) -> bytes: ...


@remote("objects.names.complete", "looking for names")
def complete(code: str, cursor: int) -> dict[str, Any]: ...


@remote("objects.names.inspect", "looking for help")
def inspect(code: str, cursor: int, detail: int) -> dict[str, Any]: ...


@remote("inspection.compare", "comparing the variables")
def compare(cells: list[str], after_fault: bool) -> Compared: ...


@remote("inspection.snapshots", "comparing the variables")
def snapshots(failed: str) -> list[str]: ...


@remote("inspection.describe", "comparing the variables")
def describe(hashes: list[int]) -> dict[int, Described]: ...


@remote("inspection.rank_marks", "comparing the variables")
def rank_marks(rank: int) -> list[int]: ...


@remote("inspection.refuse_stale", "comparing the variables")
def refuse_stale(marks: list[int], size: int) -> list[str]: ...


@remote("inspection.advise", "checking the variables")
def advise(names: list[str], size: int) -> Checked: ...


@remote("inspection.sync", "copying the state of a rank")
def sync_state(names: list[str], paths: list[int], source: int, cells: list[str]) -> Synced: ...


# -- on the control thread, while a cell runs


@remote("runtime.housekeeping.hello")
def hello() -> Hello: ...


@remote("runtime.housekeeping.figures")
def figures() -> Figures: ...


@remote("process_group.rank_vitals.now")
def vitals(every: float, keep: float) -> Vitals: ...


@remote("runtime.housekeeping.set_collect")
def set_collect(collect: bool) -> None: ...


@remote("runtime.stacks.here")
def here() -> dict[str, Any]: ...


@remote("process_group.pending.whole_stack")
def whole_stack() -> dict[str, Any]: ...


@remote("runtime.stacks.pulse")
def pulse() -> tuple[int, float]: ...


@remote("runtime.stacks.phase")
def phase() -> str: ...


@remote("native.sockets.connections")
def connections() -> list[Ends]: ...


@remote("process_group.membership.release")
def release(store: str, connections: list[Ends]) -> bool: ...


@remote("runtime.stores.listen")
def listen(address: str) -> int: ...


@remote("process_group.membership.forget_gone")
def forget_gone() -> None: ...


@remote("process_group.membership.adopt")
def adopt(former_port: int, port: int) -> bool: ...


@remote("process_group.collectives.begun")
def begun() -> Begun: ...


@remote("process_group.collectives.line_of")
def line_of(key: str, number: int) -> dict[str, Any] | None: ...


@remote("runtime.c10d.set_groups_made")
def set_groups_made(count: int) -> None: ...


@remote("inspection.is_recorded")
def is_recorded(whole: bool) -> bool: ...


@remote("objects.rank_peek.take", own_thread=True)
def take_peek(number: int, names: list[str], most: int, known: str) -> Peeked: ...


@remote("objects.rank_peek.part")
def part_of_peek(number: int, name: str, begin: int, end: int) -> bytes: ...


@remote("objects.rank_peek.drop")
def drop_peek(number: int) -> dict[str, Any]: ...


@remote("profiling.profiling.clock")
def clock() -> int: ...


@remote("objects.names.has")
def has_name(name: str) -> bool: ...


@remote("kernel.call_runner.forget")
def forget_call() -> CallNotes: ...
