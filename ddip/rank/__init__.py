"""What runs inside the engines; nothing here imports what runs in the notebook."""

from __future__ import annotations

from typing import Any


def namespace() -> dict[str, Any]:
    """The variables of the cells."""
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    assert shell is not None
    return shell.user_ns  # type: ignore[no-any-return]
