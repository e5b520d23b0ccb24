"""``%dipush`` and ``%dipull`` copy variables to the ranks and back; ``%dipshards`` shows how a model is divided."""

from __future__ import annotations

import contextlib
import dis
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from IPython.core.magic import line_magic, magics_class
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.cluster import folder
from ddip.errors import BadInput, TransferError, ranks_text
from ddip.notebook import arguments
from ddip.notebook.arguments import with_examples
from ddip.notebook.base_magics import GroupMagics

if TYPE_CHECKING:
    from ddip.group.group import Group
    from ddip.output.progress import Progress

QUIET_SECONDS = 0.5
"""Seconds after which a transfer shows a progress bar."""


@magics_class
class ObjectMagics(GroupMagics):
    """The magics for variables; they use the group and settings of the main magics."""

    def _parse_names(
        self, magic: str, typed: list[str], ranks: list[str] | None
    ) -> tuple[Group, list[str], list[int] | None]:
        """Return the group, and the names and ranks that were typed after `magic`; raises BadInput or NoGroup."""
        with folder.left_out():
            from ddip.group.objects.transfer import check_names

        group = self._main.require_group(magic)
        names, chosen = arguments.names_and_ranks(typed, ranks, group.world_size, magic)
        check_names(names, magic)
        return group, names, chosen

    @with_examples("%dipush ratings path", "%dipush model -r 1", "%dipush --modules utils,models")
    @magic_arguments()
    @argument("-r", "--ranks", nargs="+", metavar="RANK", help="Push to these ranks only.")
    @argument(
        "--modules",
        metavar="MODULES",
        help="Push the notebook's own modules, such as utils,models, for ranks on hosts without its folder.",
    )
    @argument("names", nargs="*", help="Variables of the notebook.")
    @line_magic
    def dipush(self, line: str = "") -> None:
        """Copy variables to all ranks, or to those of -r; if one copy fails, no variable changes on any rank.

        Variables that pushed functions read come along if a rank lacks them. Modules of --modules are sent first and
        stay. Large objects cross the network once per host.
        """
        args = arguments.parse_line(self.dipush, "%dipush", line)
        if args.modules is not None:
            self._push_modules(args.modules)
            if not args.names and args.ranks is None:
                return
        group, names, ranks = self._parse_names("%dipush", args.names, args.ranks)
        with folder.left_out():
            from ddip.group.objects.transfer import check_own

        if "as" in names:
            raise BadInput(f"%dipush {line.strip()}: a push cannot rename; type best = model, then %dipush best")
        check_own(names, "%dipush")
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            like = arguments.suggest_names("%dipush", missing, list(self.shell.user_ns))
            raise BadInput(f"%dipush: the notebook has no variable {', '.join(missing)}; nothing was pushed{like}")
        values = {name: self.shell.user_ns[name] for name in names}
        to = range(group.world_size) if ranks is None else ranks
        with self._show_transfer(
            group, lambda size: f"pushed {', '.join(names)}{size} to {ranks_text(to)}"
        ) as progress:
            moved = group.push(values, ranks, progress)
        _print_moved(moved)

    def _push_modules(self, typed: str) -> None:
        group = self._main.require_group("%dipush")
        with self._show_transfer(group) as progress:
            pushed = group.push_modules(typed, reload=self._main.hints.autoreload.is_on, progress=progress)
        if pushed.hosts:
            self._main.confirm_done(str(pushed))
        else:
            print(f"ddip: {pushed}")
        for notice in pushed.notices:
            print(f"ddip: {notice}")

    @with_examples(
        "%dipull model losses",
        "%dipull losses -r all",
        "%dipull --now losses    while the ranks run a cell",
        "%dipull model as best   store it in the notebook as best",
        "best = %dipull model    the same, besides model",
    )
    @magic_arguments()
    @argument(
        "-r",
        "--rank",
        dest="ranks",
        nargs="+",
        metavar="RANK",
        help="Pull from this rank, default 0; all: a list with one item per rank.",
    )
    @argument("--now", action="store_true", help="Copy the current values while the rank runs a cell.")
    @argument(
        "-t",
        "--timeout",
        metavar="SECONDS",
        help="With --now: time to wait for a rank before the pull fails; default 5.",
    )
    @argument("names", nargs="*", help="Variables of the rank; x as y stores x under the name y.")
    @line_magic
    def dipull(self, line: str = "") -> Any:
        """Copy variables of a rank to the notebook: either all of them, or none. Tensors arrive on the CPU.

        In an assignment such as ``best = %dipull model``, it also returns the value, or a tuple of several.

        With --now, the cell that the rank runs pauses between two of its steps while tensors are copied, and then
        continues. Each tensor on the CPU is consistent in itself, but an optimizer step may fall between the copies of
        two tensors. Variables are available as soon as the cell has assigned them; local variables of functions are
        not.
        """
        args = arguments.parse_line(self.dipull, "%dipull", line)
        seconds = arguments.peek_timeout(args, line)
        typed, renames = arguments.split_renames(args.names, "%dipull")
        typed_ranks, after_ranks = arguments.split_renames(args.ranks or ["0"], "%dipull")  # in -r 1 model as best
        renames |= after_ranks
        group, names, ranks = self._parse_names("%dipull", typed, typed_ranks)
        if not renames.keys() <= {*names} or len({renames.get(name, name) for name in names}) < len({*names}):
            what = "type each new name after its variable, and only once, such as x as y"
            raise BadInput(f"%dipull {line.strip()}: {what}")
        assert ranks is not None
        pulled = ", ".join(f"{name} as {renames[name]}" if name in renames else name for name in names)
        with self._show_transfer(group, lambda size: f"pulled {pulled}{size} from {ranks_text(ranks)}") as progress:
            try:
                if seconds is None:
                    values, moved = group.pull_all(names, ranks, progress)
                else:
                    values, moved = group.peek_all(names, ranks, seconds, progress)
            except TransferError as error:
                known = group.variable_names("", ranks[0])
                missing = [name for name in names if known and name not in known]
                error.args = (f"{error}{arguments.suggest_names('%dipull', missing, known)}",)
                raise
        as_list = args.ranks is not None and (len(ranks) > 1 or "all" in args.ranks)
        found = {name: [value[name] for value in values] if as_list else values[0][name] for name in names}
        _print_moved(moved)
        self.shell.push({renames.get(name, name): value for name, value in found.items()})
        if not _is_result_used(sys._getframe()):
            return None
        return tuple(found.values()) if len(found) > 1 else found[names[0]]

    @with_examples("%dipshards model", "%dipshards model.encoder")
    @magic_arguments()
    @argument("name", nargs="?", metavar="MODEL", help="Variable of the ranks, or a part of it, such as model.encoder.")
    @line_magic
    def dipshards(self, line: str = "") -> None:
        """Show how a model is divided among the ranks.

        The table has the placement of each parameter, and the shape and size of the part on each rank. A placement is
        Shard(dim), Replicate(), DDP, or plain (whole on each rank). Ranks whose parts have the same shapes share a
        column.
        """
        from IPython.display import display

        args = arguments.parse_line(self.dipshards, "%dipshards", line)
        group = self._main.require_group("%dipshards")
        if args.name is None or not all(part.isidentifier() or part.isdigit() for part in args.name.split(".")):
            typed = f"%dipshards {args.name}" if args.name else "%dipshards"
            raise BadInput(f"{typed}: type the name of a model on the ranks, such as %dipshards model")
        table = group.shards(args.name)
        display({"text/plain": str(table), "text/html": table.html()}, raw=True)

    @contextlib.contextmanager
    def _show_transfer(self, group: Group, done: Callable[[str], str] | None = None) -> Iterator[Progress]:
        """Show the progress of a long transfer, and at the end the text that `done` returns for the size."""
        from ddip.output.progress import Progress
        from ddip.output.tables.tables import size_text

        began = time.monotonic()
        bar = Progress(after=QUIET_SECONDS)
        try:
            yield bar
        except BaseException:
            bar.end("")
            raise
        if done is None:
            bar.end("")
            return
        text = done(f"{_along_text(group.transferred.along)}: {size_text(group.transferred.size)}")
        if bar.shown:
            bar.end(f"ddip: {text}, {time.monotonic() - began:.1f} s")
        else:
            self._main.confirm_done(text)


def _is_result_used(frame: FrameType | None) -> bool:
    """Return whether the line that called this magic does something with its value, such as an assignment."""
    while frame is not None and frame.f_code.co_name != "run_line_magic":
        frame = frame.f_back
    caller = None if frame is None else frame.f_back
    if caller is None:
        return False
    names = (one.opname for one in dis.get_instructions(caller.f_code) if one.offset > caller.f_lasti)
    following = next(names, "")
    is_timed = following == "RETURN_VALUE" and caller.f_code.co_name == "<module>"  # %time shows the value
    return not is_timed and following not in ("POP_TOP", "PRINT_EXPR", "CALL_INTRINSIC_1")


def _along_text(along: Sequence[str]) -> str:
    return f", with {', '.join(along)}, which functions of it read" if along else ""


def _print_moved(moved: Sequence[str]) -> None:
    """Print the names of tensors that arrived on the CPU instead of an accelerator."""
    if moved:
        print(f"ddip: tensors of an accelerator arrived on the CPU: {', '.join(moved)}")
