"""An event loop on a thread of its own, for ipyparallel's cluster code, which wants one that always runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from ddip.errors import GroupError
from ddip.guard import Guard

T = TypeVar("T")


class Loop:
    """Runs until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        guard = Guard("a step of the cluster's event loop failed")
        while True:
            with guard:
                self._loop.run_forever()
                return  # it was stopped; an exit that a callback asks for only interrupts it

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Have it do `work`; may be called on any thread but its own."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """The same, and wait for the result; raises TimeoutError after `timeout` seconds, and gives the work up."""
        future = self.begin(work)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """End it, and wait until the step that it is in is done."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join()
        self._loop.close()


async def without_exit(work: Coroutine[Any, Any, T]) -> T:
    """`work`; the exit that IPython asks for when its profile is no good would end our loop, and nobody would hear."""
    try:
        return await work
    except SystemExit:
        where = os.environ.get("IPYTHONDIR") or "~/.ipython"
        raise GroupError(
            f"IPython cannot use its profile, and the log of this kernel tells why; is there space in {where}, and may "
            "you write there?"
        ) from None


async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all `work` at once."""
    await asyncio.gather(*work)


async def others_end() -> None:
    """Wait until every other task of this loop has ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
