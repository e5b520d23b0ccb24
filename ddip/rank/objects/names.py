"""What the names of a rank mean, for a person who types: completion, help, and whether there is such a variable."""

from __future__ import annotations

from typing import Any

from IPython.core.getipython import get_ipython

from ddip.rank import namespace


def has(name: str) -> bool:
    """Is there such a variable? May be asked beside a cell."""
    return name in namespace()


def complete(code: str, cursor: int) -> dict[str, Any]:
    """The answer to Jupyter's ``complete_request``.

    From the objects themselves: jedi, which looks at their source, takes seconds when it is first asked about torch.
    """
    shell: Any = get_ipython()
    usual, shell.Completer.use_jedi = shell.Completer.use_jedi, False
    try:
        return dict(shell.kernel.do_complete(code, cursor))
    finally:
        shell.Completer.use_jedi = usual


def inspect(code: str, cursor: int, detail: int) -> dict[str, Any]:
    """The answer to Jupyter's ``inspect_request``."""
    return dict(get_ipython().kernel.do_inspect(code, cursor, detail))  # type: ignore[union-attr]
