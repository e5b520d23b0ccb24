"""List the functions of ``ddip.rank`` that the notebook calls, one row per function: its types and a label for users.

    notebook   ranks.ask(to, on_rank.read_clock())  -->  RemoteCall("profiling.profiling.read_clock", ())  -->  message
    rank       message  -->  call_target("profiling.profiling.read_clock")
                        -->  ddip.rank.profiling.profiling.read_clock()

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
    AdviceReport,
    Begun,
    CallNotes,
    Compared,
    Described,
    Digests,
    Ends,
    Figures,
    Hello,
    IterationFacts,
    IterationReset,
    LeaveReport,
    LoadReport,
    PackedObjects,
    Paths,
    Peeked,
    PendingWait,
    Place,
    ProfileReport,
    PushResult,
    SaveReport,
    SaveStatus,
    ShardsReport,
    Synced,
    Vitals,
)

VERSION = 29
"""Version of the protocol; raise it when a row or a report changes. A rank sends its version in the `Hello`, and the
notebook refuses any other version."""
IMPORTED = "is imported already"
"""Answer of `take_modules` for a module that it has left unchanged."""
STEPPED_ROLES = ("optimizer", "scheduler", "scaler")
"""Roles of objects whose values seldom differ by design, whatever their type."""
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
    """Return a decorator that makes a `Remote` for `target` of a function without a body.

    The function has the types of `target`. `label`: what the rank does, for messages; `own_thread` as in `RemoteCall`.
    """
    return lambda signature: Remote(target, label or target, signature, own_thread)


# -- on the main thread, where a cell runs


READING = (
    "pulling",
    "reading settings of the process",
    "looking at the training state",
    "looking at the model",
    "looking for names",
    "looking for help",
    "comparing the variables",
    "checking the variables",
    "saving the variables",
)
"""Labels of the requests that change no variable."""


@remote("process_group.membership.join_group", "forming the group")
def join_group(rank_spec: RankSpec) -> tuple[list[Ends], list[int]]: ...


@remote("process_group.membership.leave_group", "leaving the group")
def leave_group() -> LeaveReport: ...


@remote("objects.wrappers.revive_wrappers", "reviving DDP wrappers")
def revive_wrappers() -> int: ...


@remote("runtime.process_settings.find_changed", "reading settings of the process")
def find_changed_settings() -> dict[str, bytes]: ...


@remote("runtime.process_settings.take_over", "setting up a new rank")
def take_over_settings(changed: dict[str, bytes]) -> list[tuple[str, str]]: ...


@remote("objects.iteration.iteration_facts", "looking at the training state")
def iteration_facts() -> IterationFacts: ...


@remote("objects.iteration.reset_iteration", "resetting the training iteration")
def reset_iteration(broken: bool, models: list[str], is_same_group: bool) -> IterationReset: ...


@remote("runtime.seeds.start_facts", "reading settings of the process")
def start_facts() -> tuple[int, int, str, list[str]]: ...


@remote("saves.points.watch_warnings", "saving the variables")
def watch_warnings() -> None: ...


@remote("objects.names.exported_names", "looking for names")
def exported_names(modules: list[str]) -> dict[str, dict[str, str]]: ...


@remote("objects.result_values.pack_results", "pulling")
def pack_results(names: list[str]) -> tuple[bytes, dict[str, str]]: ...


@remote("process_group.membership.check_group", "using the group")
def check_group() -> None: ...


@remote("objects.rank_transfer.apply_push", "pushing")
def apply_push(
    push: int, places: list[Place], along: list[str], small: bytes | bytearray = b"", paths: Paths | None = None
) -> PushResult: ...


@remote("objects.rank_transfer.lacking_names", "pushing")
def lacking_names(names: list[str]) -> list[str]: ...


@remote("objects.rank_transfer.append_part", "pushing")
def append_part(load: int, part: bytes, first: bool, share: bool) -> str: ...


@remote("objects.rank_transfer.attach_load", "pushing")
def attach_load(load: int, path: str, size: int) -> bool: ...


@remote("saves.holders.find_push_holders", "pushing")
def find_push_holders(names: list[str]) -> dict[str, list[str]]: ...


@remote("objects.rank_transfer.settle_push", "pushing")
def settle_push() -> None: ...


@remote("objects.rank_transfer.drop_transfers", "pushing")
def drop_transfers(push: int = 0) -> None: ...


@remote("objects.rank_modules.write_module", "pushing modules")
def write_module(folder: str, name: str, files: dict[str, bytes]) -> None: ...


@remote("objects.rank_modules.take_modules", "pushing modules")
def take_modules(folder: str, names: list[str], reload: bool) -> dict[str, str]: ...


@remote("objects.rank_transfer.pack_variables", "pulling")
def pack_variables(names: list[str], most: int, share: bool, known: str) -> PackedObjects: ...


@remote("objects.rank_transfer.pull_part", "pulling")
def pull_part(name: str, begin: int, end: int) -> bytes: ...


@remote("kernel.app_hooks.prepare_app", "preparing the app")
def prepare_app(module: str) -> None: ...


@remote("kernel.app_hooks.release_app", "releasing the app")
def release_app(module: str) -> None: ...


@remote("kernel.app_hooks.notify_app_rejoined", "notifying the app of the rebuilt group")
def notify_app_rejoined(module: str) -> None: ...


@remote("kernel.app_hooks.run_app_command", "the app's command")
def run_app_command(module: str, text: str) -> str | None: ...


@remote("objects.shards_report.describe_shards", "looking at the model")
def describe_shards(name: str) -> ShardsReport: ...


@remote("debugging.ide_service.serve_ide", "starting the service for an IDE")
def serve_ide(token: str) -> int | str: ...


@remote("profiling.profiling.prepare_profile", "preparing the profile")
def prepare_profile() -> None: ...


@remote("profiling.profiling.collect_profile", "collecting the profile")
def collect_profile(path: str) -> ProfileReport: ...


@remote("profiling.profiling.trace_part", "fetching the trace")
def trace_part(begin: int, end: int) -> bytes: ...


@remote("objects.names.complete_code", "looking for names")
def complete_code(code: str, cursor: int) -> dict[str, Any]: ...


@remote("objects.names.inspect_code", "looking for help")
def inspect_code(code: str, cursor: int, detail: int) -> dict[str, Any]: ...


@remote("inspection.state_report.hash_variables", "comparing the variables")
def hash_variables(cells: list[str], after_fault: bool) -> Compared: ...


@remote("inspection.state_report.list_snapshots", "comparing the variables")
def list_snapshots(failed: str) -> list[str]: ...


@remote("inspection.state_report.describe_paths", "comparing the variables")
def describe_paths(hashes: list[int]) -> dict[int, Described]: ...


@remote("inspection.state_report.find_stepped_objects", "comparing the variables")
def find_stepped_objects() -> tuple[list[str], int]: ...


@remote("inspection.stale.rank_marks", "comparing the variables")
def rank_marks(rank: int) -> list[int]: ...


@remote("inspection.stale.refuse_stale", "comparing the variables")
def refuse_stale(marks: list[int], size: int) -> list[str]: ...


@remote("inspection.stale.find_copied_ranks", "comparing the variables")
def find_copied_ranks(names: list[str], source: int, size: int) -> list[str]: ...


@remote("inspection.advice.find_advice", "checking the variables")
def find_advice(names: list[str], size: int) -> AdviceReport: ...


@remote("inspection.state_sync.sync_state", "copying the state of a rank")
def sync_state(names: list[str], paths: list[int], source: int, cells: list[str]) -> Synced: ...


@remote("saves.save_state.save_variables", "saving the variables")
def save_variables(folder: str, names: list[str], background: bool) -> SaveReport: ...


@remote("saves.load_state.load_variables", "loading the variables")
def load_variables(folder: str, names: list[str], anyway: bool) -> LoadReport: ...


# -- on the control thread, while a cell runs


@remote("saves.points.request_save")
def request_save() -> int: ...


@remote("saves.points.describe_saves")
def describe_saves() -> SaveStatus: ...


@remote("runtime.housekeeping.make_hello")
def make_hello() -> Hello: ...


@remote("runtime.housekeeping.rank_figures")
def rank_figures() -> Figures: ...


@remote("process_group.rank_vitals.current_vitals")
def current_vitals(every: float, keep: float) -> Vitals: ...


@remote("runtime.housekeeping.set_collect")
def set_collect(collect: bool) -> None: ...


@remote("runtime.housekeeping.has_kept_error")
def has_kept_error() -> bool: ...


@remote("debugging.questions.give_answer")
def give_answer(number: int, text: str | None) -> None: ...


@remote("debugging.ide_service.end_ide", own_thread=True)
def end_ide() -> None: ...


@remote("runtime.stacks.main_thread_location")
def main_thread_location() -> dict[str, Any]: ...


@remote("process_group.pending.waiting_location")
def waiting_location() -> dict[str, Any]: ...


@remote("process_group.pending.whole_stack")
def whole_stack() -> dict[str, Any]: ...


@remote("runtime.stacks.main_thread_pulse")
def main_thread_pulse() -> tuple[int, float]: ...


@remote("runtime.stacks.main_thread_phase")
def main_thread_phase() -> str: ...


@remote("native.sockets.tcp_connections")
def tcp_connections() -> list[Ends]: ...


@remote("process_group.membership.release_group")
def release_group(store: str, connections: list[Ends]) -> bool: ...


@remote("runtime.stores.serve_store")
def serve_store(address: str) -> int: ...


@remote("process_group.membership.forget_lost_objects")
def forget_lost_objects() -> list[str]: ...


@remote("process_group.membership.adopt_group")
def adopt_group(former_port: int, port: int) -> bool: ...


@remote("process_group.collectives.begun_operations")
def begun_operations() -> Begun: ...


@remote("process_group.waiting.pending_wait")
def pending_wait() -> PendingWait | None: ...


@remote("process_group.collectives.digests_up_to")
def digests_up_to(key: str, number: int) -> Digests | None: ...


@remote("process_group.collectives.signatures_of")
def signatures_of(key: str, number: int) -> list[str]: ...


@remote("process_group.collectives.place_of_signature")
def place_of_signature(key: str, number: int, back: int) -> dict[str, Any] | None: ...


@remote("process_group.collectives.line_of")
def line_of(key: str, number: int) -> dict[str, Any] | None: ...


@remote("runtime.c10d.set_groups_made")
def set_groups_made(count: int) -> None: ...


@remote("inspection.state_history.is_recorded")
def is_recorded(whole: bool) -> bool: ...


@remote("objects.rank_peek.take_peek", own_thread=True)
def take_peek(number: int, names: list[str], most: int, known: str) -> Peeked: ...


@remote("objects.rank_peek.part_of_peek")
def part_of_peek(number: int, name: str, begin: int, end: int) -> bytes: ...


@remote("objects.rank_peek.drop_peek")
def drop_peek(number: int) -> dict[str, Any]: ...


@remote("profiling.profiling.read_clock")
def read_clock() -> int: ...


@remote("objects.names.variable_names")
def variable_names(beginning: str) -> list[str]: ...


@remote("kernel.call_runner.drop_call_answer")
def drop_call_answer() -> CallNotes: ...
