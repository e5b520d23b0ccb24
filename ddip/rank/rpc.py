"""``torch.distributed.rpc`` when its group is released: it is shut down on each rank, and can be started again.

    release    control thread    shut_down    what waits for an answer fails; what waits in RPC's own Python code is
                                              interrupted
    leave      main thread       leave        torch's own shutdown, but for what is done; the ranks count anew

torch counts on each rank how often RPC was begun and how often all have met, and makes names of that: where a fault
came between, the next ``init_rpc`` would wait for ever for ranks that look for another name.
``tests/unit/test_private_names.py`` fails when a release of torch changes what is used here.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import threading
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.rpc as rpc

from ddip.rank import c10d

api: Any = getattr(rpc, "api", None)  # torch may have been built without it
SECONDS = 5.0
"""How long a function may take to end that another rank has called here."""
REFERENCES = timedelta(seconds=5)
STILL_RUNS = (
    "a function that another rank called by RPC still runs on this rank, for a group that has been released: wait "
    "until it returns, or type %makedip --repair, which puts a new process in place of this rank"
)
DIFFERENT = (
    "RPC cannot begin again: a rank is new, or was stopped while RPC ended, and torch counts in each process how often "
    "that was; type %makedip -r, which starts all ranks afresh"
)
TORN = "torn"
_shutting: threading.Thread | None = None
"""Shuts down the agent of the group that was released."""

_kept: list[Any] = []
"""Stores of this group's former RPC: a rank that is quicker may begin the next one through the store that rank 0 is
about to let go."""


def watch() -> None:
    """Once: torch's own ways to begin and to end go by what a release has done."""
    if rpc.is_available():
        api._finalize_shutdown = _unless_released(api._finalize_shutdown)
        rpc.init_rpc = _refusing(rpc.init_rpc)
        api._delete_all_user_and_unforked_owner_rrefs = _patient(api._delete_all_user_and_unforked_owner_rrefs)


def _unless_released(own: Any) -> Any:
    @functools.wraps(own)
    def wrapper() -> None:
        _history.finished(torn=_shutting is not None or sys.exc_info()[0] is not None)
        if _shutting is None:
            own()
        else:
            _finalize()

    return wrapper


def _refusing(own: Any) -> Any:
    @functools.wraps(own)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _is_shutting():
            raise RuntimeError(STILL_RUNS)
        size = inspect.signature(own).bind(*args, **kwargs).arguments.get("world_size")
        if dist.is_initialized() and size == dist.get_world_size() and not api._is_current_rpc_agent_set():
            _ensure_same_history()
        _kept.append(getattr(rpc, "rendezvous_iterator", None))
        return own(*args, **kwargs)

    return wrapper


def _ensure_same_history() -> None:
    """Wait for the other ranks, and raise RuntimeError on all if they have not ended RPC equally often."""
    begun, size = rpc._init_counter, dist.get_world_size()  # type: ignore[attr-defined]
    store = dist.PrefixStore(f"ddip/rpc/{begun}", c10d.store())  # type: ignore[attr-defined]
    store.set(str(dist.get_rank()), _history.text)
    histories = [store.get(str(rank)).decode() for rank in range(size)]
    if len(set(histories)) > 1 or TORN in histories:
        raise RuntimeError(DIFFERENT)


def _patient(own: Any) -> Any:
    """Where RPC is ended once more in one process: torch waits in C++ for 100 s for references (``rpc.remote``) of
    which it is never told, also without any fault, and goes on then."""

    @functools.wraps(own)
    def wrapper() -> None:
        _history.began_to_end()
        if _history.is_over_before:
            own(REFERENCES)
        else:
            own()

    return wrapper


class _History:
    """How often this process and all others have ended RPC together: torch's C++ code counts that, too, to the end of
    the process, and ranks whose numbers differ would wait for each other for ever."""

    def __init__(self) -> None:
        self.is_over_before = False
        self._ends = 0
        self._is_ending = self._is_torn = False

    @property
    def text(self) -> str:
        return TORN if self._is_torn else str(self._ends)

    def began_to_end(self) -> None:
        """All ranks have come to ``shutdown``."""
        self._ends += 1
        self._is_ending = True

    def finished(self, torn: bool) -> None:
        """``shutdown`` is over, or was `torn` by a fault."""
        self._is_torn |= self._is_ending and torn
        self._is_ending = False
        self.is_over_before = True


_history = _History()


def _is_shutting() -> bool:
    """Does the agent of a former group still wait for a function that another rank has called?"""
    global _shutting
    if _shutting is None or _shutting.is_alive():
        return _shutting is not None
    if not api._is_current_rpc_agent_set():
        _shutting = None
    return False


def shut_down() -> None:
    """From the control thread: whatever waits for an answer fails.

    In a thread: torch waits there for the functions that others have called on this rank.
    """
    global _shutting
    if rpc.is_available() and _shutting is None and api._is_current_rpc_agent_set():
        agent = api._get_current_rpc_agent()
        _shutting = threading.Thread(target=_quietly, args=(agent,), name="ddip-rpc", daemon=True)
        _shutting.start()


def _quietly(agent: Any) -> None:
    with contextlib.suppress(Exception):
        agent.shutdown()


def is_waited_in() -> bool:
    """Is the main thread in RPC's own Python code, and is RPC no more?"""
    frame = sys._current_frames().get(threading.main_thread().ident or 0) if _shutting is not None else None
    while frame is not None:
        if frame.f_globals.get("__name__") == api.__name__:
            return True
        frame = frame.f_back
    return False


def leave() -> bool:
    """With the group: end what is left, and count anew; returns whether RPC was there."""
    if not rpc.is_available():
        return False
    was_there = _shutting is not None or api._is_current_rpc_agent_set()
    if was_there:
        shut_down()
        if api._is_current_rpc_agent_set():
            with contextlib.suppress(Exception):  # such as references that are left
                _finalize()
        _is_shutting()
    rpc._init_counter = 0  # type: ignore[attr-defined]
    rpc.rendezvous_iterator = None  # type: ignore[assignment]
    _kept.clear()
    api._all_gather_sequence_id.clear()
    api._all_gather_sequence_id_to_states.clear()
    return was_there


def _finalize() -> None:
    """As torch's own does, with an agent that is shut down already."""
    assert _shutting is not None
    _history.finished(torn=True)
    try:
        api._destroy_rref_context(api._ignore_rref_leak)
    finally:
        _shutting.join(SECONDS)
        api._cleanup_python_rpc_handler()
        api._reset_current_rpc_agent()
