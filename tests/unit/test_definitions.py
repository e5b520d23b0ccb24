"""Digests of definitions, which decide whether the receiver's class is the sender's."""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable
from typing import Any

import pytest

from ddip.protocol.objects.definitions import compute_digest


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `function`, without ``functools.wraps``, as modules of users do."""

    def wrapper(*args: Any) -> Any:
        return function(*args)

    return wrapper


def make_forward(scale: int) -> Callable[..., Any]:
    """Return a method that depends on `scale`."""

    def forward(self: Any, x: int) -> int:
        return x * scale

    return forward


def make_base(scale: int) -> type:
    """Return a class that depends on `scale`."""

    class Base:
        factor = scale

    return Base


DEFINITIONS = {
    "decorated": "@timed\n    def forward(self, x): return x * {}",
    "made": "forward = make_forward({})",
    "base": "base = make_base({})",
    "try": "def forward(self):\n        try:\n            a()\n{}        except ValueError: c()\n{}",
    "in C": "root = {}.sqrt",
    "bound": "draw = [{}].index",
}
PARTS: dict[str, list[tuple[Any, ...]]] = {
    "try": [("            b()\n", ""), ("", "        else:\n            b()\n")],
    "in C": [("math",), ("cmath",)],
}


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_only_equal_definitions_have_equal_digests(kind: str) -> None:
    def digest_with(*parts: Any) -> str | None:
        names = {"timed": timed, "make_forward": make_forward, "make_base": make_base, "math": math, "cmath": cmath}
        names["__name__"] = "__main__"  # type: ignore[assignment]
        exec(f"class K:\n    {DEFINITIONS[kind].format(*parts)}", names)
        return compute_digest(names["K"])  # type: ignore[arg-type]

    first, second = PARTS.get(kind, [(2,), (3,)])
    assert digest_with(*first) is not None
    assert digest_with(*first) == digest_with(*first) != digest_with(*second)
