"""Help and the like that a cell on ranks has asked for (``model?``), shown as the notebook shows its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from IPython.core.getipython import get_ipython
from IPython.core.page import page as page_text

PAGES = ("page", "set_next_input")
"""What a cell may ask of the notebook, besides output."""


def show(payload: Sequence[dict[str, Any]]) -> bool:
    """Show what is in the `payload` of a rank's reply; returns False if there is nothing."""
    shell = get_ipython()
    pages = [page for page in payload if page.get("source") in PAGES]
    if not pages or shell is None:
        return False
    for page in pages:
        if getattr(shell, "kernel", None) is not None:
            shell.payload_manager.write_payload(page)  # type: ignore[union-attr]
        elif page["source"] == PAGES[0]:
            page_text(page["data"])
    return True
