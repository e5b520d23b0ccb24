"""Tools for Jupyter's Model Context Protocol server, found by the entry point group ``jupyter_server_mcp.tools``.

Each tool calls a function of ``ddip.notebook.for_programs`` in the kernel of an open notebook. Clients read the
docstrings.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeAlias

from fastmcp.exceptions import ToolError

from ddip.protocol.status_types import TEXT_CHARACTERS
from ddip.server import access, kernels, notebooks

Data: TypeAlias = dict[str, Any]

ASK_SECONDS = 30.0
"""Time limit of calls that only read state or begin something."""
CHANGE_SECONDS = 300.0
"""Time limit of a start, repair, stop or shutdown, above the limits that ddip has for these itself."""
MOST_SECONDS = 300.0
"""Longest time for which a poll may wait."""
POLL_SECONDS = 0.5


async def ddip_notebooks() -> list[dict[str, str]]:
    """The notebooks that are open on this Jupyter server: path, id of the kernel, and whether that is idle or busy."""
    app = access.server()
    return [notebooks.described(session) for session in await app.session_manager.list_sessions()]


async def ddip_start(arguments: str = "", notebook: str = "") -> Data:
    """Start a group of PyTorch ranks beside a notebook; returns its status.

    arguments: what a person types after %makedip: "-n 4" for four ranks on the CPU, "-g all" for one on each GPU,
    "-r" to restart; empty: one on each GPU, or two on the CPU. A group that is there changes, and ranks that stay keep
    their variables. notebook: path of an open notebook; may be left out if only one is open.
    """
    return await _ask(notebook, "start", CHANGE_SECONDS, arguments=arguments)


async def ddip_run(
    code: str, ranks: list[int] | None = None, timeout: float | None = None, queue: bool = False, notebook: str = ""
) -> Data:
    """Run Python code as a cell on every rank of the group, in the background; returns at once, with the cell's number.

    The names of all cells before it are there; `rank`, `world_size` and `device` are, too, and torch.distributed is
    initialised. ranks: only these. timeout: end it after so many seconds. queue: if other cells run on these ranks,
    wait for them instead of being refused. Then ddip_poll waits for its end, and ddip_output has what it shows.
    """
    return await _ask(notebook, "run", ASK_SECONDS, code=code, ranks=ranks, timeout=timeout, queue=queue)


async def ddip_poll(number: int | None = None, wait: float = 0.0, notebook: str = "") -> Data:
    """The state of a cell (queued, running, ended) and its outcome: ok, user_error, rank_died, stuck, interrupted,
    timeout, not_run; null while it runs.

    number: of the cell; the last one if left out. wait: seconds, at most 300, to wait for its end; the notebook's
    kernel stays free meanwhile.
    """
    end = time.monotonic() + min(max(wait, 0.0), MOST_SECONDS)
    while True:
        status = await _ask(notebook, "poll", ASK_SECONDS, number=number)
        number = status["number"]
        if status["state"] == "ended" or time.monotonic() >= end:
            return status
        await asyncio.sleep(POLL_SECONDS)


async def ddip_status(notebook: str = "") -> Data:
    """All that is known of the group: ranks with their processes, devices, memory and state, the last cells with their
    outcomes, and the last error of each rank."""
    return await _ask(notebook, "status", ASK_SECONDS)


async def ddip_output(
    number: int | None = None,
    ranks: list[int] | None = None,
    characters: int = TEXT_CHARACTERS,
    notebook: str = "",
) -> Data:
    """What each rank has shown in a cell so far, and the error that it raised, with its traceback; also while it runs.

    number: of the cell; the last one if left out. ranks: only these. characters: of each rank's text the last so many.
    A rank that has shown the same as another has `same_text_as` in place of its text.
    """
    return await _ask(notebook, "output", ASK_SECONDS, number=number, ranks=ranks, characters=characters)


async def ddip_pull(names: list[str], rank: int = 0, notebook: str = "") -> Data:
    """The values of variables of a rank: as JSON where they are small and JSON has them, else as text, cut at 10 000
    characters. The rank must be free: ddip_poll says when a cell has ended."""
    return await _ask(notebook, "pull", CHANGE_SECONDS, names=names, rank=rank)


async def ddip_stop(number: int | None = None, notebook: str = "") -> Data:
    """End a cell that ddip_run has started; all variables are kept. number: may be left out if only one runs."""
    return await _ask(notebook, "stop", CHANGE_SECONDS, number=number)


async def ddip_repair(names: list[str] | None = None, source: int = 0, notebook: str = "") -> Data:
    """Put new processes in place of ranks that have ended, or cannot be stopped; the others keep their variables.

    names: variables to copy to the new ranks from the rank `source`. Returns the status.
    """
    return await _ask(notebook, "repair", CHANGE_SECONDS, names=names or [], source=source)


async def ddip_shutdown(notebook: str = "") -> str:
    """End all ranks of the group, with their variables."""
    await _ask(notebook, "shutdown", CHANGE_SECONDS)
    return "there is no group any more"


TOOLS = [
    f"{__name__}:{tool.__name__}"
    for tool in (
        ddip_notebooks,
        ddip_start,
        ddip_run,
        ddip_poll,
        ddip_status,
        ddip_output,
        ddip_pull,
        ddip_stop,
        ddip_repair,
        ddip_shutdown,
    )
]
"""The functions that jupyter-server-mcp registers."""


async def _ask(notebook: str, name: str, seconds: float, /, **arguments: Any) -> Data:
    """Call the function `name` in the kernel of `notebook`, and return its result.

    Raises ToolError, also if the caller does not have the server's token.
    """
    app = access.server()
    sessions = await app.session_manager.list_sessions()
    try:
        found = notebooks.chosen(sessions, notebook)
        if found["kernel"] not in app.kernel_manager.list_kernel_ids():
            raise ToolError(f"{found['notebook']} has no kernel any more")
        answer: Data = await kernels.ask(app.kernel_manager.get_kernel(found["kernel"]), name, arguments, seconds)
    except kernels.KernelError as error:
        raise ToolError(str(error)) from None
    return answer
