"""Settings of a group that may be changed at any time; they apply to later steps."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddip.output.cells.display_options import DisplayOptions
from ddip.settings import DEFAULTS


@dataclass
class Options:
    """Settings that the parts of one group share."""

    timeout: float = DEFAULTS.timeout
    """Seconds to wait for the group to start."""
    collect: bool = DEFAULTS.collect
    """True to collect garbage on every rank after each cell."""
    spawn: bool = DEFAULTS.spawn
    """True to start each engine as a new process instead of forking the preload process."""
    failure_grace: float = DEFAULTS.failure_grace
    """Seconds for the other ranks to finish a cell after one rank has failed."""
    stall_timeout: float = DEFAULTS.stall_timeout
    """Seconds without progress after which ddip prints where each rank waits."""
    keep_frames: bool = DEFAULTS.keep_frames
    """True to keep the frames of a failed cell for the debugger until the next cell."""
    display: DisplayOptions = field(default_factory=DisplayOptions)
    """Options for the output of cells."""
