"""The notebook's own group, for those who have not made it: one a process, from ``%load_ext ddip`` on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ddip.group.group import Group


class Session(Protocol):
    """Whoever starts and ends the notebook's group: the magics."""

    @property
    def group(self) -> Group | None:
        """The group, which may have ended; None before the first."""

    def settings(self) -> dict[str, Any]:
        """What the user has set for new groups, as arguments of `Group`."""


_session: Session | None = None
"""The notebook's, from %load_ext ddip on."""


def begin(session: Session) -> None:
    """From now on the notebook's group is that of `session`."""
    global _session
    _session = session


def end() -> None:
    """There is none any more."""
    global _session
    _session = None


def current_group() -> Group | None:
    """The group of this notebook, which ``%makedip`` has made; None if there is none."""
    group = None if _session is None else _session.group
    return group if group is not None and group.alive else None


def settings() -> dict[str, Any]:
    """What the user has set for new groups; nothing where ddip has not been loaded."""
    return {} if _session is None else _session.settings()
