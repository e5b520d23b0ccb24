"""Load and unload the IPython extension: ``%load_ext ddip``, ``%unload_ext ddip`` and ``%reload_ext ddip``."""

from __future__ import annotations

import traceback
from typing import TYPE_CHECKING

from ddip import apps
from ddip.cluster.ipyparallel import registry
from ddip.cluster.processes import preload_client
from ddip.errors import ranks_text
from ddip.group import session
from ddip.notebook.cell_magics import CellMagics
from ddip.notebook.export_magic import ExportMagics
from ddip.notebook.first_lines import TRANSFORMERS
from ddip.notebook.kept_session import KeptGroups
from ddip.notebook.magics import DipMagics, Misplaced
from ddip.notebook.objects import ObjectMagics
from ddip.notebook.save_magics import SaveMagics
from ddip.notebook.state_magics import TrainingMagics
from ddip.notebook.watching import WatchMagics
from ddip.output import area
from ddip.protocol import compat, compat_ipython

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


GROUP_MAGICS = (WatchMagics, ObjectMagics, TrainingMagics, SaveMagics, ExportMagics, CellMagics)
"""Magics besides the main ones, which they use; closed in this order."""
EXTENSIONS = "IPython.core.extensions"
"""Module of IPython's extension manager, which unloads and loads an extension to reload it without saying so."""


def load_extension(shell: InteractiveShell) -> None:
    """Register the magics and start the preload process, if enabled, without waiting for it.

    If the magics exist already, as in a reload, only say that the group was kept.
    """
    kept = shell.magics_manager.registry.get(DipMagics.__name__)
    if isinstance(kept, DipMagics):
        if (group := kept.running_group) is not None:
            ranks = ranks_text(range(group.world_size))
            kept.confirm_done(f"kept {ranks}, with all variables; %makedip -k ends them")
        return
    magics = DipMagics(shell)
    magics.kept = KeptGroups(magics)
    modules = [apps.find_module(name) for name in magics.warm_apps]
    shell.register_magics(magics, *(magics_class(magics) for magics_class in GROUP_MAGICS), Misplaced(shell))
    area.watch_front_end(getattr(shell, "kernel", None))
    shell.input_transformers_cleanup.extend(TRANSFORMERS)
    session.set_current(magics)
    for library, features in compat.find_off(compat_ipython.NOTEBOOK).items():
        area.notify(compat.describe_off(library, features))
    if magics.warm and not magics.spawn and preload_client.can_fork():
        preload_client.ensure_process(modules)


def unload_extension(shell: InteractiveShell) -> None:
    """End the group and remove the magics; do nothing for ``%reload_ext``.

    IPython suggests ``%reload_ext`` if ddip is already loaded. It would reload only the top module ``ddip``, which does
    not justify losing the group.
    """
    if _is_reload():
        return
    main = shell.magics_manager.registry.get(DipMagics.__name__)
    if isinstance(main, DipMagics) and main.kept is not None:
        main.kept.detach()  # which brings back the magics that it has replaced
    for magics_class in GROUP_MAGICS:
        removed = registry.remove_magics(shell, magics_class.__name__)
        if removed is not None:
            removed.close()
    registry.remove_magics(shell, Misplaced.__name__)
    magics = registry.remove_magics(shell, DipMagics.__name__)
    for transformer in TRANSFORMERS:
        if transformer in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(transformer)
    session.clear_current()
    if magics is not None:
        magics.end_group()
        magics.autodipper.close()
        magics.hints.close()
        area.forget_front_end(getattr(shell, "kernel", None))
        preload_client.end_process()


def _is_reload() -> bool:
    """Return True if IPython's ``reload_extension`` has called this."""
    callers = (frame for frame, _ in traceback.walk_stack(None) if frame.f_globals.get("__name__") == EXTENSIONS)
    return any(frame.f_code.co_name == "reload_extension" for frame in callers)
