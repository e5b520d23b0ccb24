"""Code that runs inside the engines; it imports no code of the notebook."""

from __future__ import annotations

import sys
from typing import Any


def user_namespace() -> dict[str, Any]:
    """Return the namespace in which cells run."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    return shell.user_ns  # type: ignore[no-any-return]


def current_variables() -> dict[str, Any]:
    """Return a copy of the namespace of cells, with the variables of a running script in place of its own."""
    return {**user_namespace(), **vars(sys.modules["__main__"])}
