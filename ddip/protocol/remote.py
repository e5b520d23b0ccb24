"""Run the notebook's requests on a rank: each request, on either channel, is one ``call``.

Answers on the control channel are JSON plus separate buffers: the rank moves bytes out of the JSON with
``without_bytes``, and the notebook puts them back with ``with_bytes``.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ddip.protocol.text import escape_surrogates

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

BYTES = "ddip bytes"
"""Key of the JSON object that replaces bytes; its value is the index of the buffer."""


def call_target(target: str, *args: Any) -> dict[str, Any]:
    """Run the function `target`, ``module.function`` of ``ddip.rank``, in this process, which is a rank.

    Returns ``{"ok": result}``, or ``{"error": name, "message": text, "traceback": text}``: never an exception object,
    as ipyparallel's client drops one that it cannot unpickle. Interrupts and exits are returned in the same way, since
    the thread that serves requests must not end.
    """
    module, _, function = target.rpartition(".")
    name = f"ddip.rank.{module}"
    try:
        return {"ok": getattr(sys.modules.get(name) or importlib.import_module(name), function)(*args)}
    except BaseException as error:  # see above
        return {
            "error": type(error).__name__,
            "message": escape_surrogates(str(error)),
            "traceback": escape_surrogates(traceback.format_exc()),
        }


def without_bytes(answer: Any, beside: list[ReadableBuffer]) -> Any:
    """Return `answer` with all bytes moved to the list `beside`, each replaced by its index there.

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
    """Return the `answer` with the bytes that `without_bytes` moved out, as mutable copies."""
    if not beside:
        return answer
    if isinstance(answer, dict):
        if answer.keys() == {BYTES}:
            return bytearray(beside[answer[BYTES]])
        return {key: with_bytes(value, beside) for key, value in answer.items()}
    if isinstance(answer, list):
        return [with_bytes(value, beside) for value in answer]
    return answer
