"""``%dipcheck`` compares the training state of all ranks; ``%dipsync`` copies it from one rank to the others."""

from __future__ import annotations

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.notebook import arguments
from ddip.notebook.arguments import with_examples
from ddip.notebook.base_magics import GroupMagics

SHOWN_PATHS = 6


@magics_class
class TrainingMagics(GroupMagics):
    """The magics that compare and copy the state of a training; they use the group of the main magics."""

    @with_examples("%dipcheck", "%dipcheck model opt")
    @magic_arguments()
    @argument("names", nargs="*", help="Variables of the ranks; default: all.")
    @line_magic
    def dipcheck(self, line: str = "") -> None:
        """Compare the variables of all ranks, and look for common mistakes in a distributed training.

        Shows a table of the objects that differ, and what to do; one line if there are none.
        """
        from IPython.display import display

        args = arguments.parse_line(self.dipcheck, "%dipcheck", line)
        table = self._main.require_group("%dipcheck").check(arguments.variable_names(args.names, "%dipcheck"))
        if not table.rows:
            print(f"ddip: {table.summary}")
        else:
            display({"text/plain": str(table), "text/html": table.to_html()}, raw=True)

    @with_examples("%dipsync                      objects that differ after a fault", "%dipsync model opt --from 1")
    @magic_arguments()
    @argument("names", nargs="*", help="Variables of the ranks; default: all that differ after a fault.")
    @argument("--from", dest="source", metavar="RANK", default="0", help="Rank to copy from; default 0.")
    @line_magic
    def dipsync(self, line: str = "") -> None:
        """Copy the state of one rank into the objects of the others, in place, and clear the gradients.

        Tensors, wrappers and optimizers stay the same objects. Sharded objects are refused: each rank has its own part.
        """
        args = arguments.parse_line(self.dipsync, "%dipsync", line)
        group = self._main.require_group("%dipsync")
        names = arguments.variable_names(args.names, "%dipsync")
        source = arguments.parse_rank(args.source, group.world_size, "--from")
        copied = group.sync(names, source)
        if not copied:
            self._main.confirm_done("no differences to copy")
            return
        more = f" and {len(copied) - SHOWN_PATHS} more" if len(copied) > SHOWN_PATHS else ""
        self._main.confirm_done(f"copied from rank {source}: {', '.join(copied[:SHOWN_PATHS])}{more}")
