"""Find the notebook that a tool call means: each open notebook has a session on the server, with a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddip.server.kernels import KernelError


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
