"""Answer the notebook's control requests while a cell runs.

    control thread    quick request  -->  call  -->  reply
                      slow request   -->  new thread  -->  call  --|
                      next request   -->  call  -->  reply         |
                      reply  <-------------------------------------|

A request that may take long runs in a new thread, so that an interrupt does not wait behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddip.protocol.remote import call_target, without_bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from tornado.ioloop import IOLoop

THREAD = "ddip-beside"
"""Name of each thread that runs a slow request."""


def answer_request(request: dict[str, Any], loop: IOLoop, send: Callable[..., object]) -> None:
    """Call the requested function and pass its reply to `send`, whether it succeeded or raised.

    `request` has its target, arguments, and ``own_thread`` if it may take long. Both this function and `send` run on
    the thread of `loop`.
    """
    target, args = request["target"], request["args"]
    if not request.get("own_thread"):
        _send_reply(send, call_target(target, *args))
        return

    def run_request() -> None:
        threading.current_thread().ddip_cell = None  # type: ignore[attr-defined]  # not started by a cell
        reply = call_target(target, *args)
        loop.add_callback(_send_reply, send, reply)

    threading.Thread(target=run_request, name=THREAD, daemon=True).start()


def _send_reply(send: Callable[..., object], reply: dict[str, Any]) -> None:
    buffers: list[ReadableBuffer] = []
    content = {"status": "ok", **without_bytes(reply, buffers)}
    send(content=content, buffers=buffers)
