"""Answer name requests of the notebook: tab completion, ``?`` help, and names of variables."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any

from IPython.core.getipython import get_ipython

from ddip.rank import current_variables


def variable_names(beginning: str) -> list[str]:
    """Return the names of the rank's variables that begin with `beginning`, without IPython's own.

    May be called while a cell runs.
    """
    hidden = get_ipython().user_ns_hidden  # type: ignore[union-attr]
    names = [name for name in current_variables() if name.startswith(beginning) and name not in hidden]
    return sorted(name for name in names if beginning or not name.startswith("_"))


def exported_names(modules: list[str]) -> dict[str, dict[str, str]]:
    """Return the names that ``from module import *`` binds, by module.

    `modules`: paths; those that this rank has not imported are left out. The value of a name is the path of the module
    that it is, and empty for other objects.
    """
    found: dict[str, dict[str, str]] = {}
    for path in modules:
        if (module := sys.modules.get(path)) is not None:
            names = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
            found[path] = {}
            for name in names:
                with contextlib.suppress(Exception):  # a lazy module may raise anything; the import would have failed
                    obj = getattr(module, name)
                    found[path][name] = obj.__name__ if isinstance(obj, ModuleType) else ""
    return found


def complete_code(code: str, cursor: int) -> dict[str, Any]:
    """Answer Jupyter's ``complete_request`` for `code` with the cursor at offset `cursor`.

    It inspects live objects without jedi, which analyses source code and takes seconds for its first look at torch.
    """
    shell: Any = get_ipython()
    former_setting, shell.Completer.use_jedi = shell.Completer.use_jedi, False
    try:
        return dict(shell.kernel.do_complete(code, cursor))
    finally:
        shell.Completer.use_jedi = former_setting


def inspect_code(code: str, cursor: int, detail: int) -> dict[str, Any]:
    """Answer Jupyter's ``inspect_request`` for `code` with the cursor at offset `cursor`.

    `detail`: 0 for ``?``, 1 for ``??``.
    """
    return dict(get_ipython().kernel.do_inspect(code, cursor, detail))  # type: ignore[union-attr]
