"""Settings of a group that may be changed at any time, for what comes."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddip.output.cells.display_options import DisplayOptions
from ddip.settings import DEFAULTS


@dataclass
class Options:
    """Of one group; its parts share them."""

    timeout: float = DEFAULTS.timeout
    """Seconds to wait for the group to form."""
    collect: bool = DEFAULTS.collect
    """Collect garbage on every rank after each cell?"""
    spawn: bool = DEFAULTS.spawn
    """Start each engine as a process of its own, instead of forking it?"""
    failure_grace: float = DEFAULTS.failure_grace
    """Seconds that the other ranks get to end a cell by themselves when one has failed."""
    stall_timeout: float = DEFAULTS.stall_timeout
    """Seconds without progress after which a cell says which rank waits where."""
    display: DisplayOptions = field(default_factory=DisplayOptions)
    """How cells are shown."""
