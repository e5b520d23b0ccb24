"""Settings for ``%config DipMagics`` and IPython's configuration; most changes also apply to a running group."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics
from traitlets import Bool, Enum, Float, Int, List, Unicode, observe

from ddip.cluster import folder
from ddip.notebook.autodip import LOCAL_MAGICS
from ddip.output.cells.display_options import STYLES, DisplayOptions
from ddip.settings import DEFAULTS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group.cells.history import History
    from ddip.group.group import Group


OF_A_NOTEBOOK = ("warm", "warm_apps", "local_magics", "verbose")
"""Settings that concern only a notebook, and not its group."""


class Traits(Magics):
    """The settings of the magics."""

    timeout = Float(DEFAULTS.timeout, min=1, help="Seconds to wait for a group to form; %makedip -t sets it.").tag(
        config=True
    )
    collect = Bool(
        DEFAULTS.collect, help="Collect garbage, and empty the GPU cache, on every rank after each cell."
    ).tag(config=True)
    show_ranks = Unicode("0", help="Ranks whose output a cell shows without -S, such as 0 or 0,1 or all.").tag(
        config=True
    )
    warm = Bool(True, help="When ddip is loaded, start to import the ranks' modules in the background.").tag(
        config=True
    )
    warm_apps = List(Unicode(), help="Apps whose modules are also imported then.").tag(config=True)
    spawn = Bool(DEFAULTS.spawn, help="Spawn engines instead of forking them (on Linux).").tag(config=True)
    failure_grace = Float(
        DEFAULTS.failure_grace,
        min=0,
        help="Seconds that the other ranks have to end a cell after one has failed; then ddip aborts the collectives "
        "that they wait in. It does so at once if all of them wait, and only for ranks on which the cell has ended.",
    ).tag(config=True)
    stall_timeout = Float(
        DEFAULTS.stall_timeout, min=1, help="Seconds without progress after which a cell shows where each rank waits."
    ).tag(config=True)
    keep_frames = Bool(
        DEFAULTS.keep_frames,
        help="Keep the frames of a failed cell, and their tensors, on its ranks for %dipdebug until the next cell.",
    ).tag(config=True)
    style = Enum(
        STYLES,
        DEFAULTS.style,
        help="How to separate the outputs of several ranks: tabs, labels, or grouped by rank at the end; auto: tabs "
        "in a notebook, labels in a terminal.",
    ).tag(config=True)
    max_output_chars = Int(
        DEFAULTS.max_output_chars,
        min=1000,
        help="Maximum characters of text that a rank shows in one cell; the middle of longer text is left out.",
    ).tag(config=True)
    keep_output_bytes = Int(
        DEFAULTS.keep_output_bytes,
        min=0,
        help="Bytes of output, of all cells together, to keep for %dipcell; the oldest is discarded first.",
    ).tag(config=True)
    report_after = Float(
        0.0,
        min=0,
        help="Seconds after which a cell reports where it ran and how long it took; under %autodip all cells do.",
    ).tag(config=True)
    cell_json = Bool(
        DEFAULTS.cell_json,
        help="Add each rank's output as data, application/vnd.ddip.cell+json, to the HTML output of a cell, for "
        "programs that read the notebook.",
    ).tag(config=True)
    local_magics = List(
        Unicode(),
        LOCAL_MAGICS,
        help="Magics, without %, whose cells run in the notebook under %autodip. Other IPython magics, such as %%time, "
        "run on the ranks; magics of an extension never do.",
    ).tag(config=True)
    confirm = Bool(True, help="Confirm %makedip -k, %dipush and %dipull in one line.").tag(config=True)
    verbose = Bool(False, help="Print what each magic does; %makedip -v sets it.").tag(config=True)

    shell: InteractiveShell
    group: Group | None = None

    @property
    def running_group(self) -> Group | None:
        """The group; None if there is none, or if it has ended."""
        return self.group if self.group is not None and self.group.alive else None

    @observe("collect")
    def _collect_changed(self, change: dict[str, Any]) -> None:
        if (group := self.running_group) is not None:
            group.set_collect(change["new"])

    @observe("keep_output_bytes")
    def _keep_changed(self, change: dict[str, Any]) -> None:
        self.history.keep_output_bytes = change["new"]
        self.history.trim()

    @observe("style", "max_output_chars", "report_after", "cell_json")
    def _look_changed(self, change: dict[str, Any]) -> None:
        if self.group is not None:
            self.group.options.display = self._display_options()

    @cached_property
    def history(self) -> History:
        """The history of the cells of all groups of this notebook, created on first use."""
        with folder.left_out():
            from ddip.group.cells.history import History

        return History(self.keep_output_bytes, keep_pushes=True)

    def _display_options(self) -> DisplayOptions:
        return DisplayOptions(self.style, self.max_output_chars, self.report_after, self.cell_json)

    def settings(self) -> dict[str, Any]:
        """Return the settings as keyword arguments for a new Group."""
        names = ("timeout", "collect", "spawn", "failure_grace", "stall_timeout", "keep_frames")
        values = {name: getattr(self, name) for name in names}
        return {**values, "display": self._display_options(), "history": self.history}

    def group_settings(self) -> dict[str, Any]:
        """Return by name the settings that a notebook and the keeper of its group share."""
        return {name: getattr(self, name) for name in self.trait_names(config=True) if name not in OF_A_NOTEBOOK}

    @observe("failure_grace", "stall_timeout", "keep_frames")
    def _limits_changed(self, change: dict[str, Any]) -> None:
        if self.group is not None:
            setattr(self.group.options, change["name"], change["new"])
