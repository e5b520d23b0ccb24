"""What runs inside the engines.

Nothing here imports the rest of ddip, and this file imports no torch: the notebook imports it to name what a rank shall
do. ``call`` is the one door: every request of the notebook to a rank, on either channel, is a ``call``.
"""

from __future__ import annotations

import importlib
import traceback
from typing import Any


def namespace() -> dict[str, Any]:
    """The variables of the cells."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    return shell.user_ns  # type: ignore[no-any-return]


def call(target: str, *args: Any) -> dict[str, Any]:
    """Run ``module.function`` of this package here.

    Returns ``{"ok": result}``, or ``{"error": name, "message": text, "traceback": text}``: never an exception object,
    since one that cannot be unpickled would be lost inside ipyparallel's client.
    """
    module, function = target.split(".")
    try:
        return {"ok": getattr(importlib.import_module(f"ddip.rank.{module}"), function)(*args)}
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error), "traceback": traceback.format_exc()}
