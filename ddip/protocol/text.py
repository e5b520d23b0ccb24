"""Text that leaves the rank: as UTF-8, whatever is in it.

Half of a surrogate pair is no character, and UTF-8 cannot carry it; it leaves as Python would write it: ``\\\\udcff``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def readable(text: str) -> str:
    """`text` with escapes in place of what is no character."""
    return text.encode("utf-8", "backslashreplace").decode()


def _clean(content: Any) -> Any:
    """The same for all text in a message."""
    if isinstance(content, str):
        return readable(content)
    if isinstance(content, dict):
        return {_clean(key): _clean(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_clean(part) for part in content]
    return content


def packing(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """`pack`, which makes bytes of a part of a message, for any text; a message without such text costs no more."""

    def pack_any(content: Any) -> bytes:
        try:
            return pack(content)
        except UnicodeEncodeError:
            return pack(_clean(content))

    return pack_any
