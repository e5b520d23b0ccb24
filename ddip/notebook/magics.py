"""The main magics, each of which parses its line and calls methods of the Group.

IPython treats ``%dip``, and ``%%dip`` below the first line of a cell, as line magics: they say what to type instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments

from ddip.cluster import folder
from ddip.errors import BadInput, CellError, LocalCellFailed, NoGroup, RequestInterrupted, ranks_text
from ddip.group.members import placement
from ddip.notebook import arguments, both_sides
from ddip.notebook.arguments import with_examples
from ddip.notebook.autodip import AUTODIP_OFF, Autodip
from ddip.notebook.hints import Hints
from ddip.notebook.once_per_rank import OncePerRank
from ddip.notebook.traits import Traits

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from ddip.group.group import Group


@magics_class
class DipMagics(Traits):
    """``%makedip``, ``%%dip`` and ``%autodip``; holds the settings and the group for the other magics."""

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell=shell)
        self._last_request = placement.Request()
        self.kept: Any = None
        """The `KeptGroups` of this notebook; set when the extension is loaded, and None in a keeper."""
        self._has_turned_autodip_off = False
        """True if the last group had %autodip on when -k ended it."""
        self.autodipper = Autodip(shell, lambda: self.local_magics)
        self.hints = Hints(shell, lambda: self.running_group, self.autodipper)
        self._once_per_rank = OncePerRank()

    def _print_verbose(self, text: str) -> None:
        if self.verbose:
            print(f"ddip: {text}")

    def confirm_done(self, text: str) -> None:
        """Print one line about a finished operation, unless the setting `confirm` is off."""
        if self.confirm:
            print(f"ddip: {text}")

    def require_group(self, what: str) -> Group:
        """Return the running group; raise NoGroup, which names the command `what`, if there is none.

        Of a kept group, this is its stand-in ``KeptObjects``.
        """
        if self.kept is not None and self.kept.objects is not None:
            return self.kept.objects  # type: ignore[no-any-return]
        if (group := self.running_group) is None:
            raise NoGroup(what)
        return group

    # -- %makedip

    @with_examples(
        "%makedip -n 4          start four ranks on the CPU",
        "%makedip -g all        start one rank per GPU",
        "%makedip -i            list the ranks",
        "%makedip --repair      replace ranks that have ended",
        "%makedip -k            end all ranks",
    )
    @magic_arguments()
    @argument("-n", dest="n", metavar="N", help="Number of ranks on the CPU.")
    @argument(
        "-g",
        "--gpus",
        nargs="+",
        metavar="GPU",
        help="Start one rank per GPU, in this order: all, 0,2,3 or 3 1. A GPU may be listed twice.",
    )
    @argument("-b", "--backend", help="Backend of torch.distributed; default gloo, or cpu:gloo,cuda:nccl on GPUs.")
    @argument("-a", "--app", help="Framework to prepare on every rank, such as fastai.")
    @argument(
        "--hosts",
        metavar="HOSTS",
        help="Hosts to reach over ssh: h1:4,h2:4 starts four ranks on each. -n and -g apply to each host.",
    )
    @argument("--slurm", metavar="JOB", help='Submit a Slurm job, and run on its nodes: "nodes=2 gpus=4 time=2:00:00".')
    @argument("--dry-run", action="store_true", help="With --slurm: show the job script without submitting it.")
    @argument("--here", action="store_true", help="Run on the hosts of the notebook's allocation.")
    @argument("--engines", metavar="LAUNCHER", help="Run on hosts where this ipyparallel launcher starts engines.")
    @argument("--profile", help="With --engines: IPython profile that configures the launcher.")
    @argument(
        "-c", "--cluster", help="Run on the hosts of a running ipyparallel cluster, given by ID, profile or file."
    )
    @argument(
        "--keep",
        nargs="?",
        const="30m",
        metavar="TIME",
        help="Keep the new group when this kernel restarts or ends, for 90s, 30m (default) or 2h.",
    )
    @argument(
        "--attach", nargs="?", const="", metavar="NAME", help="Attach this notebook to a group that --keep keeps."
    )
    @argument("--cd", metavar="FOLDER", help="Working folder of ranks on other hosts; default: the notebook's.")
    @argument("--python", help="Python to run on other hosts; default: the notebook's, else python3.")
    @argument("--setup", metavar="LINE", help="Line of bash to run first on other hosts, in quotes.")
    @argument("-r", "--restart", action="store_true", help="End all ranks, then start the group again.")
    @argument("-k", "--kill", action="store_true", help="End all ranks and the controller, and remove their files.")
    @argument("-i", "--info", action="store_true", help="List the ranks: number, host, PID, device, memory, state.")
    @argument(
        "--repair",
        action="store_true",
        help="Replace ranks that have ended or cannot be stopped; the others keep their variables.",
    )
    @argument(
        "--from",
        dest="source",
        nargs="+",
        metavar=("RANK", "NAME"),
        help="With --repair: copy these variables from RANK to the new ranks.",
    )
    @argument("--yes", action="store_true", help=f"Allow more than {arguments.RANKS_PER_CORE} ranks per core.")
    @argument("-t", "--timeout", metavar="SECONDS", help="Time to wait for the engines.")
    @argument(
        "-v",
        "--verbose",
        nargs="?",
        const="True",
        metavar="True|False",
        help="Print what each magic does, from now on.",
    )
    @line_magic
    def makedip(self, line: str = "") -> None:
        """Start, change, show, restart or end the group of ranks.

        Without -n and -g, a new group has one rank on each GPU, or two ranks on the CPU. An existing group is changed:
        ranks that can stay keep their variables, and settings that you do not give stay as they are.
        """
        args = arguments.parse_line(self.makedip, "%makedip", line)
        if self.kept is not None and (args.keep is not None or args.attach is not None):
            self._start_or_attach(args, line)
            return
        is_first = self.group is None
        sets = self._apply_settings(args)
        if args.dry_run:
            print(arguments.job_script(args))
        elif args.repair or args.source:
            self._repair_group(args, line)
        elif args.kill:
            if arguments.asks_for_a_group(args):
                raise BadInput(f"%makedip {line.strip()}: -k ends the group; to restart it type -r instead")
            if args.info:
                raise BadInput(f"%makedip {line.strip()}: -k ends the group, so there is nothing to show; leave out -i")
            ended = 0 if (group := self.running_group) is None else group.world_size
            was_on = self.autodipper.state != "off"
            self.end_group()
            what = f"ended {ended} rank{'s' * (ended != 1)}" if ended else "there was no group"
            self.confirm_done(f"{what}; {AUTODIP_OFF}" if was_on else what)
            self._has_turned_autodip_off = was_on
            return
        elif arguments.asks_for_a_group(args) or not (args.info or sets):
            self._start_or_change(args)
            if is_first:
                self._report_kept()
        if args.info:
            self._print_info()

    def _start_or_attach(self, args: Any, line: str) -> None:
        """Start a kept group, or attach to one; this notebook must not have a group."""
        if self.running_group is not None:
            raise BadInput(f"%makedip {line.strip()}: this notebook has a group already; end it with %makedip -k first")
        if args.kill or args.info or args.repair or args.source or args.dry_run:
            raise BadInput(f"%makedip {line.strip()}: leave out -k, -i, --repair and --dry-run beside --keep")
        if args.attach is None:
            self.kept.start(line, arguments.parse_seconds(args.keep, "--keep", 0.1))
        elif args.keep is not None or arguments.asks_for_a_group(args):
            raise BadInput(f"%makedip {line.strip()}: --attach takes the group as it is; type it alone")
        else:
            self.kept.attach(args.attach)

    def _report_kept(self) -> None:
        """Name the groups of former kernels that still run, and may hold GPUs."""
        for name in self.kept.list_free() if self.kept is not None else ():
            print(f"ddip: the kept group {name} still runs, without a kernel: %makedip --attach {name} takes it over")

    def _apply_settings(self, args: Any) -> bool:
        """Apply the settings in `args`, and return True if there were any."""
        if args.verbose is not None:
            self.verbose = arguments.parse_flag(args.verbose)
        if args.timeout is not None:
            self.timeout = arguments.parse_seconds(args.timeout, "-t", 1)
        return args.verbose is not None or args.timeout is not None

    def _start_or_change(self, args: Any) -> None:
        try:
            with folder.left_out():
                from ddip.group.group import Group
                from ddip.output.progress import Progress

            request = arguments.parse_request(args)
        except KeyboardInterrupt:
            raise RequestInterrupted("%makedip was interrupted before it began; nothing has changed") from None
        if args.restart:  # also repeats a request that has failed
            request = request.after(self._last_request if self.group is None else self.group.request)
        self._last_request = request
        progress = Progress()
        new = True
        none_runs = self._has_only_ended_ranks()
        try:
            if self.group is None or not self.group.alive:
                self.group = Group(**vars(request), progress=progress, **self.settings())
            else:
                self.group.options.timeout, self.group.options.collect = self.timeout, self.collect
                self.group.options.spawn = self.spawn
                if args.restart or none_runs:
                    self.group.restart(request, progress)
                else:
                    new = self.group.change(request, progress)
        except BaseException:
            progress.end("")
            if self.group is not None and not self.group.alive:
                self.end_group()
            raise
        self._last_request = self.group.request
        seconds = f"{self.group.seconds:.1f} s" if new else "unchanged"
        progress.end(f"{self.group.describe()}, {seconds}")
        if none_runs:
            print("ddip: all former ranks had ended, so the new ones have none of their variables")
        for notice in self.group.notices:
            print(f"ddip: {notice}")
        if self._has_turned_autodip_off and self.autodipper.state == "off":
            print(f"ddip: {AUTODIP_OFF}; %autodip on runs them on the ranks")
        self._has_turned_autodip_off = False
        if self.group.cluster.spawned:
            self._print_verbose(f"the ranks were spawned, not forked: {self.group.cluster.spawned}")

    def _has_only_ended_ranks(self) -> bool:
        """Return whether every rank of the group has ended on this machine, so that nothing is left to lose."""
        group = self.running_group
        return group is not None and not group.request.hosts and not group.ranks.live

    def _repair_group(self, args: Any, line: str) -> None:
        from ddip.output.progress import Progress

        hosts = placement.parse_hosts(args.hosts) if args.hosts else ()
        args.hosts = None
        if not args.repair or args.kill or arguments.asks_for_a_group(args):
            raise BadInput(f"%makedip {line.strip()}: type %makedip --repair, or %makedip --repair --from 0 model opt")
        group = self.require_group("%makedip --repair")
        source, names = arguments.parse_source(args.source, group.world_size)
        group.options.timeout = self.timeout
        progress = Progress()
        try:
            replaced = group.repair(names, source, progress, hosts)
        except BaseException:
            progress.end("")
            raise
        finally:
            self._last_request = group.request
        if not replaced:
            progress.end("ddip: all ranks are running; nothing to repair")
        else:
            copied = f", with {', '.join(names)} from rank {source}" if names else ""
            progress.end(f"ddip: {ranks_text(replaced)} replaced{copied}, {group.seconds:.1f} s")

    def _print_info(self) -> None:
        from ddip.output.tables.tables import info_table

        group = self.require_group("%makedip -i")
        print("\n".join([info_table(group.info()), *group.remarks()]))
        print(f"%autodip: {self.autodipper.state}")

    def end_group(self) -> None:
        """End the group, turn %autodip off, and remove clusters that a dead notebook session left behind."""
        from ddip.cluster.processes.ownership import clear_up_orphans

        group, self.group = self.group, None
        self.autodipper.off()
        if group is not None:
            group.shutdown()
        if clear_up_orphans():
            self._print_verbose("a cluster of a dead session was cleared up")

    # -- cells

    @with_examples(
        "%%dip                  run on every rank, show rank 0's output",
        "%%dip -S all           show all ranks' output, in tabs",
        "%%dip -r 0,2           run on these ranks only",
        "%%dip --bg             run in the background, beside other cells",
        "%%dip --profile        show where the ranks' time goes",
        "%%dip local            run in the notebook, under %autodip",
    )
    @magic_arguments()
    @argument(
        "where",
        nargs="?",
        default="remote",
        metavar="|".join(arguments.PLACES),
        help="remote: on the ranks (default); local: in the notebook; everywhere: in the notebook, then on the ranks.",
    )
    @argument("-r", "--ranks", nargs="+", metavar="RANK", help="Run on these ranks only: 0,2 or 1-3.")
    @argument("-S", "--see", nargs="+", metavar="RANK", help="Show the output of these ranks, or all; default 0.")
    @argument("-q", "--quiet", action="store_true", help="Show the output only when the cell has ended.")
    @argument(
        "--timeout",
        metavar="SECONDS",
        help="Stop the cell after this time: it fails, and the ranks keep all variables.",
    )
    @argument(
        "--unmatched",
        action="store_true",
        help="Allow ranks to begin different numbers of collectives, as with -r: a later cell begins the rest. Also "
        "allows collectives that do not match; ddip no longer compares those of their group. Without it, ddip reports "
        "these ranks and rebuilds the group before the next cell.",
    )
    @argument(
        "--bg", action="store_true", help="Run in the background, and return at once; %%dipwait waits for the cell."
    )
    @argument("--queue", action="store_true", help="If other cells run on these ranks, wait until they have ended.")
    @argument(
        "--log", metavar="PATH", help="Write each rank's text to PATH.0.log, PATH.1.log and so on, as it arrives."
    )
    @argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="Profile the ranks: show where their time went, and write traces to this folder.",
    )
    @argument(
        "--break-on",
        dest="break_on",
        nargs="+",
        metavar="RANK",
        help="Let breakpoint() stop on these ranks only: 0,2 or 1-3; the others run through.",
    )
    @argument("-a", "--appcmd", metavar="COMMAND", help="Send this command to the app before the cell runs.")
    @argument(
        "--param", action="store_true", help="%%dipexport makes the cell's assignments options of the exported script."
    )
    @cell_magic
    def dip(self, line: str, cell: str) -> None:
        """Run the cell on every rank; fails if it fails on any."""
        args = self.parse_dip(line)
        if not cell.strip() and args.appcmd is None:
            raise BadInput(f"%%dip {line.strip()}".rstrip() + ": the cell is empty; type the code below this line")
        if args.where != "local":
            group, ranks = self.require_group("%%dip"), args.ranks
            self.hints.autoreload.record_cell(cell, group, ranks)
        both = args.where == "everywhere" and bool(both_sides.magic_names(cell))
        if both:
            self.refuse_names_of_ranks(cell)
        if args.where != "remote":
            local_output = self.run_here(cell, both)
        if args.where != "local":
            self._print_verbose(f"running on {len(ranks)} of {group.world_size} ranks")
            if args.queue and not args.bg and (args.appcmd is None or group.request.app is not None):
                group.wait_until_free(ranks if args.appcmd is None else None)  # a command of the app runs on all ranks
            if args.appcmd is not None:
                answer = group.command(args.appcmd)
                if answer:
                    print(answer)
            if cell.strip() == "%debug":
                group.debug(ranks[0] if len(ranks) == 1 else None)
                return
            options = {"show_ranks": args.see, "quiet": args.quiet, "timeout": args.timeout}
            options |= {"unmatched": args.unmatched}
            options |= {"log": args.log or "", "profile": args.profile, "break_on": args.break_on}
            if args.bg:
                group.start(cell, ranks, queue=args.queue, **options)
                return
            tell = self.autodipper.state != "off"
            try:
                if both:
                    rank_cell = both_sides.for_ranks(cell)
                    group.run_there_too(rank_cell, ranks, local_output, timeout=args.timeout, tell=tell)
                else:
                    group.run(cell, ranks, tell=tell, **options)
                    if tell and len(ranks) > 1:
                        self._once_per_rank.after_cell(cell)
            except CellError as error:
                self.hints.explain(error)
                raise

    def parse_dip(self, line: str) -> Any:
        """Return the arguments of ``%%dip``, with ranks and seconds as numbers; raises BadInput or NoGroup."""
        args = arguments.parse_line(self.dip, "%%dip", line)
        if args.where not in arguments.PLACES:
            raise BadInput(f"%%dip {args.where}: type %%dip, %%dip local or %%dip everywhere")
        if args.bg and args.where != "remote":
            raise BadInput(f"%%dip {args.where} --bg: only ranks run cells in the background; type %%dip --bg")
        if args.profile in arguments.PLACES or (args.profile is not None and args.where != "remote"):
            ways = "type %%dip --profile, or a folder after it, such as ./traces"
            raise BadInput(f"%%dip {line.strip()}: only cells that run on the ranks alone are profiled; {ways}")
        if args.where == "local":
            arguments.refuse_rank_options(self.dip.parser, args)
            return args
        if args.timeout is not None:
            args.timeout = arguments.parse_seconds(args.timeout, "--timeout", 0.1)
        size = self.require_group("%%dip").world_size
        args.ranks = list(range(size)) if args.ranks is None else arguments.parse_ranks(args.ranks, size, "-r")
        if args.break_on is not None:
            args.break_on = arguments.parse_ranks(args.break_on, size, "--break-on")
        args.see = arguments.ranks_to_show(args.see, args.ranks, size, self.show_ranks)
        return args

    def refuse_names_of_ranks(self, line: str) -> None:
        """Raise BadInput if a magic's line has ``$name`` or ``{name}`` for a variable of the ranks."""
        for name in both_sides.names_to_expand(line, self.shell.user_ns):
            if self.running_group is not None and self.running_group.has_name(name):
                raise BadInput(
                    f"{line.strip()}: the notebook has no variable {name}, which is one of the ranks; "
                    f"type %dipull {name} first"
                )

    def run_here(self, cell: str, both: bool) -> tuple[str, str]:
        """Run the cell in the notebook; raises LocalCellFailed.

        Returns the output of a cell for `both` sides, which ranks do not repeat.
        """
        if both:
            execution, output = both_sides.run_here(self.shell, cell)
        else:
            execution, output = self.shell.run_cell(cell), ("", "")
        if not execution.success:
            error = execution.error_in_exec or execution.error_before_exec
            raise LocalCellFailed("the cell failed in the notebook") from error
        return output

    @with_examples("%autodip on", '%autodip on -a "-S all"', "%autodip off")
    @magic_arguments()
    @argument("switch", nargs="?", metavar="on|off", help="Turn it on or off; default: show the state.")
    @argument("-a", "--args", metavar="ARGUMENTS", help='Arguments for each %%%%dip, in quotes: -a "-S all".')
    @line_magic
    def autodip(self, line: str = "") -> None:
        """Run every later cell as a %%dip cell, except cells that begin with a magic for the notebook.

        DipMagics.local_magics lists these magics. Cells that consist of %cd, %env, %load_ext autoreload, %autoreload
        and the like run in the notebook and on the ranks. Shell commands (!ls) and files that other cells
        write take effect once per rank; %%dip local runs a cell once, in the notebook.
        """
        args = arguments.parse_line(self.autodip, "%autodip", line)
        if args.switch not in (None, "on", "off"):
            raise BadInput(f"%autodip {args.switch}: type %autodip on or %autodip off")
        if args.switch == "on":
            self.require_group("%autodip on")
            if self.parse_dip(args.args or "").where == "local":
                raise BadInput(f"%autodip {line.strip()}: type %autodip off; cells then run in the notebook")
            typed = arguments.parse_line(self.dip, "%%dip", args.args or "")
            ranks = "" if typed.ranks is None else f"-r {','.join(typed.ranks)} "
            self.autodipper.on(args.args or "", ranks + ("" if typed.timeout is None else f"--timeout {typed.timeout}"))
        elif args.args is not None:
            raise BadInput(f'%autodip {line.strip()}: -a needs on, as in %autodip on -a "-S all"')
        elif args.switch == "off":
            self.autodipper.off()
        print(f"%autodip: {self.autodipper.state}")


@magics_class
class Misplaced(Magics):
    """Misplaced ``%%dip`` and ``%dip``, which raise an error that says what to type instead."""

    @no_var_expand
    @line_magic("%dip")  # type: ignore[arg-type]
    def below(self, line: str = "") -> None:
        """Raise an error, because %%dip must be the first line of its cell."""
        typed = f"%%dip {line}".rstrip()
        raise BadInput(f"{typed}: it must be the first line of its cell; move what is above it to another cell")

    @no_var_expand
    @line_magic
    def dip(self, line: str = "") -> None:
        typed = f"dip {line}".rstrip()
        if arguments.is_code(line):
            raise BadInput(f"%{typed}: {arguments.CODE_BELOW}")
        raise BadInput(f"%{typed}: type %%{typed} in the first line of a cell, and the code below it")


Misplaced.dip.__doc__ = DipMagics.dip.__doc__
