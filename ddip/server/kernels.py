"""Find the kernel of a notebook, and call ``ddip.notebook.for_programs`` in it, in bounded time.

    server   kernel_info_request on the control channel  -->  until its status arrives: now no message is missed
             execute_request without code, the call in a user expression  -->  busy: it has begun  -->  reply

The kernel runs one request at a time: while a cell of the notebook runs, the request waits behind it. After
`BUSY_SECONDS` the caller gets KernelError, and the kernel, once it reaches the request, sees that it is late and drops
it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from queue import Empty
from typing import Any

from ddip.protocol.status_types import ANSWER_MIME, TOO_LATE

BUSY_SECONDS = 5.0
"""Time that a request waits for its turn."""
LATER_SECONDS = 1.0
"""Time beyond `BUSY_SECONDS` that the server still waits for a request to begin."""
LOOK_SECONDS = 0.5
"""Interval at which the server checks that the kernel is alive."""
TRIES = 5
"""Number of times to send a request, since the kernel drops requests after a failed cell."""
KEY = "ddip"
CALL = "__import__('ddip.notebook.for_programs', fromlist=['call']).call({name!r}, {arguments!r}, {before!r})"


class KernelError(Exception):
    """A call in a kernel failed; the message says why."""


def describe_session(session: dict[str, Any]) -> dict[str, str]:
    """Describe a session as the tools return it: path of the notebook, id and state of the kernel."""
    kernel = session.get("kernel") or {}
    return {"notebook": session["path"], "kernel": kernel.get("id", ""), "state": kernel.get("execution_state", "")}


def choose_notebook(sessions: Sequence[dict[str, Any]], typed: str) -> dict[str, str]:
    """Return the notebook whose path, file name or kernel id is `typed`, or the only one if that is empty.

    `sessions`: those of the Jupyter server; the result is that of `describe_session`. Raises KernelError if none or
    several match.
    """
    open_now = [describe_session(session) for session in sessions]
    if not open_now:
        raise KernelError("no notebook is open on this Jupyter server; open one, which starts its kernel")
    names = ", ".join(found["notebook"] for found in open_now)
    if not typed:
        if len(open_now) > 1:
            raise KernelError(f"several notebooks are open; give one as `notebook`: {names}")
        return open_now[0]
    wanted = typed.strip("/")
    exact = [found for found in open_now if wanted in (found["notebook"], found["kernel"])]
    matching = exact or [found for found in open_now if found["notebook"].rsplit("/", 1)[-1] == wanted]
    if len(matching) != 1:
        raise KernelError(
            f"{typed}: {'several notebooks are' if matching else 'no notebook is'} called that; open: {names}"
        )
    return matching[0]


async def call_in_kernel(manager: Any, name: str, arguments: dict[str, Any], seconds: float) -> Any:
    """Call the function `name` in the kernel of `manager` and return its result.

    `arguments` and the result must be JSON. Raises KernelError if the call could not begin: nothing was done then. The
    same if the kernel has ended, or if the call fails or takes longer than `seconds`: it then goes on in the kernel.
    """
    client = manager.client()
    client.start_channels(stdin=False, hb=False)
    try:
        await _wait_until_connected(manager, client)
        for _ in range(TRIES):
            before = time.time() + BUSY_SECONDS
            expression = CALL.format(name=name, arguments=json.dumps(arguments), before=before)
            msg_id = client.execute(
                "", store_history=False, user_expressions={KEY: expression}, allow_stdin=False, stop_on_error=False
            )
            await _wait_until_begun(manager, client, msg_id)
            content = await _wait_for_reply(manager, client, msg_id, name, seconds)
            if content.get("status") != "aborted":
                return answer_in(content)
            await asyncio.sleep(LOOK_SECONDS)  # a cell failed, and the kernel drops the requests queued behind it
        raise KernelError(f"several cells of the notebook have failed, and {name} was dropped with them; try again")
    finally:
        client.stop_channels()


def answer_in(content: dict[str, Any]) -> Any:
    """Return the result in the content of an execute_reply.

    Raises KernelError if it contains an error or no result, or if the call was not made in time.
    """
    expression = content.get("user_expressions", {}).get(KEY, {})
    if expression.get("status") == "error":
        error = f"{expression.get('ename')}: {expression.get('evalue')}"
        raise KernelError(f"the kernel of this notebook has no ddip: {error}")
    text = expression.get("data", {}).get(ANSWER_MIME)
    if text is None:
        raise KernelError("the kernel of this notebook is not one of IPython with ddip")
    answer = json.loads(text)
    if answer.get("error") == TOO_LATE:
        raise KernelError(busy_text())
    if "error" in answer:
        raise KernelError(f"{answer['error']}: {answer['message']}")
    return answer["ok"]


def busy_text() -> str:
    """Return the message for a request that has waited too long for its turn."""
    return (
        f"the notebook's kernel has been busy with a cell of its own for {BUSY_SECONDS:g} s; nothing was done. Cells "
        "that ddip_run starts leave it free; try again, or stop that cell in the notebook"
    )


async def _wait_until_connected(manager: Any, client: Any) -> None:
    """Wait until the client's iopub subscription is in effect, so that it misses no later message.

    The control thread answers even while a cell runs. Raises KernelError if no answer comes within `BUSY_SECONDS`.
    """
    end = time.monotonic() + BUSY_SECONDS
    request_ids: set[str] = set()
    while time.monotonic() < end:
        message = client.session.msg("kernel_info_request", {})
        client.control_channel.send(message)
        request_ids.add(message["header"]["msg_id"])
        if await _wait_for_message(
            client, LOOK_SECONDS, lambda message: message["parent_header"].get("msg_id") in request_ids
        ):
            return
        await _ensure_alive(manager)
    raise KernelError(f"the kernel does not answer within {BUSY_SECONDS:g} s; is its process stopped?")


async def _wait_until_begun(manager: Any, client: Any, msg_id: str) -> None:
    """Wait until the kernel begins the request `msg_id`; raise KernelError if it does not in time."""
    end = time.monotonic() + BUSY_SECONDS + LATER_SECONDS
    while time.monotonic() < end:
        if await _wait_for_message(
            client, LOOK_SECONDS, lambda message: message["parent_header"].get("msg_id") == msg_id
        ):
            return
        await _ensure_alive(manager)
    raise KernelError(busy_text())


async def _wait_for_message(client: Any, seconds: float, wanted: Any) -> bool:
    """Read iopub messages for up to `seconds`; return True as soon as `wanted` accepts one."""
    end = time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        try:
            if wanted(await client.get_iopub_msg(timeout=remaining)):
                return True
        except Empty:
            return False
        await asyncio.sleep(0)  # a flood of output must not block the server
    return False


async def _wait_for_reply(manager: Any, client: Any, msg_id: str, name: str, seconds: float) -> dict[str, Any]:
    """Wait for the reply to the request `msg_id`, and return its content.

    Raises KernelError after `seconds`, or if the kernel ended.
    """
    end = time.monotonic() + seconds
    while (remaining := end - time.monotonic()) > 0:
        try:
            message = await client.get_shell_msg(timeout=min(LOOK_SECONDS, remaining))
        except Empty:
            await _ensure_alive(manager)
            continue
        if message["parent_header"].get("msg_id") == msg_id:
            return dict(message["content"])
    raise KernelError(f"{name} takes longer than {seconds:g} s; it continues in the kernel: ask for the status later")


async def _ensure_alive(manager: Any) -> None:
    if not await manager.is_alive():
        raise KernelError("the kernel of this notebook has ended")
