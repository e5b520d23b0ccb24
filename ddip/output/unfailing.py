"""What fails while a cell is shown is logged, and the cell goes on: ranks show odd things, and a page may be gone."""

from __future__ import annotations

import logging
from types import TracebackType

log = logging.getLogger("ddip")


class Unfailing:
    """Within it no exception gets out, but KeyboardInterrupt and the like; the first is logged."""

    def __init__(self) -> None:
        self._has_warned = False

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        if not self._has_warned:  # what is drawn ten times a second would fail each time
            self._has_warned = True
            log.warning("what a cell has shown cannot be drawn: %s: %s", type(error).__name__, error)
        return True
