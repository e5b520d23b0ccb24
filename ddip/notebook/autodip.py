"""``%autodip``: from the notebook's input to a ``%%dip`` cell, before IPython looks at it."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from ddip.notebook import both_sides

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

LOCAL_MAGICS = [
    "makedip",
    "dip",
    "autodip",
    "dipush",
    "dipull",
    "dipshards",
    "dipcheck",
    "dipsync",
    "dipcells",
    "dipstatus",
    "dipcell",
    "dipwait",
    "dipstop",
    "dipstack",
    "dipwatch",
    "dipper",
    "load_ext",
    "reload_ext",
    "unload_ext",
    "config",
    "pip",
    "conda",
    "mamba",
    "micromamba",
    "uv",
    "bash",
    "sh",
    "script",
    "perl",
    "ruby",
    "html",
    "HTML",
    "svg",
    "SVG",
    "latex",
    "javascript",
    "js",
    "markdown",
    "writefile",
    "file",
    "history",
    "notebook",
    "save",
    "load",
    "loadpy",
    "recall",
    "rerun",
    "rep",
    "macro",
    "store",
    "edit",
    "ed",
    "alias",
    "unalias",
    "alias_magic",
    "bookmark",
    "logstart",
    "logstop",
    "logon",
    "logoff",
    "logstate",
    "lsmagic",
    "quickref",
    "magic",
    "page",
    "less",
    "more",
    "man",
    "pastebin",
    "automagic",
    "autocall",
    "doctest_mode",
    "gui",
    "colors",
    "tb",
    "qtconsole",
    "connect_info",
    "autosave",
    "killbgscripts",
]
"""Of IPython and ddip, the magics that are the notebook's own business: cells that begin with one stay there."""
OWN = ("IPython.core.magic", "ipykernel.")
"""Modules of the magics that the ranks have as well; what an extension or a user has added they have not. Commands of
the shell, such as ``%mkdir``, are elsewhere: once is right for those."""
MAGIC = re.compile(r"%%?([A-Za-z_]\w*)")


class Autodip:
    """An IPython input transformer that puts ``%%dip`` before each cell of the user's that belongs on the ranks."""

    has_side_effects = True
    """IPython then leaves it out where it only asks whether the input is complete."""

    def __init__(self, shell: InteractiveShell, local: Callable[[], Collection[str]] = lambda: LOCAL_MAGICS) -> None:
        self._shell = shell
        self._local = local
        self._arguments: str | None = None
        self._running = 0
        shell.events.register("pre_execute", self._begin)
        shell.events.register("post_execute", self._end)

    @property
    def state(self) -> str:
        """``off``, or ``on`` and the cell magic that it puts before cells."""
        return "off" if self._arguments is None else f"on, cells run as {self._magic}"

    @property
    def _magic(self) -> str:
        return f"%%dip {self._arguments}".rstrip()

    def on(self, arguments: str) -> None:
        """Run the cells from here on as ``%%dip <arguments>``."""
        self.off()
        self._arguments = arguments
        self._shell.input_transformers_cleanup.append(self)

    def off(self) -> None:
        """Leave cells alone."""
        self._arguments = None
        transformers = self._shell.input_transformers_cleanup
        if self in transformers:
            transformers.remove(self)

    def close(self) -> None:
        """Leave IPython as it was."""
        self.off()
        self._shell.events.unregister("pre_execute", self._begin)
        self._shell.events.unregister("post_execute", self._end)

    def takes(self, text: str) -> bool:
        """Would this cell run on the ranks?"""
        on = self._arguments is not None and bool(text.strip())
        return on and (self._everywhere(text) or not self._stays(text))

    def _everywhere(self, text: str) -> bool:
        """Does it belong on both sides? ``load_ext`` is local by what it usually loads."""
        names = both_sides.names(text)
        return bool(names) and not {*names}.intersection(self._local()).difference(("load_ext", "reload_ext"))

    def _stays(self, text: str) -> bool:
        """Does it begin with a magic of the notebook's?"""
        found = MAGIC.match(text.lstrip("\n"))
        return found is not None and (found[1] in self._local() or self._is_added(found[1], text))

    def _is_added(self, name: str, text: str) -> bool:
        """Has an extension, or the user, given the notebook this magic?"""
        kind = "cell" if text.lstrip("\n").startswith("%%") else "line"
        function = self._shell.magics_manager.magics[kind].get(name)
        made_in = type(function.__self__) if hasattr(function, "__self__") else function
        return function is not None and not str(getattr(made_in, "__module__", "")).startswith(OWN)

    def _begin(self) -> None:
        self._running += 1

    def _end(self) -> None:
        self._running = max(0, self._running - 1)

    def __call__(self, lines: list[str]) -> list[str]:
        """IPython's transformer protocol: the lines of a cell in, the lines to run out.

        While a cell runs it is a magic that asks, such as ``%%time`` or ``%%dip local``, for a cell of its own.
        """
        text = "".join(lines)
        if not self.takes(text) or self._running or self.hidden():
            return lines
        magic = f"%%dip everywhere {self._arguments}".rstrip() if self._everywhere(text) else self._magic
        return [f"{magic}\n", *lines]

    def hidden(self) -> bool:
        """Is this a request that a front end makes behind the user's back, such as a variable inspector's?"""
        kernel = getattr(self._shell, "kernel", None)
        if kernel is None:
            return False
        content = kernel.get_parent("shell").get("content", {})
        return bool(content.get("silent")) or content.get("store_history") is False
