"""Take magics out of IPython again: it has a call to register them, and none for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def remove(shell: InteractiveShell, name: str) -> Any:
    """Take out the class of magics `name`; returns its instance, or None if there was none."""
    magics = shell.magics_manager.registry.pop(name, None)
    if magics is None:
        return None
    for kind, names in magics.magics.items():
        for magic in names:
            shell.magics_manager.magics[kind].pop(magic, None)
    if magics in shell.configurables:
        shell.configurables.remove(magics)
    return magics


def remove_parallel_magics(client: Any) -> None:
    """Take out the ``%px`` magics that ipyparallel's first client registers, if they are those of `client`."""
    shell = get_ipython()
    magics = None if shell is None else shell.magics_manager.registry.get("ParallelMagics")
    if shell is not None and magics is not None and magics.view.client is client:
        remove(shell, "ParallelMagics")
