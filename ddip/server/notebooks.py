"""Which notebook is meant: those that are open have a session on the server, and that has a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddip.server.kernels import KernelError


def described(session: dict[str, Any]) -> dict[str, str]:
    """One of them, as the tools tell it."""
    kernel = session.get("kernel") or {}
    return {"notebook": session["path"], "kernel": kernel.get("id", ""), "state": kernel.get("execution_state", "")}


def chosen(sessions: Sequence[dict[str, Any]], typed: str) -> dict[str, str]:
    """The one whose path, name or kernel's id was `typed`; without that, the only one. Raises KernelError."""
    open_now = [described(session) for session in sessions]
    if not open_now:
        raise KernelError("no notebook is open on this Jupyter server; open one, which starts its kernel")
    names = ", ".join(found["notebook"] for found in open_now)
    if not typed:
        if len(open_now) > 1:
            raise KernelError(f"several notebooks are open; say which as `notebook`: {names}")
        return open_now[0]
    wanted = typed.strip("/")
    exact = [found for found in open_now if wanted in (found["notebook"], found["kernel"])]
    matching = exact or [found for found in open_now if found["notebook"].rsplit("/", 1)[-1] == wanted]
    if len(matching) != 1:
        raise KernelError(
            f"{typed}: {'several notebooks are' if matching else 'no notebook is'} called so; open: {names}"
        )
    return matching[0]
