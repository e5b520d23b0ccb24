"""Format an exception within limits of time and size: IPython's traceback if that is quick, otherwise Python's.

IPython parses the source of every frame, which takes seconds for large packages, and ``str(error)`` may be user code
that hangs. So a helper thread does both, and the main thread waits only briefly:

    main thread   format_error(error) - waits, at most SECONDS of CPU time ---> ErrorText
    helper        text of each error in the chain -> IPython's traceback, or Python's if it is not wanted
"""

from __future__ import annotations

import _thread
import ast
import collections
import contextlib
import contextvars
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import CodeType, FrameType, TracebackType
from typing import Any

try:  # IPython needs them from 8 on
    import executing
    import stack_data.core
except ImportError:
    executing = None  # type: ignore[assignment]

from ddip.rank.native.thread_exceptions import raise_in
from ddip.rank.runtime import stacks
from ddip.rank.runtime.housekeeping import attribute_of

SECONDS = 0.5
"""Limit of CPU time for a traceback; on a loaded machine, more wall time passes."""
WAIT_SECONDS = 1.5
"""Limit of wall time, since a ``__str__`` that sleeps takes no CPU time."""
COMPUTES_SECONDS = 0.1
"""CPU time above which an abandoned helper is taken to compute rather than sleep, and is stopped."""
MESSAGE_CHARACTERS = 10_000
LINE_CHARACTERS = 1_000
CHARACTERS = 200_000
"""Limit for IPython's traceback; if it is longer, Python's is made instead."""
FIRST_ERRORS, LAST_ERRORS = 3, 4
"""Exceptions to show at the two ends of a chain, in reading order: the first one raised is on top."""
FIRST_FRAMES, LAST_FRAMES = 15, 30
SAME_FRAMES = 3
"""Number of times that the same line is shown; more repetitions are a recursion."""
MEMBERS, DEPTH = 5, 3
"""Members of an exception group to show, and depth of nested groups."""
NOTES = 10
ONE_OF_EACH = "a = b; del a; a and b or not c; ~a + +b - -c * d @ e / f // g % h ** i << j >> k | l ^ m & n; " + (
    "a == b != c < d <= e > f >= g is h is not i in j not in k"
)
"""Code with every operator. Their AST nodes are singletons; the `parent` that `executing` sets keeps a tree alive."""
HIDDEN = {"IPython"}
"""Modules whose frames are hidden in tracebacks; modules of ddip that run cells or wrap collectives add their names."""


@dataclass(frozen=True)
class ErrorText:
    """An exception as text."""

    name: str
    message: str
    traceback: list[str]
    whole: bool = True
    """False if `message` is not the result of ``str``, because that was too long or took too long."""


@dataclass
class _Results:
    """Results of the helper thread so far."""

    messages: dict[int, tuple[str, bool]] = field(default_factory=dict)
    """Text of each error by its id, and whether the text is complete."""
    traceback: list[str] | None = None


def format_error(error: BaseException, rich: Callable[[], list[str]] | None) -> ErrorText:
    """Format `error` with the traceback that `rich` returns, or with Python's.

    Python's is used if `rich` is None, fails, or takes too long. Never raises, and returns within twice `WAIT_SECONDS`,
    unless C code keeps the interpreter lock.
    """
    links, left_out = _shown_links(error)
    if left_out or any(isinstance(link, BaseExceptionGroup) for link in links):  # IPython would show all of these
        rich = None
    found = _Results()

    def fill_results() -> None:
        for link in links:
            _store_message(link, found)
        if rich is not None and all(whole for _, whole in found.messages.values()):
            lines = [_plain_string(line) for line in rich()]
            if sum(map(len, lines)) <= CHARACTERS:
                found.traceback = lines
        if found.traceback is None:
            found.traceback = _python_traceback(links, left_out, found)

    _within_limits(fill_results)
    message, whole = _message_of(error, found)
    if found.traceback is None:  # timed out
        _within_limits(lambda: setattr(found, "traceback", _python_traceback(links, left_out, found)))
    return ErrorText(type(error).__name__, message, found.traceback or [_last_line(error, found)], whole)


def forget_sources() -> None:
    """Free parsed sources that IPython's tracebacks keep, which would slow down each garbage collection.

    One frame in ``torch/nn/modules/module.py`` leaves 57 000 objects, which cost 15 ms after each cell.
    """
    if executing is None:
        return
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


# -- in a thread, with limits


class _Stop(SystemExit):
    """Raised in a helper that has taken too long; a SystemExit ends a thread without a message."""


def _within_limits(function: Callable[[], None]) -> None:
    """Call `function` in a thread and wait for it within the limits of CPU and wall time.

    Exceptions of `function` are dropped. An interrupt of the main thread ends the wait. This uses ``_thread``, because
    users' code often patches ``threading``, and would list the helper among its own threads.
    """
    context = contextvars.copy_context()
    ended = _thread.allocate_lock()
    ended.acquire()
    ident: list[int] = []

    def run_function() -> None:
        try:
            ident.append(_thread.get_ident())
            context.run(function)
        except BaseException:  # raised by a user's ``__str__``
            pass
        finally:
            ended.release()

    cpu, wall = time.process_time(), time.monotonic() + WAIT_SECONDS
    try:
        _thread.start_new_thread(run_function, ())
    except RuntimeError:  # no more threads can be started
        run_function()
        return
    try:
        while not ended.acquire(timeout=0.02):
            used = time.process_time() - cpu
            if used > SECONDS or time.monotonic() > wall:
                if used > COMPUTES_SECONDS and ident:
                    with contextlib.suppress(RuntimeError):  # no more threads can be started
                        _thread.start_new_thread(raise_in, (ident[0], _Stop))
                return
    except KeyboardInterrupt:  # the stop button: use the results so far
        return


# -- text


def _plain_string(text: Any) -> str:
    """Return `text` as a plain ``str``, without calling methods of a subclass."""
    return str.__str__(text) if isinstance(text, str) else str(text)


def _shorten_text(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 3 // 4]} … {text[-most // 4 :]} ({len(text):,} characters)"


def _store_message(error: BaseException, found: _Results) -> None:
    """Call ``str(error)`` and store the text; a placeholder is stored if the call hangs or fails."""
    found.messages[id(error)] = ("(no text: its __str__ takes too long)", False)
    try:
        text = _plain_string(str(error))
    except Exception as why:
        text = f"(it has no text: its __str__ raised {type(why).__name__})"
        found.messages[id(error)] = text, False
        return
    found.messages[id(error)] = _shorten_text(text, MESSAGE_CHARACTERS), len(text) <= MESSAGE_CHARACTERS


def _message_of(error: BaseException, found: _Results) -> tuple[str, bool]:
    return found.messages.get(id(error), ("", False))


def _last_line(error: BaseException, found: _Results) -> str:
    message, _ = _message_of(error, found)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


# -- Python's format, with limits


def _error_links(error: BaseException) -> Iterator[BaseException]:
    """Yield `error` and the chain of its causes and contexts, each error once."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        cause, context = attribute_of(link, "__cause__"), attribute_of(link, "__context__")
        link = cause if cause is not None or attribute_of(link, "__suppress_context__") else context


def _shown_links(error: BaseException) -> tuple[list[BaseException], int]:
    """Return the errors of the chain of causes and contexts that are shown, and the number of others.

    The list begins with `error`. Of a long chain it has the last `LAST_ERRORS` and the first `FIRST_ERRORS` raised.
    """
    links = list(_error_links(error))
    left_out = len(links) - FIRST_ERRORS - LAST_ERRORS
    if left_out <= 0:
        return links, 0
    return links[:LAST_ERRORS] + links[-FIRST_ERRORS:], left_out


def _python_traceback(links: Sequence[BaseException], left_out: int, found: _Results) -> list[str]:
    """Format an error and its chain as Python does, below IPython's header, with every part limited in size.

    `links` begins with the error that was raised. `found` has their messages.
    """
    error = links[0]
    name = type(error).__name__
    lines = ["-" * 75, f"{name}{'Traceback (most recent call last)':>{max(1, 75 - len(name))}}"]
    for i in reversed(range(len(links))):
        if left_out and i == LAST_ERRORS - 1:
            lines.append(f"[... {left_out:,} exceptions of this chain are left out ...]\n")
        lines += _format_error(links[i], found, 0)
        if i:
            after = links[i - 1]
            cause = attribute_of(after, "__cause__") is links[i]
            lines.append(
                "\nThe above exception was the direct cause of the following exception:\n"
                if cause
                else "\nDuring handling of the above exception, another exception occurred:\n"
            )
    return lines


def _format_error(error: BaseException, found: _Results, depth: int) -> list[str]:
    walked = list(traceback.walk_tb(without_ours(attribute_of(error, "__traceback__"))))
    if isinstance(error, KeyboardInterrupt):
        walked = _without_output_path(walked)
    lines = _format_frames(walked)
    if isinstance(error, SyntaxError):
        lines += traceback.format_exception_only(type(error), error)[:-1]
    lines.append(_last_line(error, found))
    notes = attribute_of(error, "__notes__")
    if isinstance(notes, list):
        lines += [str(note) for note in notes[:NOTES]]
    members = attribute_of(error, "exceptions", ()) if isinstance(error, BaseExceptionGroup) else ()
    for number, member in enumerate(members[:MEMBERS] if depth < DEPTH else (), 1):
        _store_message(member, found)
        lines += [
            f"  [{number} of {len(members):,}]",
            *(f"  {line}" for line in _format_error(member, found, depth + 1)),
        ]
    if len(members) > MEMBERS:
        lines.append(f"  [... {len(members) - MEMBERS:,} more ...]")
    return [
        "\n".join(
            _shorten_text(part, LINE_CHARACTERS)
            for part in _shorten_text(line, MESSAGE_CHARACTERS).rstrip("\n").split("\n")
        )
        for line in lines
    ]


def _is_hidden(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__"))
    hidden = module.startswith("ddip.") and "__tracebackhide__" in frame.f_code.co_varnames  # as IPython leaves it out
    return hidden or module in HIDDEN or module.startswith("IPython.")


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Return a copy of `trace` without frames of IPython and frames that ddip hides; None if none is left.

    ddip hides functions with a local ``__tracebackhide__`` and modules in `HIDDEN`.
    """
    links = []
    while trace is not None:
        if not _is_hidden(trace.tb_frame):
            links.append(trace)
        trace = trace.tb_next
    found: TracebackType | None = None
    for link in reversed(links):
        found = TracebackType(found, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return found


def _without_output_path(walked: list[tuple[FrameType, int]]) -> list[tuple[FrameType, int]]:
    """Cut the innermost frames of ddip, ipykernel, traitlets and zmq, which handle what a cell prints.

    A cell that prints is mostly interrupted there, in code that the user has not called.
    """
    end = len(walked)
    for i in reversed(range(len(walked))):
        frame = walked[i][0]
        name = frame.f_globals.get("__name__", frame.f_code.co_filename)  # frames of Cython may have only a file
        package = re.split("[./]", str(name))[0]
        if package in ("ddip", "ipykernel", "zmq"):
            end = i
        elif package != "traitlets" and package not in sys.stdlib_module_names:
            break
    return walked[:end]


def _format_frames(walked: list[tuple[FrameType, int]]) -> list[str]:
    """Return frames with line numbers as text, innermost last; leave out repetitions and middle ones."""
    lines = [(frame.f_code, number) for frame, number in walked]
    count: collections.Counter[tuple[CodeType, int]] = collections.Counter()
    shown = []
    for i, line in enumerate(lines):
        count[line] += 1
        if count[line] <= SAME_FRAMES or i == len(lines) - 1:
            shown.append(i)
    if len(shown) > FIRST_FRAMES + LAST_FRAMES:
        shown = shown[:FIRST_FRAMES] + shown[-LAST_FRAMES:]
    text = []
    before = -1
    for i in shown:
        if i > before + 1:
            text.append(f"  [... {i - before - 1:,} frames are left out ...]")
        text.append(_format_frame(walked[i]))
        before = i
    return text


def _format_frame(at: tuple[FrameType, int]) -> str:
    (text,) = traceback.StackSummary.extract(iter([at]), lookup_lines=True).format()
    number = stacks.cell_number(at[0].f_code)
    if number is not None:
        text = text.replace(f'File "{at[0].f_code.co_filename}"', f"Cell In[{number}]")
    return text
