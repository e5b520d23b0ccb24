"""Tools for Jupyter's Model Context Protocol server, found by the entry point group ``jupyter_server_mcp.tools``.

Each tool calls a function of ``ddip.notebook.for_programs`` in the kernel of an open notebook.

The docstrings are the descriptions that MCP clients show. FastMCP makes the Parameters section the descriptions of the
arguments, and omits all other sections, so the text above it describes the result.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeAlias

from fastmcp.exceptions import ToolError

from ddip.protocol.status_types import TEXT_CHARACTERS
from ddip.server import access, kernels

Data: TypeAlias = dict[str, Any]

ASK_SECONDS = 30.0
"""Time limit of calls that only read state or start a cell."""
CHANGE_SECONDS = 300.0
"""Time limit of a start, pull, repair, stop or shutdown; longer than ddip's own limits for these."""
MOST_SECONDS = 300.0
"""Longest time that a poll may wait for the end of a cell."""
POLL_SECONDS = 0.5


async def ddip_notebooks() -> list[dict[str, str]]:
    """List the notebooks that are open on this Jupyter server.

    Returns for each: its path as `notebook`, the ID of its kernel as `kernel`, and the state of the kernel (idle, busy)
    as `state`.
    """
    app = access.authorized_server()
    return [kernels.describe_session(session) for session in await app.session_manager.list_sessions()]


async def ddip_start(arguments: str = "", notebook: str = "") -> Data:
    """Start a group of PyTorch processes (ranks) for a notebook, or change the notebook's group.

    If the notebook already has a group, it is changed to the requested one; ranks that stay keep their variables.
    Returns the status of the group, as ddip_status does.

    Parameters
    ----------
    arguments
        Options of the notebook command %makedip: "-n 4" for four ranks on the CPU, "-g all" for one rank on each GPU,
        "-r" to restart the group without any variables. If empty, a new group has one rank on each GPU, or two ranks on
        the CPU if there is no GPU.
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    return await _call_notebook(notebook, "start", CHANGE_SECONDS, arguments=arguments)


async def ddip_run(
    code: str, ranks: list[int] | None = None, timeout: float | None = None, queue: bool = False, notebook: str = ""
) -> Data:
    """Run Python code on every rank of the group as a cell in the background, and return at once.

    Returns the status of the cell with its `number`. Call ddip_poll to wait for its end, and ddip_output to read its
    output and errors. The code can use all variables that earlier cells have defined, and on each rank the variables
    `rank`, `world_size` and `device`. torch.distributed is initialized.

    Parameters
    ----------
    code
        Python source to run.
    ranks
        Numbers of the ranks that run the code. Default: all ranks.
    timeout
        Number of seconds after which the cell is stopped. Default: no limit.
    queue
        If another cell runs on these ranks, true makes this cell wait until that cell has ended; false makes this call
        fail.
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    return await _call_notebook(notebook, "run", ASK_SECONDS, code=code, ranks=ranks, timeout=timeout, queue=queue)


async def ddip_poll(number: int | None = None, wait: float = 0.0, notebook: str = "") -> Data:
    """Return the state and outcome of a cell, and optionally wait until it has ended.

    The `state` is queued, running or ended. The `outcome` is null until the cell has ended, and then one of these: ok;
    user_error (a rank raised an exception); rank_died (the process of a rank ended); stuck (a rank did not stop on
    request); interrupted (it was stopped); timeout; not_run (it left the queue without running).

    Parameters
    ----------
    number
        Number of the cell. Default: the last cell.
    wait
        Longest time to wait for the end of the cell, in seconds, at most 300. The notebook can be used during the wait.
        If the cell has not ended by then, the result has the state running or queued.
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    end = time.monotonic() + min(max(wait, 0.0), MOST_SECONDS)
    while True:
        status = await _call_notebook(notebook, "poll", ASK_SECONDS, number=number)
        number = status["number"]
        if status["state"] == "ended" or time.monotonic() >= end:
            return status
        await asyncio.sleep(POLL_SECONDS)


async def ddip_status(notebook: str = "") -> Data:
    """Return the status of the group, even while a cell runs.

    The result has the number of ranks and the backend in `group` (null if there is no group); process ID, device,
    memory in bytes and state of each rank in `ranks`; the last cells with their outcomes in `cells`; and the last error
    of each rank in `errors`.

    Parameters
    ----------
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    return await _call_notebook(notebook, "status", ASK_SECONDS)


async def ddip_output(
    number: int | None = None,
    ranks: list[int] | None = None,
    characters: int = TEXT_CHARACTERS,
    notebook: str = "",
) -> Data:
    """Return the output and error of a cell on each rank, even while the cell runs.

    In the result, `ranks` has an entry per rank with its `state`, the `text` that it has printed so far, and the
    `error` that it raised, with its traceback. If several ranks have the same text, only the first has `text`; the
    others have the number of that rank in `same_text_as`.

    Parameters
    ----------
    number
        Number of the cell. Default: the last cell.
    ranks
        Numbers of the ranks to return. Default: all ranks of the cell.
    characters
        Maximum length of each rank's text. Of a longer text, the end is returned, and `truncated` is true.
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    return await _call_notebook(notebook, "output", ASK_SECONDS, number=number, ranks=ranks, characters=characters)


async def ddip_pull(names: list[str], rank: int = 0, notebook: str = "") -> Data:
    """Return the values of variables of one rank.

    The result has an entry per variable with its `type`, and its value as `json` if it is small and JSON can represent
    it (numbers, strings, lists, dicts, tensors of up to 1,000 elements). Other values have their printed form as
    `text`, cut to 10,000 characters. Fails while the rank runs a cell; call ddip_poll to wait for its end.

    Parameters
    ----------
    names
        Names of variables.
    rank
        Number of the rank.
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    return await _call_notebook(notebook, "pull", CHANGE_SECONDS, names=names, rank=rank)


async def ddip_stop(number: int | None = None, notebook: str = "") -> Data:
    """Stop a cell that ddip_run has started. All ranks keep their variables.

    Waits until the cell has ended, and returns its status, as ddip_poll does.

    Parameters
    ----------
    number
        Number of the cell. Not needed if only one cell runs.
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    return await _call_notebook(notebook, "stop", CHANGE_SECONDS, number=number)


async def ddip_repair(names: list[str] | None = None, source: int = 0, notebook: str = "") -> Data:
    """Start new processes for ranks that have ended or cannot be stopped.

    The other ranks keep their variables. The new ranks have no variables except `names`. Returns the status of the
    group, as ddip_status does.

    Parameters
    ----------
    names
        Names of variables to copy to the new ranks. Default: none.
    source
        Number of the rank from which the variables are copied.
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    return await _call_notebook(notebook, "repair", CHANGE_SECONDS, names=names or [], source=source)


async def ddip_shutdown(notebook: str = "") -> str:
    """End the group: all its processes end, and their variables are lost.

    Parameters
    ----------
    notebook
        Path, file name or kernel ID of an open notebook. Not needed if only one notebook is open.
    """
    await _call_notebook(notebook, "shutdown", CHANGE_SECONDS)
    return "the group has ended"


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


async def _call_notebook(notebook: str, name: str, seconds: float, /, **arguments: Any) -> Data:
    """Call the function `name` in the kernel of `notebook`, and return its result.

    Raises ToolError, for example if the caller does not have the server's token.
    """
    app = access.authorized_server()
    sessions = await app.session_manager.list_sessions()
    try:
        found = kernels.choose_notebook(sessions, notebook)
        if found["kernel"] not in app.kernel_manager.list_kernel_ids():
            raise ToolError(f"{found['notebook']} no longer has a kernel")
        answer: Data = await kernels.call_in_kernel(
            app.kernel_manager.get_kernel(found["kernel"]), name, arguments, seconds
        )
    except kernels.KernelError as error:
        raise ToolError(str(error)) from None
    return answer
