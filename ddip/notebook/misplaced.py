"""``%dip``, and ``%%dip`` below the first line of a cell: IPython takes both for line magics."""

from __future__ import annotations

from IPython.core.magic import Magics, line_magic, magics_class, no_var_expand

from ddip.errors import BadInput
from ddip.notebook import arguments, mistakes
from ddip.notebook.magics import DipMagics


@magics_class
class Misplaced(Magics):
    """Refuses both, with what to type instead."""

    @no_var_expand
    @line_magic("%dip")  # type: ignore[arg-type]
    def below(self, line: str = "") -> None:
        """Nothing may stand above %%dip."""
        typed = f"%%dip {line}".rstrip()
        raise BadInput(f"{typed}: it must be the first line of its cell; move what is above it to another cell")

    @no_var_expand
    @line_magic
    def dip(self, line: str = "") -> None:
        typed = f"dip {line}".rstrip()
        if mistakes.is_code(line):
            raise BadInput(f"%{typed}: {arguments.CODE_BELOW}")
        raise BadInput(f"%{typed}: type %%{typed} in the first line of a cell, and the code below it")


Misplaced.dip.__doc__ = DipMagics.dip.__doc__
