"""Access to the notebook's own group, from ``%load_ext ddip`` on, for code that has not created it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ddip.group.group import Group


class Session(Protocol):
    """The owner of the notebook's group: the magics."""

    @property
    def group(self) -> Group | None:
        """The latest group, which may have ended; None before the first."""

    def settings(self) -> dict[str, Any]:
        """Return the user's settings for new groups, as arguments of `Group`."""


_session: Session | None = None
"""The notebook's session, from ``%load_ext ddip`` on."""


def set_current(session: Session) -> None:
    """Make `session` the owner of the notebook's group."""
    global _session
    _session = session


def clear_current() -> None:
    """Remove the session, after which the notebook has no group."""
    global _session
    _session = None


def current_group() -> Group | None:
    """Return the running group that ``%makedip`` has created in this notebook; None if there is none."""
    group = None if _session is None else _session.group
    return group if group is not None and group.alive else None


def user_settings() -> dict[str, Any]:
    """Return the user's settings for new groups; empty if the extension has not been loaded."""
    return {} if _session is None else _session.settings()
