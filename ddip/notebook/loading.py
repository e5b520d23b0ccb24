"""What ``%load_ext ddip`` and ``%unload_ext ddip`` do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddip import apps
from ddip.cluster import preload_client, registry
from ddip.group import session
from ddip.notebook.magics import DipMagics
from ddip.notebook.misplaced import Misplaced
from ddip.notebook.objects import ObjectMagics
from ddip.output import frontend

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


def load(shell: InteractiveShell) -> None:
    """Register the magics, and begin to warm up."""
    magics = DipMagics(shell)
    modules = [apps.find(name) for name in magics.warm_apps]
    shell.register_magics(magics, ObjectMagics(magics), Misplaced(shell))
    frontend.watch(getattr(shell, "kernel", None))
    session.begin(magics)
    if magics.warm and not magics.spawn and preload_client.possible():
        preload_client.begin(modules)


def unload(shell: InteractiveShell) -> None:
    """End the group and take the magics out."""
    for also in (ObjectMagics, Misplaced):
        registry.remove(shell, also.__name__)
    magics = registry.remove(shell, DipMagics.__name__)
    session.end()
    if magics is not None:
        magics.end_group()
        magics.autodipper.close()
        magics.hints.close()
        frontend.forget(getattr(shell, "kernel", None))
        preload_client.end()
