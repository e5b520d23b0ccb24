"""Restore stdout and stderr after a cell that has replaced them with streams that cannot be written to."""

from __future__ import annotations

import sys
from typing import Any

from ddip.rank.runtime.stacks import may_interrupt
from ddip.rank.streams.streams import RankStream


class _CellStream:
    """A wrapper around a cell's replacement of stdout or stderr, which may fail at any time.

    ipykernel flushes it after each request. An error of that flush, such as a full disk, would lose the reply, so only
    a flush by the cell's own code raises.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except Exception:
            if may_interrupt(sys._getframe()):
                raise


def _is_untouched(rank_stream: RankStream) -> bool:
    """Return whether `rank_stream` still has its own ``write`` and ``flush``.

    IPython replaces both in each cell and puts them back as instance attributes, which are removed here.
    """
    for name in ("write", "flush"):
        found = vars(rank_stream).get(name)
        if getattr(found, "__self__", None) is rank_stream and found.__func__ is getattr(RankStream, name):  # type: ignore[union-attr]
            del vars(rank_stream)[name]
    return not vars(rank_stream).keys() & {"write", "flush"}


def restore_streams(stdout: RankStream, stderr: RankStream) -> None:
    """Put back the rank's own streams for ``sys.stdout`` and ``sys.stderr`` if those in their place fail.

    Prints a message about each one that is put back.
    """
    for name, rank_stream in (("stdout", stdout), ("stderr", stderr)):
        current = getattr(sys, name)
        known = isinstance(current, _CellStream) and not getattr(current, "closed", False)
        if known or (current is rank_stream and _is_untouched(rank_stream)):
            continue  # unchanged; a trial write would cost a turn of the output thread
        try:
            current.write("")
            current.flush()
            if current is not rank_stream:
                setattr(sys, name, _CellStream(current))
        except Exception as error:
            for method in ("write", "flush"):
                vars(rank_stream).pop(method, None)
            setattr(sys, name, rank_stream)
            what = f"the cell left a sys.{name} that cannot be written to ({type(error).__name__})"
            stderr.write(f"ddip: {what}; the former one is back\n")
