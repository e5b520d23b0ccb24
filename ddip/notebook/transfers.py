"""What ``%dipush`` and ``%dipull`` show."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddip.output.progress import Progress

QUIET_SECONDS = 0.5
"""A transfer that takes no longer shows nothing."""


@contextlib.contextmanager
def progress(done: str) -> Iterator[Progress]:
    """Show how far objects are on their way, if that takes long."""
    from ddip.output.progress import Progress

    began = time.monotonic()
    bar = Progress(after=QUIET_SECONDS)
    try:
        yield bar
    except BaseException:
        bar.end("")
        raise
    if bar.shown:
        bar.end(f"ddip: {done}, {time.monotonic() - began:.1f} s")


def tell_moved(moved: list[str]) -> None:
    """Say which tensors are not where they were."""
    if moved:
        print(f"ddip: tensors of an accelerator arrived on the CPU: {', '.join(moved)}")
