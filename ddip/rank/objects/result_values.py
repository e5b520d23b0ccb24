"""Send this rank's results to the notebook, which compares them with those of an exported script."""

from __future__ import annotations

from ddip.rank import user_namespace
from ddip.sharded import values


def pack_results(names: list[str]) -> tuple[bytes, dict[str, str]]:
    """Return this rank's values of `names` and of all modules, and the reason for each name that has none."""
    return values.pack_values(user_namespace(), names)
