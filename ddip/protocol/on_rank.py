"""Every function of ``ddip.rank`` that the notebook calls, a row each: its types, and what it is called for people.

    notebook    ranks.ask(to, on_rank.add(part, ...))  -->  RemoteCall("transfer.add", (part, ...))  -->  message
    rank        message  -->  call("transfer.add", part, ...)  -->  ddip.rank.transfer.add(part, ...)

``tests/unit/test_on_rank.py`` compares the types with those of the functions. What goes over the control channel is
JSON: a tuple arrives as a list. Answers may have bytes in them.
"""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

from ddip.protocol.rank_spec import RankSpec
from ddip.protocol.reports import (
    Begun,
    Ends,
    Figures,
    Going,
    Hello,
    LineBegun,
    Packed,
    Paths,
    Peeked,
    Place,
    ProfileReport,
    Put,
    Revived,
    ShardsReport,
    Vitals,
)

VERSION = 13
"""Of the protocol: raise it when a row or a report changes. A rank tells its own in the hello, and the notebook refuses
another."""
IMPORTED = "is imported already"
"""What `take_modules` says of a module that stays as it is."""
P = ParamSpec("P")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


@dataclass(frozen=True)
class RemoteCall(Generic[R_co]):
    """A call of a function of a rank, which returns an ``R_co`` there."""

    target: str
    """``module.function`` of ``ddip.rank``."""
    args: tuple[Any, ...]
    label: str
    """What it does, for people: "pushing"."""
    own_thread: bool = False
    """On the control channel: is it done in a thread of its own, so that others are answered meanwhile?"""


@dataclass(frozen=True)
class Remote(Generic[P, R]):
    """A function of a rank; called here, it makes a `RemoteCall`."""

    target: str
    label: str
    signature: Callable[P, R]
    own_thread: bool = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> RemoteCall[R]:
        assert not kwargs, "arguments travel by position"
        return RemoteCall(self.target, args, self.label, self.own_thread)


def remote(target: str, label: str = "", *, own_thread: bool = False) -> Callable[[Callable[P, R]], Remote[P, R]]:
    """Of a function without a body."""
    return lambda signature: Remote(target, label or target, signature, own_thread)


# -- on the main thread, where a cell runs


@remote("process_group.join", "forming the group")
def join(rank_spec: RankSpec) -> tuple[list[Ends], list[int]]: ...


@remote("process_group.leave", "leaving the group")
def leave() -> Going: ...


@remote("wrappers.revive", "reviving DDP wrappers")
def revive() -> Revived: ...


@remote("process_group.check", "using the group")
def check() -> None: ...


@remote("transfer.put", "pushing")
def put(push: int, places: dict[str, Place], small: bytes | bytearray = b"", paths: Paths | None = None) -> Put: ...


@remote("transfer.add", "pushing")
def add(load: int, part: bytes, first: bool, share: bool) -> str: ...


@remote("transfer.attach", "pushing")
def attach(load: int, path: str, size: int) -> bool: ...


@remote("transfer.settle", "pushing")
def settle() -> None: ...


@remote("transfer.drop", "pushing")
def drop(push: int = 0) -> None: ...


@remote("modules.write", "pushing modules")
def write_modules(folder: str, name: str, files: dict[str, bytes]) -> None: ...


@remote("modules.take", "pushing modules")
def take_modules(folder: str, names: list[str], reload: bool) -> dict[str, str]: ...


@remote("transfer.pack", "pulling")
def pack(names: list[str], most: int, share: bool) -> Packed: ...


@remote("transfer.part", "pulling")
def part(name: str, begin: int, end: int) -> bytes: ...


@remote("apps.prepare", "preparing the app")
def prepare_app(module: str) -> None: ...


@remote("apps.release", "releasing the app")
def release_app(module: str) -> None: ...


@remote("apps.rejoined", "telling the app that the group was formed again")
def tell_app_rejoined(module: str) -> None: ...


@remote("apps.command", "the app's command")
def command_app(module: str, text: str) -> str | None: ...


@remote("shards.describe", "looking at the model")
def describe_shards(name: str) -> ShardsReport: ...


@remote("profiling.prepare", "preparing the profile")
def prepare_profile() -> None: ...


@remote("profiling.collect", "collecting the profile")
def collect_profile(path: str) -> ProfileReport: ...


@remote("profiling.part", "fetching the trace")
def trace_part(begin: int, end: int) -> bytes: ...


@remote("names.complete", "looking for names")
def complete(code: str, cursor: int) -> dict[str, Any]: ...


@remote("names.inspect", "looking for help")
def inspect(code: str, cursor: int, detail: int) -> dict[str, Any]: ...


# -- on the control thread, while a cell runs


@remote("housekeeping.hello")
def hello() -> Hello: ...


@remote("housekeeping.figures")
def figures() -> Figures: ...


@remote("vitals.now")
def vitals(every: float, keep: float) -> Vitals: ...


@remote("housekeeping.set_collect")
def set_collect(collect: bool) -> None: ...


@remote("stacks.here")
def here() -> dict[str, Any]: ...


@remote("stacks.whole")
def whole_stack() -> dict[str, Any]: ...


@remote("stacks.pulse")
def pulse() -> tuple[int, float]: ...


@remote("stacks.phase")
def phase() -> str: ...


@remote("sockets.connections")
def connections() -> list[Ends]: ...


@remote("process_group.release")
def release(store: str, connections: list[Ends]) -> bool: ...


@remote("stores.listen")
def listen(address: str) -> int: ...


@remote("process_group.forget_gone")
def forget_gone() -> None: ...


@remote("process_group.adopt")
def adopt(former_port: int, port: int) -> bool: ...


@remote("collectives.begun")
def begun() -> Begun: ...


@remote("collectives.line_of")
def line_of(key: str, number: int) -> LineBegun | None: ...


@remote("collectives.stays_behind")
def stays_behind(key: str, number: int) -> bool: ...


@remote("c10d.set_groups_made")
def set_groups_made(count: int) -> None: ...


@remote("peek.take", own_thread=True)
def take_peek(number: int, names: list[str], most: int) -> Peeked: ...


@remote("peek.part")
def part_of_peek(number: int, name: str, begin: int, end: int) -> bytes: ...


@remote("peek.drop")
def drop_peek(number: int) -> dict[str, Any]: ...


@remote("profiling.clock")
def clock() -> int: ...


@remote("names.has")
def has_name(name: str) -> bool: ...


@remote("calls.forget")
def forget_call() -> None: ...
