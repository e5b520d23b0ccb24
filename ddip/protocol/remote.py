"""The one door to a rank: every request of the notebook, on either channel, is a ``call``."""

from __future__ import annotations

import importlib
import traceback
from typing import Any

from ddip.protocol.text import readable


def call(target: str, *args: Any) -> dict[str, Any]:
    """Run ``module.function`` of ``ddip.rank`` here, on a rank.

    Returns ``{"ok": result}``, or ``{"error": name, "message": text, "traceback": text}``: never an exception object,
    since one that cannot be unpickled would be lost inside ipyparallel's client. An interrupt is told in the same way.
    """
    module, function = target.split(".")
    try:
        return {"ok": getattr(importlib.import_module(f"ddip.rank.{module}"), function)(*args)}
    except (Exception, KeyboardInterrupt) as error:
        return {
            "error": type(error).__name__,
            "message": readable(str(error)),
            "traceback": readable(traceback.format_exc()),
        }
