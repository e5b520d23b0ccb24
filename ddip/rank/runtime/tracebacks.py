"""What a rank tells of an exception: IPython's traceback where that is quick, else Python's; bounded in time and size.

IPython parses the source of every frame, which takes seconds within large packages, and ``str(error)`` is code of a
user, which may hang. So both run in a thread of their own, and the main thread does not wait for long:

    main thread   tell(error) --------- waits, at most SECONDS of CPU time ---> Told
    helper        text of each error of the chain -> IPython's traceback (or, if there is not to be one, Python's)
"""

from __future__ import annotations

import _thread
import ast
import collections
import contextlib
import contextvars
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, TracebackType
from typing import Any

import executing
import stack_data.core

from ddip.rank.native.thread_exceptions import raise_in
from ddip.rank.runtime import stacks
from ddip.rank.runtime.housekeeping import attribute_of

SECONDS = 0.5
"""CPU time of this process that a traceback may take; on a loaded machine, more time passes."""
WAIT_SECONDS = 1.5
"""The time that it may take at most, since a ``__str__`` that sleeps takes no CPU time."""
COMPUTES_SECONDS = 0.1
"""CPU time above which a helper that is not waited for any longer is taken to compute, and not to sleep."""
MESSAGE_CHARACTERS = 10_000
LINE_CHARACTERS = 1_000
CHARACTERS = 200_000
"""Of a whole traceback of IPython's; one that is longer is made anew, as Python's."""
FIRST_ERRORS, LAST_ERRORS = 3, 4
"""Of a chain of exceptions, as it is read: what was raised first is on top."""
FIRST_FRAMES, LAST_FRAMES = 15, 30
SAME_FRAMES = 3
"""How often the same line is told; more often than that is a recursion."""
MEMBERS, DEPTH = 5, 3
"""Of an exception group: how many of its members are told, and how deep."""
NOTES = 10
ONE_OF_EACH = "a = b; del a; a and b or not c; ~a + +b - -c * d @ e / f // g % h ** i << j >> k | l ^ m & n; " + (
    "a == b != c < d <= e > f >= g is h is not i in j not in k"
)
"""Python makes one node of each operator; each knows the last tree that it was seen in, and keeps it."""
HIDDEN = {"IPython"}
"""Modules whose frames no traceback shows, with IPython's; the modules of ddip that run cells add their names."""


@dataclass(frozen=True)
class Told:
    """An exception as text."""

    name: str
    message: str
    traceback: list[str]
    whole: bool = True
    """False: the message is not what ``str`` returns; it was too long, or did not come."""


@dataclass
class _Found:
    """What the helper has found so far."""

    messages: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """By id of the error: its text, and whether it is whole."""
    traceback: list[str] | None = None


def tell(error: BaseException, rich: Callable[[], list[str]] | None) -> Told:
    """Tell of `error`: with the traceback that `rich` makes, or with Python's if that is None, fails, or takes long.

    Never fails, and returns within `WAIT_SECONDS` twice, unless C code keeps the interpreter to itself.
    """
    links, left_out = _chain(error)
    if left_out or any(isinstance(link, BaseExceptionGroup) for link in links):  # IPython has no limit for either
        rich = None
    found = _Found()

    def find() -> None:
        for link in links:
            _note_message(link, found)
        if rich is not None and all(whole for _, whole in found.messages.values()):
            lines = [_exact(line) for line in rich()]
            if sum(map(len, lines)) <= CHARACTERS:
                found.traceback = lines
        if found.traceback is None:
            found.traceback = _plain(links, left_out, found)

    _within_limits(find)
    message, whole = _message(error, found)
    if found.traceback is None:  # time was up
        _within_limits(lambda: setattr(found, "traceback", _plain(links, left_out, found)))
    return Told(type(error).__name__, message, found.traceback or [_last_line(error, found)], whole)


def forget_sources() -> None:
    """Let go of the parsed sources that IPython's tracebacks leave: each collection of garbage would visit them.

    They are 57 000 objects when one frame is in ``torch/nn/modules/module.py``: 15 ms after each cell.
    """
    for kind in (executing.Source, stack_data.core.Source):
        for name in ("__source_cache_with_lines", "__executing_cache"):
            vars(kind).get(name, {}).clear()
    for module in ("executing.executing", "executing._position_node_finder"):
        found = vars(sys.modules[module]) if module in sys.modules else {}
        for cached in (*found.values(), *vars(executing.Source).values()):
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
    for node in ast.walk(ast.parse(ONE_OF_EACH)):
        vars(node).pop("parent", None)


# -- in a thread, and not for ever


class _Stop(SystemExit):
    """Ends a helper that has taken too long; one that ends by itself just then says nothing of it."""


def _within_limits(do: Callable[[], None]) -> None:
    """Call `do` in a thread, and wait for it no longer than the limits say; what it raises is dropped.

    The main thread can be interrupted while it waits, which ends the waiting. ``_thread`` is used since ``threading``
    is often replaced in part, and lists its threads among a user's.
    """
    context = contextvars.copy_context()
    ended = _thread.allocate_lock()
    ended.acquire()
    ident: list[int] = []

    def run() -> None:
        try:
            ident.append(_thread.get_ident())
            context.run(do)
        except BaseException:  # of a user's object that was asked for its text
            pass
        finally:
            ended.release()

    cpu, wall = time.process_time(), time.monotonic() + WAIT_SECONDS
    try:
        _thread.start_new_thread(run, ())
    except RuntimeError:  # there may be no more threads
        run()
        return
    try:
        while not ended.acquire(timeout=0.02):
            used = time.process_time() - cpu
            if used > SECONDS or time.monotonic() > wall:
                if used > COMPUTES_SECONDS and ident:
                    with contextlib.suppress(RuntimeError):  # there may be no more threads
                        _thread.start_new_thread(raise_in, (ident[0], _Stop))
                return
    except KeyboardInterrupt:  # the stop button: this error is told as well as it can be now
        return


# -- text


def _exact(text: Any) -> str:
    """`text` without what a subclass of ``str`` may do."""
    return str.__str__(text) if isinstance(text, str) else str(text)


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 3 // 4]} … {text[-most // 4 :]} ({len(text):,} characters)"


def _note_message(error: BaseException, found: _Found) -> None:
    """Ask `error` for its text."""
    found.messages[id(error)] = ("(no text: its __str__ takes too long)", False)
    try:
        text = _exact(str(error))
    except Exception as why:
        text = f"(it has no text: its __str__ raised {type(why).__name__})"
        found.messages[id(error)] = text, False
        return
    found.messages[id(error)] = _cut(text, MESSAGE_CHARACTERS), len(text) <= MESSAGE_CHARACTERS


def _message(error: BaseException, found: _Found) -> tuple[str, bool]:
    return found.messages.get(id(error), ("", False))


def _last_line(error: BaseException, found: _Found) -> str:
    message, _ = _message(error, found)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


# -- Python's format, with limits


def _links(error: BaseException) -> Iterator[BaseException]:
    """`error`, what it was raised from or in the handling of, and so on."""
    known: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in known:
        known.add(id(link))
        yield link
        cause, context = attribute_of(link, "__cause__"), attribute_of(link, "__context__")
        link = cause if cause is not None or attribute_of(link, "__suppress_context__") else context


def _chain(error: BaseException) -> tuple[list[BaseException], int]:
    """The errors of the chain that are told, `error` first, and how many are left out of it."""
    links = list(_links(error))
    left_out = len(links) - FIRST_ERRORS - LAST_ERRORS
    if left_out <= 0:
        return links, 0
    return links[:LAST_ERRORS] + links[-FIRST_ERRORS:], left_out


def _plain(links: Sequence[BaseException], left_out: int, found: _Found) -> list[str]:
    """A traceback in Python's format below IPython's head; every part of it is limited."""
    error = links[0]
    name = type(error).__name__
    lines = ["-" * 75, f"{name}{'Traceback (most recent call last)':>{max(1, 75 - len(name))}}"]
    for i in reversed(range(len(links))):
        if left_out and i == LAST_ERRORS - 1:
            lines.append(f"[... {left_out:,} exceptions of this chain are left out ...]\n")
        lines += _one(links[i], found, 0)
        if i:
            after = links[i - 1]
            cause = attribute_of(after, "__cause__") is links[i]
            lines.append(
                "\nThe above exception was the direct cause of the following exception:\n"
                if cause
                else "\nDuring handling of the above exception, another exception occurred:\n"
            )
    return lines


def _one(error: BaseException, found: _Found, depth: int) -> list[str]:
    lines = _frames(attribute_of(error, "__traceback__"))
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(type(error), error)[:-1]
    lines.append(_last_line(error, found))
    notes = attribute_of(error, "__notes__")
    if isinstance(notes, list):
        lines += [str(note) for note in notes[:NOTES]]
    members = attribute_of(error, "exceptions", ()) if isinstance(error, BaseExceptionGroup) else ()
    for number, member in enumerate(members[:MEMBERS] if depth < DEPTH else (), 1):
        _note_message(member, found)
        lines += [f"  [{number} of {len(members):,}]", *(f"  {line}" for line in _one(member, found, depth + 1))]
    if len(members) > MEMBERS:
        lines.append(f"  [... {len(members) - MEMBERS:,} more ...]")
    return [
        "\n".join(_cut(part, LINE_CHARACTERS) for part in _cut(line, MESSAGE_CHARACTERS).rstrip("\n").split("\n"))
        for line in lines
    ]


def _is_ours(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    hidden = module.startswith("ddip.") and "__tracebackhide__" in frame.f_code.co_varnames  # as IPython leaves it out
    return hidden or module in HIDDEN or module.startswith("IPython.")


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """`trace` without the frames that nobody wants to see."""
    links = []
    while trace is not None:
        if not _is_ours(trace.tb_frame):
            links.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for link in reversed(links):
        found = TracebackType(found, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return found


def _frames(trace: TracebackType | None) -> list[str]:
    """The frames of a traceback, the innermost last."""
    walked = list(traceback.walk_tb(without_ours(trace)))
    lines = [(frame.f_code, number) for frame, number in walked]
    count: collections.Counter[tuple[CodeType, int]] = collections.Counter()
    told = []
    for i, line in enumerate(lines):
        count[line] += 1
        if count[line] <= SAME_FRAMES or i == len(lines) - 1:
            told.append(i)
    if len(told) > FIRST_FRAMES + LAST_FRAMES:
        told = told[:FIRST_FRAMES] + told[-LAST_FRAMES:]
    text = []
    before = -1
    for i in told:
        if i > before + 1:
            text.append(f"  [... {i - before - 1:,} frames are left out ...]")
        text.append(_frame(walked[i]))
        before = i
    return text


def _frame(at: tuple[FrameType, int]) -> str:
    (text,) = traceback.StackSummary.extract(iter([at]), lookup_lines=True).format()
    number = stacks.cell_number(at[0].f_code)
    if number is not None:
        text = text.replace(f'File "{at[0].f_code.co_filename}"', f"Cell In[{number}]")
    return text
