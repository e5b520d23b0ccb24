"""Texts that ranks and the notebook print; make text that leaves a rank encodable as UTF-8, whatever it contains.

UTF-8 cannot encode half of a surrogate pair, so each half is replaced by its Python escape, such as ``\\\\udcff``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

SHOWN_NAMES = 8


def list_names(names: Sequence[str]) -> str:
    """Return the first names as text, and how many more there are."""
    more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
    return ", ".join(names[:SHOWN_NAMES]) + more


def print_reasons(what: str, reasons: Mapping[str, str]) -> None:
    """Print the variables by reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in reasons.items():
        by_reason.setdefault(why, []).append(name)
    for why, names in by_reason.items():
        print(f"ddip: {what}: {list_names(names)}: {why}")


def escape_surrogates(text: str) -> str:
    """Return `text` with each lone surrogate replaced by its escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _escape_content(content: Any) -> Any:
    """Apply `escape_surrogates` to all strings in a message, including the keys of its dicts."""
    if isinstance(content, str):
        return escape_surrogates(content)
    if isinstance(content, dict):
        return {_escape_content(key): _escape_content(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_escape_content(part) for part in content]
    return content


def accept_surrogates(pack: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Wrap `pack`, a function that serializes part of a message, so that it accepts lone surrogates.

    It packs a message without them once, at no extra cost.
    """

    def pack_any(content: Any) -> bytes:
        try:
            return pack(content)
        except UnicodeEncodeError:
            return pack(_escape_content(content))

    return pack_any
