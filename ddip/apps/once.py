"""Do work such as a download once per host: the first rank does it, and the other ranks wait for the result.

    first rank     announces the start, does the work, announces the outcome     waits for no other rank
    other ranks    wait for the outcome, then find the result, such as a file    raise the first rank's error

Ranks that could do the work themselves pass `patience`. They stop waiting if the first rank has begun other work of the
same `kind` instead, has ended its cell without the work (`end_cell`), or does not begin in time: it may be waiting for
them elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ddip.apps import rank_exchange
from ddip.rank.runtime import current
from ddip.rank.runtime.c10d import default_store

WAIT_SECONDS = 0.05
OK, FAILED, RAISED = b"ok", b"failed:", b"raised:"
BEGUN = " begun"
FAILURE = "the first rank of this host failed to get {what}: {error}"
_call_counts: Counter[tuple[str, str]] = Counter()
"""Number of calls in this cell, by names of cell and call."""


def once_per_host(
    what: str,
    fetch: Callable[[], Any],
    found: Callable[[], Any],
    patience: float | None = None,
    same_error: bool = False,
    kind: str = "",
) -> Any:
    """Call `fetch` on the first rank of this host; the others wait, then return the result of `found`.

    `what`: name of the work, for messages and to match the ranks' calls. If `fetch` fails, the others raise a
    RuntimeError that names the error. With `same_error` they raise the error itself, for code that catches it, or call
    `found` if it cannot be pickled. `patience` is the time in seconds within which the first rank must begin; None
    means no limit. If the first rank's nth call of a `kind` is different work from this rank's nth call, this rank
    stops waiting. In a cell on some ranks only, each calls `fetch`.
    """
    if not rank_exchange.on_all_ranks():
        return fetch()
    key, turn = _next_key(f"what {what}"), _next_key(f"kind {kind}")
    with rank_exchange.single_process_mode():
        if rank_exchange.is_first_on_host():
            default_store().set(key + BEGUN, OK)
            default_store().set(turn, OK)
            return _fetch_and_announce(key, fetch, same_error)
        outcome = _wait_for(key, turn, patience)
        if outcome.startswith(FAILED) and not same_error:
            raise RuntimeError(FAILURE.format(what=what, error=outcome.removeprefix(FAILED).decode()))
        if outcome.startswith(RAISED):
            raise pickle.loads(outcome.removeprefix(RAISED))
        return found()


def end_cell() -> None:
    """Announce the end of the cell, so that no rank waits for work that the cell has not done."""
    _call_counts.clear()
    if rank_exchange.on_all_ranks() and rank_exchange.is_first_on_host():
        with contextlib.suppress(RuntimeError):  # in a released group no rank waits any longer
            default_store().set(_cell_end_key(), OK)


def _next_key(name: str) -> str:
    """Return the store key of the next call `name` in this cell, which is the same on all ranks of a host."""
    call = (current.cell_name(), name)
    _call_counts[call] += 1
    return f"ddip once {current.cell_name()} {os.environ['GROUP_RANK']} {_call_counts[call]} {name}"


def _cell_end_key() -> str:
    return f"ddip once {current.cell_name()} {os.environ['GROUP_RANK']} over"


def _fetch_and_announce(key: str, fetch: Callable[[], Any], same_error: bool) -> Any:
    outcome = OK
    try:
        return fetch()
    except BaseException as error:
        outcome = (_pickle_error(error) if same_error else b"") or FAILED + f"{type(error).__name__}: {error}".encode()
        raise
    finally:
        default_store().set(key, outcome)


def _pickle_error(error: BaseException) -> bytes:
    """Return the pickled error; empty if it cannot be pickled and unpickled.

    That fails for exceptions whose constructor takes other arguments than their text.
    """
    try:
        pickled = pickle.dumps(error) if isinstance(error, Exception) else b""
        pickle.loads(pickled)
    except Exception:
        return b""
    return RAISED + pickled


def _wait_for(key: str, turn: str, patience: float | None) -> bytes:
    """Wait for the first rank, and return the outcome of its work, as it has stored it under `key`.

    Returns OK if the first rank does not do this work: its call that stores `turn` was for other work, its cell has
    ended, or it has not begun within `patience` seconds. With a `patience` of None, waits until it has done the work.
    """
    began = time.monotonic()
    begun = patience is None
    while not default_store().check([key]):
        if patience is not None and not begun:
            has_moved_on = default_store().check([turn]) or default_store().check(
                [_cell_end_key()]
            )  # set after the key of the start
            begun = default_store().check([key + BEGUN])
            if not begun and (has_moved_on or time.monotonic() > began + patience):
                return OK
        time.sleep(WAIT_SECONDS)
    outcome: bytes = default_store().get(key)
    return outcome
