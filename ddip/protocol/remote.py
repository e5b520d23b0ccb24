"""The one door to a rank: every request of the notebook, on either channel, is a ``call``.

What a call on the control channel answers is JSON, with bytes beside it: ``without_bytes`` there, ``with_bytes`` here.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddip.protocol.text import readable

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BYTES = "ddip bytes"
"""Key of what stands in the JSON in the place of bytes."""


def call(target: str, *args: Any) -> dict[str, Any]:
    """Run ``module.function`` of ``ddip.rank`` here, on a rank.

    Returns ``{"ok": result}``, or ``{"error": name, "message": text, "traceback": text}``: never an exception object,
    since one that cannot be unpickled would be lost inside ipyparallel's client. Interrupts and exits are returned in
    the same way: the thread that serves requests must not end.
    """
    module, _, function = target.rpartition(".")
    name = f"ddip.rank.{module}"
    try:
        return {"ok": getattr(sys.modules.get(name) or importlib.import_module(name), function)(*args)}
    except BaseException as error:  # see above
        return {
            "error": type(error).__name__,
            "message": readable(str(error)),
            "traceback": readable(traceback.format_exc()),
        }


def without_bytes(answer: Any, beside: list[ReadableBuffer]) -> Any:
    """`answer` with all bytes in it put `beside`.

    >>> beside = []
    >>> without_bytes({"ok": [b"one", 2]}, beside), beside
    ({'ok': [{'ddip bytes': 0}, 2]}, [b'one'])
    """
    if isinstance(answer, bytes | bytearray):
        beside.append(answer)
        return {BYTES: len(beside) - 1}
    if isinstance(answer, dict):
        return {key: without_bytes(value, beside) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [without_bytes(value, beside) for value in answer]
    return answer


def with_bytes(answer: Any, beside: Sequence[ReadableBuffer]) -> Any:
    """The answer that was told `without_bytes`; they are copied, and may be changed."""
    if not beside:
        return answer
    if isinstance(answer, dict):
        if answer.keys() == {BYTES}:
            return bytearray(beside[answer[BYTES]])
        return {key: with_bytes(value, beside) for key, value in answer.items()}
    if isinstance(answer, list):
        return [with_bytes(value, beside) for value in answer]
    return answer
