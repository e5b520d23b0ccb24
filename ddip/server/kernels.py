"""A call of ``ddip.notebook.for_programs`` in the kernel of a notebook, in bounded time.

    server   kernel_info_request on the control channel  -->  until its status arrives: now no message is missed
             execute_request, without code, its answer in a user expression  -->  busy: it has begun  -->  reply

The kernel does one thing after the other: while a cell of the notebook runs, the request waits behind it. Who has
waited `BUSY_SECONDS` is told so, and the kernel, when it comes to the request, sees that it is late and does nothing.
"""

from __future__ import annotations

import asyncio
import json
import time
from queue import Empty
from typing import Any

from ddip.protocol.status_types import ANSWER_MIME, TOO_LATE

BUSY_SECONDS = 5.0
"""How long a request waits for its turn."""
LATER_SECONDS = 1.0
"""Nobody takes the answer of a request that begins so much later."""
LOOK_SECONDS = 0.5
"""How often it is looked whether the kernel lives."""
TRIES = 5
"""How often a request is sent that a kernel drops."""
KEY = "ddip"
CALL = "__import__('ddip.notebook.for_programs', fromlist=['call']).call({name!r}, {arguments!r}, {before!r})"


class KernelError(Exception):
    """The kernel has not done what it was asked for; the message says why."""


class KernelBusy(KernelError):
    """It does something else; nothing was done."""


async def ask(manager: Any, name: str, arguments: dict[str, Any], seconds: float) -> Any:
    """What the function `name` returns in the kernel of `manager`, which may take `seconds`; raises KernelError."""
    client = manager.client()
    client.start_channels(stdin=False, hb=False)
    try:
        await _connected(manager, client)
        for _ in range(TRIES):
            before = time.time() + BUSY_SECONDS
            expression = CALL.format(name=name, arguments=json.dumps(arguments), before=before)
            asked = client.execute(
                "", store_history=False, user_expressions={KEY: expression}, allow_stdin=False, stop_on_error=False
            )
            await _begun(manager, client, asked)
            content = await _reply(manager, client, asked, name, seconds)
            if content.get("status") != "aborted":
                return answer_in(content)
            await asyncio.sleep(LOOK_SECONDS)  # a cell has failed, and the kernel drops what has come behind it
        raise KernelBusy(
            f"cells of the notebook fail, one after the other, and {name} was dropped with them; ask again"
        )
    finally:
        client.stop_channels()


def answer_in(content: dict[str, Any]) -> Any:
    """What the reply of the kernel says; raises KernelError."""
    told = content.get("user_expressions", {}).get(KEY, {})
    if told.get("status") == "error":
        raise KernelError(f"the kernel of this notebook has no ddip: {told.get('ename')}: {told.get('evalue')}")
    text = told.get("data", {}).get(ANSWER_MIME)
    if text is None:
        raise KernelError("the kernel of this notebook is not one of IPython with ddip")
    answer = json.loads(text)
    if answer.get("error") == TOO_LATE:
        raise KernelBusy(busy_text())
    if "error" in answer:
        raise KernelError(f"{answer['error']}: {answer['message']}")
    return answer["ok"]


def busy_text() -> str:
    """What to say where a request had to wait for too long."""
    return (
        f"the notebook's kernel has been busy with a cell of its own for {BUSY_SECONDS:g} s; nothing was done. Cells "
        "that ddip_run starts leave it free; ask again, or stop that cell in the notebook"
    )


async def _connected(manager: Any, client: Any) -> None:
    """The control thread answers while a cell runs; when its message has come, the client gets all that follow."""
    end = time.monotonic() + BUSY_SECONDS
    asked: set[str] = set()
    while time.monotonic() < end:
        message = client.session.msg("kernel_info_request", {})
        client.control_channel.send(message)
        asked.add(message["header"]["msg_id"])
        if await _message(client, LOOK_SECONDS, lambda message: message["parent_header"].get("msg_id") in asked):
            return
        await _ensure_alive(manager)
    raise KernelError(f"the kernel does not answer within {BUSY_SECONDS:g} s; is its process stopped?")


async def _begun(manager: Any, client: Any, asked: str) -> None:
    end = time.monotonic() + BUSY_SECONDS + LATER_SECONDS
    while time.monotonic() < end:
        if await _message(client, LOOK_SECONDS, lambda message: message["parent_header"].get("msg_id") == asked):
            return
        await _ensure_alive(manager)
    raise KernelBusy(busy_text())


async def _message(client: Any, seconds: float, wanted: Any) -> bool:
    """Does a message that is `wanted` come on the way of all output within `seconds`?"""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            if wanted(await client.get_iopub_msg(timeout=left)):
                return True
        except Empty:
            return False
        await asyncio.sleep(0)  # a flood of output must not keep the server from everything else
    return False


async def _reply(manager: Any, client: Any, asked: str, name: str, seconds: float) -> dict[str, Any]:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        try:
            message = await client.get_shell_msg(timeout=min(LOOK_SECONDS, left))
        except Empty:
            await _ensure_alive(manager)
            continue
        if message["parent_header"].get("msg_id") == asked:
            return dict(message["content"])
    raise KernelError(f"{name} takes longer than {seconds:g} s; it goes on in the kernel: ask for the status later")


async def _ensure_alive(manager: Any) -> None:
    if not await manager.is_alive():
        raise KernelError("the kernel of this notebook has ended")
