"""The magics: a line is parsed, one method of the Group is called, an error is shown."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring
from traitlets import Bool, Enum, Float, Int, List, Unicode, observe

from ddip import apps, placement, registry, warming
from ddip.autodip import Autodip
from ddip.errors import BadInput, CellError, LocalCellFailed, NoGroup
from ddip.hints import Hints
from ddip.look import STYLES, Look

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group import Group

QUIET_SECONDS = 0.5
"""After which a push or a pull shows how far it is."""
PLACES = ("remote", "local", "everywhere")


@magics_class
class DipMagics(Magics):
    """``%makedip``, ``%%dip``, ``%autodip``, ``%dipush``, ``%dipull``, ``%dipstack`` and ``%dipper``."""

    timeout = Float(60, min=1, help="Seconds to wait for a group to form; -t of %makedip sets it.").tag(config=True)
    collect = Bool(True, help="Collect garbage, and empty the GPU cache, on every rank after each cell.").tag(
        config=True
    )
    see = Unicode("0", help="Ranks whose output a cell shows without -S, such as 0 or 0,1 or all.").tag(config=True)
    warm = Bool(True, help="When ddip is loaded, begin to import in the background what every rank needs.").tag(
        config=True
    )
    warm_apps = List(Unicode(), help="Apps whose imports are begun then, too.").tag(config=True)
    spawn = Bool(False, help="Start each engine as a process of its own; otherwise they are forked, on Linux.").tag(
        config=True
    )
    grace = Float(
        1.0,
        min=0,
        help="Seconds that the other ranks get to end a cell by themselves when one has failed; then those that wait "
        "in a collective are released.",
    ).tag(config=True)
    patience = Float(10.0, min=1, help="Seconds without progress after which a cell says which rank waits where.").tag(
        config=True
    )
    style = Enum(
        STYLES,
        Look.style,
        help="How the outputs of several ranks are told apart: tabs, labels, or grouped by rank at the end; auto: tabs "
        "in a notebook, labels in a terminal.",
    ).tag(config=True)
    limit = Int(
        Look.limit, min=1000, help="Characters of text that a rank shows in one cell; of more, the middle is left out."
    ).tag(config=True)
    tell_after = Float(
        Look.tell_after, min=0, help="Seconds after which a cell says where it ran; under %autodip each cell does."
    ).tag(config=True)
    verbose = Bool(False, help="Say what each magic does; -v of %makedip sets it.").tag(config=True)

    shell: InteractiveShell
    group: Group | None = None

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell=shell)
        self._asked = placement.Request()
        self.autodipper = Autodip(shell)
        self.hints = Hints(shell, lambda: self.group, self.autodipper)

    @observe("collect")
    def _collect_changed(self, change: dict[str, Any]) -> None:
        if self.group is not None and self.group.alive:
            self.group.set_collect(change["new"])

    @observe("style", "limit", "tell_after")
    def _look_changed(self, change: dict[str, Any]) -> None:
        if self.group is not None:
            self.group.look = self._look()

    def _look(self) -> Look:
        return Look(self.style, self.limit, self.tell_after)

    def settings(self) -> dict[str, Any]:
        """What the traits say of a new Group."""
        names = ("timeout", "collect", "spawn", "grace", "patience")
        return {**{name: getattr(self, name) for name in names}, "look": self._look()}

    @observe("grace", "patience")
    def _limits_changed(self, change: dict[str, Any]) -> None:
        if self.group is not None:
            setattr(self.group, change["name"], change["new"])

    def _parse(self, magic: Any, name: str, line: str) -> Any:
        try:
            args = parse_argstring(magic, line)
        except UsageError as error:
            raise BadInput(f"{name} {line.strip()}: {error}; %{name.lstrip('%')}? lists the options") from None
        except ValueError as error:  # a quote without an end
            raise BadInput(f"{name} {line.strip()}: {error}") from None
        for key, value in vars(args).items():
            setattr(args, key, [_unquoted(item) for item in value] if isinstance(value, list) else _unquoted(value))
        return args

    def _say(self, text: str) -> None:
        if self.verbose:
            print(f"ddip: {text}")

    def _require_group(self, what: str) -> Group:
        if self.group is None or not self.group.alive:
            raise NoGroup(what)
        return self.group

    # -- %makedip

    @magic_arguments()
    @argument("-n", dest="n", metavar="N", help="Number of ranks on the CPU.")
    @argument(
        "-g",
        "--gpus",
        nargs="+",
        metavar="GPU",
        help="One rank on each of these GPUs, in this order: all, or 0,2,3, or 3 1; a GPU may come twice.",
    )
    @argument("-b", "--backend", help="Backend of torch.distributed; default gloo, or cpu:gloo,cuda:nccl on GPUs.")
    @argument("-a", "--app", help="Framework to prepare on every rank, such as fastai.")
    @argument("-r", "--restart", action="store_true", help="End every rank first, and start afresh.")
    @argument("-k", "--kill", action="store_true", help="End every rank, the controller and all their files.")
    @argument("-i", "--info", action="store_true", help="Who is in the group: rank, host, pid, device, memory, state.")
    @argument(
        "--repair",
        action="store_true",
        help="Put new processes in place of ranks that ended or cannot be stopped; the others keep their variables.",
    )
    @argument(
        "--from",
        dest="source",
        nargs="+",
        metavar=("RANK", "NAME"),
        help="With --repair: copy these variables from this rank to the new ones.",
    )
    @argument("-t", "--timeout", metavar="SECONDS", help="How long to wait for the engines.")
    @argument(
        "-v", "--verbose", nargs="?", const="True", metavar="True|False", help="Say what each magic does, from now on."
    )
    @line_magic
    def makedip(self, line: str = "") -> None:
        """Start, change, show, restart or end the group of ranks.

        With neither -n nor -g a new group has one rank on each GPU, or two ranks on the CPU. A group that is there
        changes: the ranks that can stay keep their variables, and all the rest stays as it is.
        """
        args = self._parse(self.makedip, "%makedip", line)
        if args.verbose is not None:
            self.verbose = _flag(args.verbose)
        if args.timeout is not None:
            self.timeout = _seconds(args.timeout, "-t", 1)
        if args.repair or args.source:
            self._repair(args, line)
            return
        if args.kill and (args.restart or args.n or args.gpus or args.backend or args.app):
            raise BadInput(f"%makedip {line.strip()}: -k ends the group; to start one afresh type -r instead")
        if args.kill:
            self.end_group()
            return
        form = args.n or args.gpus or args.backend or args.app or args.restart
        only_settings = (args.verbose is not None or args.timeout is not None) and not form
        if form or not (args.info or only_settings):
            self._make(args)
        if args.info:
            self._info()

    def _make(self, args: Any) -> None:
        from ddip.devices import gpu_names
        from ddip.group import Group
        from ddip.progress import Progress

        request = placement.Request(
            None if args.n is None else placement.parse_count(args.n),
            None if args.gpus is None else tuple(placement.parse_gpus(args.gpus, len(gpu_names()))),
            args.backend,
            args.app,
        )
        if args.restart and self.group is None:  # the last one, which may not have started
            request = request.after(self._asked)
        self._asked = request
        progress = Progress()
        new = True
        try:
            if self.group is None or not self.group.alive:
                self.group = Group(
                    request.n,
                    request.gpus,
                    backend=request.backend,
                    app=request.app,
                    progress=progress,
                    **self.settings(),
                )
            else:
                self.group.timeout, self.group.collect, self.group.progress = self.timeout, self.collect, progress
                self.group.spawn = self.spawn
                if args.restart:
                    self.group.restart(request)
                else:
                    new = self.group.change(request)
        except BaseException:
            progress.end("")
            if self.group is not None and not self.group.alive:
                self.end_group()
            raise
        self._asked = self.group.request
        progress.end(f"{self.group.describe()}, {f'{self.group.seconds:.1f} s' if new else 'as it was'}")
        if self.group.wish.notice:
            print(f"ddip: {self.group.wish.notice}")
        if self.group.cluster.spawned:
            self._say(f"the ranks were spawned, not forked: {self.group.cluster.spawned}")

    def _repair(self, args: Any, line: str) -> None:
        from ddip.errors import ranks_text
        from ddip.progress import Progress

        if not args.repair or args.kill or args.restart or args.n or args.gpus or args.backend or args.app:
            raise BadInput(f"%makedip {line.strip()}: type %makedip --repair, or %makedip --repair --from 0 model opt")
        group = self._require_group("%makedip --repair")
        source, names = placement.parse_source(args.source, group.world_size)
        group.timeout = self.timeout
        progress = group.progress = Progress()
        try:
            replaced = group.repair(names, source)
        except BaseException:
            progress.end("")
            raise
        if not replaced:
            progress.end("ddip: every rank is there, there is nothing to repair")
        else:
            copied = f", with {', '.join(names)} from rank {source}" if names else ""
            progress.end(f"ddip: {ranks_text(replaced)} replaced{copied}, {group.seconds:.1f} s")
        if args.info:
            self._info()

    def _info(self) -> None:
        from ddip.tables import info_table

        group = self._require_group("%makedip -i")
        print(info_table(group.info()))
        print(f"automatic %%dip: {self.autodipper.state}")

    def end_group(self) -> None:
        """End the group, and what a dead session of a notebook left behind; %autodip goes off with it."""
        from ddip.owner import clear_up_orphans

        group, self.group = self.group, None
        self.autodipper.off()
        if group is not None:
            group.shutdown()
        if clear_up_orphans():
            self._say("a cluster of a dead session was cleared up")

    # -- cells

    @magic_arguments()
    @argument(
        "where",
        nargs="?",
        default="remote",
        help="remote: on the ranks (default); local: here; everywhere: here, then on the ranks.",
    )
    @argument("-r", "--ranks", nargs="+", metavar="RANK", help="Run on these ranks only: 0,2 or 1-3.")
    @argument("-S", "--see", nargs="+", metavar="RANK", help="Show the output of these ranks, or all; default 0.")
    @argument("-q", "--quiet", action="store_true", help="Show the output when the cell has ended, not live.")
    @argument(
        "--timeout",
        metavar="SECONDS",
        help="End the cell when it has taken that long: it fails, and all variables are kept.",
    )
    @argument("-a", "--appcmd", metavar="COMMAND", help="Give the app this command before the cell runs.")
    @cell_magic
    def dip(self, line: str, cell: str) -> None:
        """Run the cell on every rank; fails if it fails on any."""
        args = self._parse(self.dip, "%%dip", line)
        if args.where not in PLACES:
            raise BadInput(f"%%dip {args.where}: type %%dip, %%dip local or %%dip everywhere")
        timeout = None if args.timeout is None else _seconds(args.timeout, "--timeout", 0.1)
        if args.where != "local":
            group = self._require_group("%%dip")
            size = group.world_size
            ranks = list(range(size)) if args.ranks is None else placement.parse_ranks(args.ranks, size, "-r")
            see = self._seen(args.see, ranks, size)
        if args.where != "remote":
            self._run_here(cell)
        if args.where != "local":
            self._say(f"running on {len(ranks)} of {size} ranks")
            if args.appcmd is not None:
                answer = group.command(args.appcmd)
                if answer:
                    print(answer)
            tell = self.autodipper.state != "off"
            try:
                group.run(cell, ranks, see=see, quiet=args.quiet, timeout=timeout, tell=tell)
            except CellError as error:
                self.hints.explain(error)
                raise

    def _seen(self, typed: list[str] | None, ranks: list[int], size: int) -> list[int]:
        """The ranks to show: those of -S, else those of the trait that run the cell, else the first that does."""
        if typed is not None:
            return placement.parse_ranks(typed, size, "-S")
        usual = [rank for rank in placement.parse_ranks([self.see], size, "DipMagics.see") if rank in ranks]
        return usual or ranks[:1]

    def _run_here(self, cell: str) -> None:
        if not self.shell.run_cell(cell).success:
            raise LocalCellFailed("the cell failed here, in the notebook")

    @magic_arguments()
    @argument("switch", nargs="?", metavar="on|off", help="Without it: say which.")
    @argument("-a", "--args", metavar="ARGUMENTS", help='Arguments for each %%%%dip, in quotes: -a "-S all".')
    @line_magic
    def autodip(self, line: str = "") -> None:
        """Run every cell that does not begin with % as a %%dip cell, from here on."""
        args = self._parse(self.autodip, "%autodip", line)
        if args.switch not in (None, "on", "off"):
            raise BadInput(f"%autodip {args.switch}: type %autodip on or %autodip off")
        if args.switch == "on":
            self._require_group("%autodip on")
            self._parse(self.dip, "%%dip", args.args or "")
            self.autodipper.on(args.args or "")
        elif args.args is not None:
            raise BadInput(f"%autodip {line.strip()}: -a goes with on")
        elif args.switch == "off":
            self.autodipper.off()
        print(f"automatic %%dip: {self.autodipper.state}")

    # -- objects

    @magic_arguments()
    @argument("-r", "--ranks", nargs="+", metavar="RANK", help="Push to these ranks only.")
    @argument("names", nargs="*", help="Variables of the notebook.")
    @line_magic
    def dipush(self, line: str = "") -> None:
        """Copy variables of the notebook to every rank: all arrive, or none does."""
        from ddip.transfer import check_names

        args = self._parse(self.dipush, "%dipush", line)
        group = self._require_group("%dipush")
        names, ranks = _names_and_ranks(args.names, args.ranks, group.world_size, "%dipush")
        check_names(names, "%dipush")
        missing = [name for name in names if name not in self.shell.user_ns]
        if missing:
            raise BadInput(f"%dipush: the notebook has no {', '.join(missing)}; nothing was pushed")
        values = {name: self.shell.user_ns[name] for name in names}
        with _progress(group, f"pushed {', '.join(names)}"):
            moved = group.push(values, ranks)
        _tell_moved(moved)
        self._say(f"pushed {', '.join(names)}")

    @magic_arguments()
    @argument(
        "-r",
        "--rank",
        dest="ranks",
        nargs="+",
        metavar="RANK",
        help="Pull from this rank, default 0; all: a list, one item a rank.",
    )
    @argument("names", nargs="*", help="Variables of the rank.")
    @line_magic
    def dipull(self, line: str = "") -> None:
        """Copy variables of a rank to the notebook: all arrive, or none does; tensors arrive on the CPU."""
        from ddip.transfer import check_names

        args = self._parse(self.dipull, "%dipull", line)
        group = self._require_group("%dipull")
        names, ranks = _names_and_ranks(args.names, args.ranks or ["0"], group.world_size, "%dipull")
        check_names(names, "%dipull")
        assert ranks is not None
        with _progress(group, f"pulled {', '.join(names)}"):
            values, moved = group.pull_all(names, ranks)
        as_list = args.ranks is not None and (len(ranks) > 1 or "all" in args.ranks)
        self.shell.push({name: [value[name] for value in values] if as_list else values[0][name] for name in names})
        _tell_moved(moved)
        self._say(f"pulled {', '.join(names)}")

    @magic_arguments()
    @argument("-v", "--verbose", action="store_true", help="Whole stacks of all threads.")
    @line_magic
    def dipstack(self, line: str = "") -> None:
        """Where each rank is right now: its innermost function, and the line of its cell."""
        from ddip.tables import places_text, stacks_text

        args = self._parse(self.dipstack, "%dipstack", line)
        group = self._require_group("%dipstack")
        stacks = group.stacks()
        places = {rank: None if stack is None else stack.place for rank, stack in stacks.items()}
        print(stacks_text(stacks) if args.verbose else places_text(places))

    @no_var_expand
    @line_magic
    def dipper(self, line: str = "") -> None:
        """Put the Group behind the magics into a variable: %dipper g."""
        name = line.strip()
        if not name.isidentifier():
            raise BadInput(f"%dipper {name}: type the name of a variable, such as %dipper g")
        self.shell.push({name: self._require_group("%dipper")})


@contextlib.contextmanager
def _progress(group: Group, done: str) -> Iterator[None]:
    """Show how far objects are on their way, if that takes long."""
    from ddip.progress import Progress

    began = time.monotonic()
    group.progress = progress = Progress(after=QUIET_SECONDS)
    try:
        yield
    except BaseException:
        progress.end("")
        raise
    if progress.shown:
        progress.end(f"ddip: {done}, {time.monotonic() - began:.1f} s")


def _unquoted(value: Any) -> Any:
    """IPython leaves the quotes around an argument where they are."""
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


def _flag(typed: str) -> bool:
    if typed.lower() not in ("true", "false"):
        raise BadInput(f"-v {typed}: type -v, -v True or -v False")
    return typed.lower() == "true"


def _seconds(typed: str, option: str, least: float) -> float:
    try:
        seconds = float(typed)
    except ValueError:
        seconds = -1
    if not least <= seconds < float("inf"):
        raise BadInput(f"{option} {typed}: type a number of seconds, {least:g} or more, such as {option} 120")
    return seconds


def _names_and_ranks(
    names: list[str], typed: list[str] | None, size: int, magic: str
) -> tuple[list[str], list[int] | None]:
    """Names and ranks; ``-r 1 model`` takes the words after the first rank for names, as a person means them."""
    words = list(typed or [])
    split = next((i for i, word in enumerate(words) if word.isidentifier() and word != "all"), len(words))
    names = [*names, *words[split:]]
    if not names:
        raise BadInput(f"{magic}: type the names of variables, such as {magic} model losses")
    return names, placement.parse_ranks(words[:split], size, "-r") if typed else None


def _tell_moved(moved: list[str]) -> None:
    if moved:
        print(f"ddip: tensors of an accelerator arrived on the CPU: {', '.join(moved)}")


def load(shell: InteractiveShell) -> None:
    """Register the magics, and begin to warm up."""
    magics = DipMagics(shell)
    modules = [apps.find(name) for name in magics.warm_apps]
    shell.register_magics(magics)
    if magics.warm and not magics.spawn and warming.possible():
        warming.begin(modules)


def unload(shell: InteractiveShell) -> None:
    """End the group and take the magics out."""
    magics = registry.remove(shell, DipMagics.__name__)
    if magics is not None:
        magics.end_group()
        magics.autodipper.close()
        magics.hints.close()
        warming.end()
