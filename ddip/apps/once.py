"""Once a host: what its first rank fetches or makes, the others find.

    first rank    begun, it fetches, and says how that ended         waits for nobody
    the others    wait for that, then look for what it has left      raise what it has raised

It is an optimization where the others could do it themselves: with `patience` they do so when the first rank has begun
something else of the `kind` in its place, has ended its cell without (`end_cell`), or does not begin, since it may wait
for them elsewhere.
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
from ddip.rank.runtime.c10d import store

WAIT_SECONDS = 0.05
OK, FAILED, RAISED = b"ok", b"failed:", b"raised:"
BEGUN = " begun"
FAILURE = "the first rank of this host failed to get {what}: {error}"
_calls: Counter[tuple[str, str]] = Counter()


def once_a_host(
    what: str,
    fetch: Callable[[], Any],
    found: Callable[[], Any],
    patience: float | None = None,
    same_error: bool = False,
    kind: str = "",
) -> Any:
    """Have the first rank of this host `fetch`; the others wait until it has, and look what is `found` then.

    They raise a RuntimeError that tells what it has raised, or, with `same_error`, that very exception, for code that
    catches it; where it cannot be pickled they look for themselves.

    `patience`: seconds that the first rank may take to begin; None: for ever. `kind`: ranks that do things of one kind
    do the same in the same order, or each its own.
    """
    if not rank_exchange.together():
        return fetch()
    key, turn = _key(f"what {what}"), _key(f"kind {kind}")
    with rank_exchange.single_process_mode():
        if rank_exchange.is_first_here():
            store().set(key + BEGUN, OK)
            store().set(turn, OK)
            return _fetch(key, fetch, same_error)
        outcome = _wait_for(key, turn, patience)
        if outcome.startswith(FAILED) and not same_error:
            raise RuntimeError(FAILURE.format(what=what, error=outcome.removeprefix(FAILED).decode()))
        if outcome.startswith(RAISED):
            raise pickle.loads(outcome.removeprefix(RAISED))
        return found()


def end_cell() -> None:
    """Whoever waits for something that this cell has not done need not wait any more."""
    _calls.clear()
    if rank_exchange.together() and rank_exchange.is_first_here():
        with contextlib.suppress(RuntimeError):  # of a group that was released nobody waits any more
            store().set(_over(), OK)


def _key(name: str) -> str:
    """In the store, of what all ranks of this host call by `name` for the first time in this cell, the second, ..."""
    call = (current.name(), name)
    _calls[call] += 1
    return f"ddip once {current.name()} {os.environ['GROUP_RANK']} {_calls[call]} {name}"


def _over() -> str:
    return f"ddip once {current.name()} {os.environ['GROUP_RANK']} over"


def _fetch(key: str, fetch: Callable[[], Any], same_error: bool) -> Any:
    outcome = OK
    try:
        return fetch()
    except BaseException as error:
        outcome = (_pickled(error) if same_error else b"") or FAILED + f"{type(error).__name__}: {error}".encode()
        raise
    finally:
        store().set(key, outcome)


def _pickled(error: BaseException) -> bytes:
    """Empty if that cannot be done, as for those whose constructor takes more than their text."""
    try:
        pickled = pickle.dumps(error) if isinstance(error, Exception) else b""
        pickle.loads(pickled)
    except Exception:
        return b""
    return RAISED + pickled


def _wait_for(key: str, turn: str, patience: float | None) -> bytes:
    """How the first rank's part has ended; OK also if it has not begun, and is not waited for any more."""
    began = time.monotonic()
    begun = patience is None
    while not store().check([key]):
        if patience is not None and not begun:
            is_its_turn_over = store().check([turn]) or store().check([_over()])  # said after what it begins
            begun = store().check([key + BEGUN])
            if not begun and (is_its_turn_over or time.monotonic() > began + patience):
                return OK
        time.sleep(WAIT_SECONDS)
    outcome: bytes = store().get(key)
    return outcome
