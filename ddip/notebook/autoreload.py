"""IPython's autoreload: whether the notebook has it and ranks have not, which would run old modules unseen."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ddip.errors import ranks_text
from ddip.output.area import notify

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group.group import Group

TURNED_ON = re.compile(r"^\s*%(?:autoreload|(?:re)?load_ext\s+autoreload)\b", re.MULTILINE)


class Autoreload:
    """Which ranks have been told of it."""

    def __init__(self, shell: InteractiveShell) -> None:
        self._shell = shell
        self._pids: set[int] = set()
        """Of ranks to which a cell has sent it."""
        self._told = False
        """Has the user been told since?"""

    @property
    def is_on(self) -> bool:
        """Is it on in the notebook?"""
        magics = self._shell.magics_manager.registry.get("AutoreloadMagics")
        return bool(getattr(getattr(magics, "_reloader", None), "enabled", False))

    def sent(self, cell: str, group: Group, ranks: Iterable[int]) -> None:
        """These ranks run the cell."""
        if TURNED_ON.search(cell):
            self._pids |= {group.members[rank].pid for rank in ranks}
            self._told = False  # ranks that come later will lack it

    def after_cell(self, group: Group) -> None:
        """Say once that ranks lack what the notebook has."""
        if self._told or not self.is_on:
            return
        lack = [rank for rank, member in enumerate(group.members) if member.pid not in self._pids]
        if lack:
            self._told = True
            where = " only" if len(lack) == group.world_size else f", and not on {ranks_text(lack)}"
            also = "run %%dip, %load_ext autoreload, %autoreload 2 in a cell"
            notify(f"autoreload is on in the notebook{where}; to have it on the ranks, {also}")
