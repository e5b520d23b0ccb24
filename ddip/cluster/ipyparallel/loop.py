"""An event loop on a separate thread, for ipyparallel's cluster code, which needs one that always runs."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from ddip.guard import Guard

T = TypeVar("T")


class Loop:
    """An event loop that runs on its thread until `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        guard = Guard("a step of the cluster's event loop failed")
        while True:
            with guard:
                self._loop.run_forever()
                return  # `close` stopped it; a SystemExit in a callback goes through the guard and restarts it

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `work` on the loop; may be called on any other thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run `work` on the loop, and return its result; may be called on any thread except the loop's.

        After `timeout` seconds, cancels the work and raises TimeoutError.
        """
        future = self.begin(work)
        try:
            return future.result(timeout)
        except concurrent.futures.TimeoutError:
            future.cancel()
            raise

    def close(self) -> None:
        """Stop the loop after its current step, and wait for its thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self.thread.join()
        self._loop.close()


async def all_of(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all of `work` concurrently."""
    await asyncio.gather(*work)


async def others_end() -> None:
    """Wait until every other task of this loop has ended."""
    other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*other_tasks, return_exceptions=True)
