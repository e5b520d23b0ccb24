"""What a cell has left in place of stdout and stderr, and whether the rank can go on with that."""

from __future__ import annotations

import sys
from typing import Any

from ddip.rank.runtime.stacks import is_users
from ddip.rank.streams.streams import RankStream


class _OfACell:
    """A stream that a cell has put in place of stdout or stderr, and which may fail at any time: its disk may be full.

    ipykernel flushes it after each request, and if that raised, the answer would be lost.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except Exception:
            if is_users(sys._getframe()):
                raise


def _is_untouched(ours: RankStream) -> bool:
    """Has nobody put something in place of its methods? IPython does in each cell, and then puts these back."""
    for name in ("write", "flush"):
        found = vars(ours).get(name)
        if getattr(found, "__self__", None) is ours and found.__func__ is getattr(RankStream, name):  # type: ignore[union-attr]
            del vars(ours)[name]
    return not vars(ours).keys() & {"write", "flush"}


def mend(stdout: RankStream, stderr: RankStream) -> None:
    """Put these back where a cell has left a stream in their place that cannot be written to."""
    for name, ours in (("stdout", stdout), ("stderr", stderr)):
        left = getattr(sys, name)
        known = isinstance(left, _OfACell) and not getattr(left, "closed", False)
        if known or (left is ours and _is_untouched(ours)):
            continue  # as it was; to try it would cost a turn of the output thread
        try:
            left.write("")
            left.flush()
            if left is not ours:
                setattr(sys, name, _OfACell(left))
        except Exception as error:
            for replaced in ("write", "flush"):
                vars(ours).pop(replaced, None)
            setattr(sys, name, ours)
            what = f"the cell left a sys.{name} that cannot be written to ({type(error).__name__})"
            stderr.write(f"ddip: {what}; the former one is back\n")
