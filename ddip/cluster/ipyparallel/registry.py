"""Unregister magics from IPython, which has a call only to register them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.getipython import get_ipython

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def remove_magics(shell: InteractiveShell, name: str) -> Any:
    """Unregister the class of magics `name`, and return its instance, or None if there was none."""
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
    """Unregister the ``%px`` magics if they use `client`; ipyparallel's first client registers them."""
    shell = get_ipython()
    magics = None if shell is None else shell.magics_manager.registry.get("ParallelMagics")
    if shell is not None and magics is not None and magics.view.client is client:
        remove_magics(shell, "ParallelMagics")
