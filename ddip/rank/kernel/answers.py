"""Requests of the notebook beside a cell: answered by the control thread, or by a thread of their own.

    control thread    request  -->  call  -->  answer
                      request  -->  a thread of its own  -->  call  --|
                      the next  -->  call  -->  answer                |
                      answer  <---------------------------------------|

What may take long has a thread of its own: an interrupt must not wait behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddip.protocol.remote import call, without_bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from tornado.ioloop import IOLoop

THREAD = "ddip-beside"
"""Name of such a thread."""


def answer(request: dict[str, Any], loop: IOLoop, send: Callable[..., object]) -> None:
    """Do what was asked for, and `send` the answer from `loop`, which this is called on."""
    target, args = request["target"], request["args"]
    if not request.get("own_thread"):
        _send(send, call(target, *args))
        return

    def run() -> None:
        threading.current_thread().ddip_cell = None  # type: ignore[attr-defined]  # no cell has started it
        reply = call(target, *args)
        loop.add_callback(_send, send, reply)

    threading.Thread(target=run, name=THREAD, daemon=True).start()


def _send(send: Callable[..., object], reply: dict[str, Any]) -> None:
    beside: list[ReadableBuffer] = []
    content = {"status": "ok", **without_bytes(reply, beside)}
    send(content=content, buffers=beside)
