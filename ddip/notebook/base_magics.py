"""The base class of magics that use the group of the main magics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from IPython.core.magic import Magics

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.notebook.magics import DipMagics


class GroupMagics(Magics):
    """Magics that use the group and the settings of the main magics."""

    shell: InteractiveShell

    def __init__(self, main: DipMagics) -> None:
        super().__init__(shell=main.shell)
        self._main = main

    def close(self) -> None:
        """Remove event handlers from IPython, if the class has some; called when the extension is unloaded."""
