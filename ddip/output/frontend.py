"""What the front end can do that the notebook's kernel talks to."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython

_asked: set[str] = set()
"""Sessions of front ends that have asked whether what was typed is complete: those with a prompt."""


def watch(kernel: Any) -> None:
    """Note which front ends of `kernel`, if there is one, have a prompt; until `forget`."""
    if kernel is None:
        return
    own = kernel.do_is_complete

    def do_is_complete(code: str) -> Any:
        _asked.add(kernel.get_parent("shell").get("header", {}).get("session", ""))
        return own(code)

    kernel.do_is_complete = do_is_complete


def forget(kernel: Any) -> None:
    """Leave the kernel, if there is one, as it was."""
    _asked.clear()
    if kernel is not None:
        del kernel.do_is_complete


def is_page() -> bool:
    """Does the cell that runs have a page below it, on which what is shown can be changed?

    jupyter-console has none, nor has a terminal. It has a kernel, and tells it nothing of itself; but it has a prompt,
    and its cells have no id, unlike those of JupyterLab's console.
    """
    kernel = getattr(get_ipython(), "kernel", None)
    if kernel is None:
        return False
    parent = kernel.get_parent("shell")
    session = parent.get("header", {}).get("session", "")
    return session not in _asked or "cellId" in parent.get("metadata", {})
