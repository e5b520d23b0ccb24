"""``%autodip``: turn the notebook's cells into ``%%dip`` cells before IPython parses them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ddip.notebook import both_sides
from ddip.notebook.first_lines import skip_comments
from ddip.output.area import current_request
from ddip.protocol.cell_messages import NOTEBOOK_MAGICS

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LOCAL_MAGICS = [
    *NOTEBOOK_MAGICS,
    *("dip", "diprun"),
    *("load_ext", "reload_ext", "unload_ext", "config"),
    *("pip", "conda", "mamba", "micromamba", "uv"),
    *("bash", "sh", "script", "perl", "ruby", "python", "python2", "python3", "pypy"),
    *("html", "HTML", "svg", "SVG", "latex", "javascript", "js", "markdown"),
    *("writefile", "file", "history", "notebook", "save", "load", "loadpy", "recall", "rerun", "rep", "macro", "store"),
    *("edit", "ed", "alias", "unalias", "alias_magic", "bookmark"),
    *("logstart", "logstop", "logon", "logoff", "logstate"),
    *("lsmagic", "quickref", "magic", "page", "less", "more", "man", "pastebin", "automagic", "autocall"),
    *("doctest_mode", "gui", "colors", "tb", "qtconsole", "connect_info", "autosave", "killbgscripts"),
]
"""Magics of IPython and ddip that concern the notebook: a cell that begins with one runs in the notebook."""
BUILT_IN = ("IPython.core.magic", "ipykernel.")
"""Modules of the magics that ranks also have, unlike magics added by an extension or a user. Shell commands such as
``%mkdir`` are not in these modules, because they should run only once."""
AUTODIP_OFF = "%autodip is off: cells run in the notebook"
MAGIC = re.compile(r"%%?([A-Za-z_]\w*)")


class Autodip:
    """An IPython input transformer that adds ``%%dip`` to each user cell that belongs on the ranks."""

    has_side_effects = True
    """Makes IPython skip this transformer when it only checks whether the input is complete."""

    def __init__(self, shell: InteractiveShell, local: Callable[[], Collection[str]] = lambda: LOCAL_MAGICS) -> None:
        self._shell = shell
        self._local = local
        self._arguments: str | None = None
        self._everywhere = ""
        """Arguments of cells for both sides, which have no others."""
        self._running = 0
        self._reruns = False
        """Whether the user's cell is ``%rerun``, so that the next cell within it is the user's too."""
        shell.events.register("pre_execute", self._enter_cell)
        shell.events.register("post_execute", self._exit_cell)

    @property
    def state(self) -> str:
        """Text for users: ``off``, or ``on`` with the magic that is added to cells."""
        return "off" if self._arguments is None else f"on, cells run as {self._magic}"

    @property
    def _magic(self) -> str:
        return f"%%dip {self._arguments}".rstrip()

    def on(self, arguments: str, everywhere: str = "") -> None:
        """Run all later cells as ``%%dip <arguments>``.

        Those for both sides run as ``%%dip everywhere <everywhere>``.
        """
        self.off()
        self._arguments, self._everywhere = arguments, everywhere
        self._shell.input_transformers_cleanup.append(self)

    def off(self) -> None:
        """Stop adding ``%%dip`` to cells."""
        self._arguments = None
        transformers = self._shell.input_transformers_cleanup
        if self in transformers:
            transformers.remove(self)

    def close(self) -> None:
        """Remove the transformer and the event handlers from IPython."""
        self.off()
        self._shell.events.unregister("pre_execute", self._enter_cell)
        self._shell.events.unregister("post_execute", self._exit_cell)

    def takes(self, text: str) -> bool:
        """Return True if the cell `text` would run on the ranks."""
        on = self._arguments is not None and bool(text.strip())
        return on and (self._is_for_both_sides(text) or not self._is_local(text))

    def _is_for_both_sides(self, text: str) -> bool:
        """Return True if the cell belongs on both sides; ``load_ext`` and ``config`` are local for other arguments."""
        names = both_sides.magic_names(text)
        return bool(names) and not {*names}.intersection(self._local()).difference(both_sides.SOMETIMES)

    def _is_local(self, text: str) -> bool:
        """Return True if the cell begins with a magic of the notebook."""
        text = skip_comments(text)
        found = MAGIC.match(text)
        return found is not None and (found[1] in self._local() or self._is_user_magic(found[1], text))

    def _is_user_magic(self, name: str, text: str) -> bool:
        """Return True if an extension or the user has added this magic to the notebook."""
        kind = "cell" if text.startswith("%%") else "line"
        function = self._shell.magics_manager.magics[kind].get(name)
        made_in = type(function.__self__) if hasattr(function, "__self__") else function
        return function is not None and not str(getattr(made_in, "__module__", "")).startswith(BUILT_IN)

    def _enter_cell(self) -> None:
        self._running += 1

    def _exit_cell(self) -> None:
        self._running = max(0, self._running - 1)

    def __call__(self, lines: list[str]) -> list[str]:
        """Return the lines to run for the `lines` of a cell; IPython calls this.

        While a cell is running, the lines come from a magic such as ``%%time`` or ``%%dip local``, and do not change.
        """
        text = "".join(lines)
        is_rerun, self._reruns = self._reruns and self._running == 1, False
        if self._running == 0:
            found = MAGIC.match(skip_comments(text))
            self._reruns = found is not None and found[1] == "rerun"
        if not self.takes(text) or (self._running and not is_rerun) or self.hidden():
            return lines
        magic = f"%%dip everywhere {self._everywhere}".rstrip() if self._is_for_both_sides(text) else self._magic
        return [f"{magic}\n", *lines]

    def hidden(self) -> bool:
        """Return True for a request that a front end makes on its own, such as a variable inspector."""
        content = (current_request() or {}).get("content", {})
        return bool(content.get("silent")) or content.get("store_history") is False
