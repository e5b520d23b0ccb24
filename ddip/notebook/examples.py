"""Examples, where a magic's help begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def examples(*lines: str) -> Callable[[F], F]:
    """Put `lines` above the help that ``magic_arguments`` makes: they are what most people look for."""

    def above(magic: F) -> F:
        magic.__doc__ = "\n".join(["Examples::", "", *(f"    {line}" for line in lines), "", magic.__doc__ or ""])
        return magic

    return above
