"""``%autodip``: from the notebook's input to a ``%%dip`` cell, before IPython looks at it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell


class Autodip:
    """An IPython input transformer that puts ``%%dip`` before each cell of the user that does not begin with ``%``."""

    has_side_effects = True
    """IPython then leaves it out where it only asks whether the input is complete."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
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
        return self._arguments is not None and bool(text.strip()) and not text.startswith("%")

    def _begin(self) -> None:
        self._running += 1

    def _end(self) -> None:
        self._running = max(0, self._running - 1)

    def __call__(self, lines: list[str]) -> list[str]:
        """IPython's transformer protocol: the lines of a cell in, the lines to run out.

        While a cell runs it is a magic that asks, such as ``%%time`` or ``%%dip local``, for a cell of its own.
        """
        if not self.takes("".join(lines)) or self._running or self._hidden():
            return lines
        return [f"{self._magic}\n", *lines]

    def _hidden(self) -> bool:
        """Is this a request that a front end makes behind the user's back, such as a variable inspector's?"""
        kernel = getattr(self._shell, "kernel", None)
        if kernel is None:
            return False
        content = kernel.get_parent("shell").get("content", {})
        return bool(content.get("silent")) or content.get("store_history") is False
