"""Parse what was typed after a magic, or refuse it with one line that says what to type instead; examples for help."""

from __future__ import annotations

import difflib
import functools
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser, parse_argstring

from ddip.cluster import folder
from ddip.cluster.hosts import slurm
from ddip.cluster.ipyparallel import launcher_engines
from ddip.cluster.processes import on_host
from ddip.cluster.reach import Reach
from ddip.errors import BadInput, ranks_text
from ddip.group.members import placement

UNKNOWN = "unrecognized arguments: "
"""How argparse begins its list of the words that it could not place."""
VALUE = re.compile(r"argument (\S+): expected (?:one|at least one) argument")
DASHES = re.compile(r"[\u2012-\u2015\u2212]+")
"""Of pages that make one out of two."""
SIZE = re.compile(r"-n\d*|-g.*|--gpus.*")
AS_N = re.compile(r"-np|--?(?:nproc|num|n)[-_](?:per[-_]node|processes|procs|ranks)|--?(?:nproc|ranks|world[-_]size)")
"""How others call the number of ranks: torchrun, accelerate, mpirun."""
ALONE = ("-i", "--info", "-k", "--kill", "--repair")
"""After these no number of ranks is meant."""


def meant(name: str, line: str, parser: MagicArgumentParser, error: str = "") -> str:
    """The line to type instead of `line` after the magic `name`; empty if that cannot be told.

    Without an `error` of the `parser`: is it one that can be parsed, and is not what it looks like?

    >>> parser = MagicArgumentParser(); _ = parser.add_argument("-S", "--see")
    >>> meant("%%dip", "-s all", parser, "unrecognized arguments: -s all")
    '%%dip -S all'
    """
    options = [option for action in parser._actions for option in action.option_strings]
    words, unknown = line.split(), error.partition(UNKNOWN)[2].split()
    better = list(_better(name, words, unknown, options))
    return " ".join([name, *better]) if better != words and _parses(parser, better) else ""


def is_code(line: str) -> bool:
    """Is it a line of Python, and no arguments?

    >>> is_code("print(rank)"), is_code("local"), is_code("-S 0,1")
    (True, False, False)
    """
    return not line.lstrip().startswith("-") and bool(re.search(r"[()=\[\]{}:]", line))


def missing_value(parser: MagicArgumentParser, error: str) -> str:
    """The option that lacks its value, and what may be typed there; empty if `error` says something else."""
    found = VALUE.search(error)
    actions = [action for action in parser._actions if found and "/".join(action.option_strings) == found[1]]
    return f"type a value after {actions[0].option_strings[0]}: {actions[0].help}" if actions else ""


def _parses(parser: MagicArgumentParser, words: list[str]) -> bool:
    try:
        parser.parse_argstring(" ".join(words))
    except (UsageError, ValueError):
        return False
    return True


def _better(name: str, words: list[str], unknown: list[str], options: list[str]) -> Iterator[str]:
    has_size = any(SIZE.fullmatch(word.lower()) for word in words)
    former = ""
    for word in words:
        for better in _of_word(name, word, unknown, options, has_size, former):
            former = better
            yield better


def _of_word(
    name: str, word: str, unknown: list[str], options: list[str], has_size: bool, former: str
) -> Iterator[str]:
    """What to type for `word`, which stands after `former`."""
    dashed = DASHES.sub(lambda found: "-" if len(word) - found.end() == 1 else "--", word, count=1)
    option, equals, value = dashed.partition("=")
    if name == "%%dip" and word in ("-all", "--all"):
        yield "-S all"
    elif name == "%makedip" and AS_N.fullmatch(option):
        yield f"-n {value}".rstrip()
    elif re.fullmatch(r"-[a-z]{2,}", word) and f"-{word}" in options:  # -repair
        yield f"-{word}"
    elif dashed != word and option in options:
        yield dashed
    elif word not in unknown:
        yield word
    elif word.isdecimal() and former in ALONE:
        return
    elif name == "%makedip" and word.isdecimal() and not has_size and (former in options or former[:1] != "-"):
        yield f"-n {word}"
    elif re.fullmatch(r"-[A-Za-z]", word) and word.swapcase() in options:
        yield word.swapcase()
    elif option.startswith("--") and (like := difflib.get_close_matches(option, options, 1, 0.7)):
        yield like[0] + equals + value
    else:
        yield word


F = TypeVar("F", bound=Callable[..., object])


def examples(*lines: str) -> Callable[[F], F]:
    """Put `lines` above the help that ``magic_arguments`` makes: they are what most people look for."""

    def above(magic: F) -> F:
        magic.__doc__ = "\n".join(["Examples::", "", *(f"    {line}" for line in lines), "", magic.__doc__ or ""])
        return magic

    return above


COMMENT = re.compile(r"""(?:^|\s+)#[^"']*$""")
"""At the end of a line; with quotes it may be part of an argument."""
CODE_BELOW = "type %%dip alone in the first line of a cell, and the code below it"
HAVE_NAMES = ("name", "names", "ranks", "source")
"""Arguments that have names of variables in them."""
RANKS_A_CORE = 8
"""More than that are asked back for."""
MOST_GPUS = 64
"""That a host may have."""


def parse(magic: Any, name: str, line: str) -> Any:
    """The arguments of `magic`, which a person calls `name`; raises BadInput, with the line that was typed."""
    line = COMMENT.sub("", line).rstrip().removesuffix(";")  # a habit: in IPython it keeps a value from being shown
    if name == "%%dip" and is_code(line):
        raise BadInput(f"%%dip {line.strip()}: {CODE_BELOW}")
    better = meant(name, line, magic.parser)
    if better:
        raise BadInput(f"{name} {line.strip()}: type {better}")
    try:
        args = parse_argstring(magic, line)
    except UsageError as error:
        better = meant(name, line, magic.parser, str(error))
        value = missing_value(magic.parser, str(error))
        what = f"type {better}" if better else value or f"{error}; %{name.lstrip('%')}? lists the options"
        raise BadInput(f"{name} {line.strip()}: {what}") from None
    except ValueError as error:  # a quote without an end
        raise BadInput(f"{name} {line.strip()}: {error}") from None
    for key, value in vars(args).items():
        typed = [unquoted(item) for item in value] if isinstance(value, list) else unquoted(value)
        if key in HAVE_NAMES and typed is not None:  # Python finds a name so, whatever its letters look like
            typed = [*map(as_python_reads, typed)] if isinstance(typed, list) else as_python_reads(typed)
        setattr(args, key, typed)
    return args


as_python_reads = functools.partial(unicodedata.normalize, "NFKC")
"""A name as Python's parser has it (PEP 3131)."""


def unquoted(value: Any) -> Any:
    """IPython leaves the quotes around an argument where they are."""
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


def flag(typed: str) -> bool:
    """Of ``-v``; raises BadInput."""
    if typed.lower() not in ("true", "false"):
        raise BadInput(f"-v {typed}: type -v, -v True or -v False")
    return typed.lower() == "true"


def seconds(typed: str, option: str, least: float) -> float:
    """A number of seconds, `least` or more; raises BadInput, which names the `option`."""
    try:
        found = float(typed)
    except ValueError:
        found = -1
    if not least <= found < float("inf"):
        raise BadInput(f"{option} {typed}: type a number of seconds, {least:g} or more, such as {option} 120")
    return found


NOW_SECONDS = 5.0
"""That ``%dipull --now`` waits for a rank."""


def seconds_of_now(args: Any, line: str) -> float | None:
    """How long ``%dipull --now`` waits for a rank; None without ``--now``."""
    if args.now:
        return NOW_SECONDS if args.timeout is None else seconds(args.timeout, "-t", 0.1)
    if args.timeout is not None:
        raise BadInput(f"%dipull {line.strip()}: -t goes with --now; a pull waits until the rank is free")
    return None


def check_profile(typed: str | None, where: str, places: Sequence[str]) -> None:
    """Of ``--profile``; raises BadInput for a cell that does not run on ranks alone."""
    place = typed if typed in places else where
    if typed is not None and place != "remote":
        raise BadInput(f"%%dip {place} --profile: it is ranks that are profiled; type %%dip --profile")
    if typed == "remote":
        raise BadInput("%%dip --profile remote: that is no folder; type %%dip --profile, or --profile ./remote")


def request(args: Any) -> placement.Request:
    """The group that was asked for after ``%makedip``."""
    hosts = () if args.hosts is None else placement.parse_hosts(args.hosts)
    reach = _reach(args)
    elsewhere = bool(hosts) or reach.finds
    return placement.Request(
        None if args.n is None else placement.parse_count(args.n) if elsewhere else _count(args.n, args.yes),
        None if args.gpus is None else _gpus(args.gpus, elsewhere),
        args.backend,
        args.app,
        hosts,
        reach,
    )


def _reach(args: Any) -> Reach:
    """How the hosts are reached, or found; raises BadInput."""
    ways = [f"--{name}" for name in ("hosts", "slurm", "here", "cluster", "engines") if getattr(args, name)]
    if len(ways) > 1:
        raise BadInput(f"{' and '.join(ways)}: type one of them, each says where the ranks are")
    if args.slurm is not None:
        slurm.parse(args.slurm)
    if args.engines is not None:
        launcher_engines.check(args.engines)
    elif args.profile is not None:
        raise BadInput(
            f"--profile {args.profile}: it configures a launcher; type it with --engines, such as --engines ssh"
        )
    return Reach(
        args.cd,
        args.python or "",
        args.setup or "",
        args.slurm or "",
        args.here,
        cluster=args.cluster or "",
        engines=args.engines or "",
        profile=args.profile or "",
    )


def job_script(args: Any) -> str:
    """For ``--dry-run``: what ``--slurm`` would submit; raises BadInput."""
    if args.slurm is None:
        raise BadInput(f"--dry-run: it shows the script of a job; type it with --slurm, {slurm.EXAMPLE}")
    return slurm.script(args.slurm)


def _gpus(words: list[str], elsewhere: bool) -> tuple[int, ...] | Literal["all"]:
    """The GPUs of ``-g``; of hosts that are `elsewhere` nobody knows yet which there are."""
    if elsewhere:
        return placement.ALL if words == [placement.ALL] else tuple(placement.parse_gpus(words, MOST_GPUS, "a host"))
    with folder.left_out():
        from ddip.cluster.devices import gpu_names

    return tuple(placement.parse_gpus(words, len(gpu_names())))


def _count(typed: str, yes: bool) -> int:
    """The N of ``-n N``; raises BadInput if that may bring the machine to its knees, unless `yes`, it is meant."""
    count, cores = placement.parse_count(typed), on_host.cores()
    if count > RANKS_A_CORE * cores and not yes:
        machine = f"{cores} core{'s' * (cores != 1)}"
        raise BadInput(f"-n {count}: {count} processes on {machine}; if you mean it, type %makedip -n {count} --yes")
    return count


def asks_for_a_group(args: Any) -> bool:
    """Does what was typed after ``%makedip`` say which group there is to be?"""
    return bool(
        args.n
        or args.gpus
        or args.backend
        or args.app
        or args.restart
        or args.hosts
        or args.slurm
        or args.here
        or args.cluster
        or args.engines
    )


def names_and_ranks(
    names: list[str], typed: list[str] | None, size: int, magic: str
) -> tuple[list[str], list[int] | None]:
    """Names and ranks; ``-r 1 model`` takes the words after the first rank for names, as a person means them."""
    words = list(typed or [])
    split = next((i for i, word in enumerate(words) if word.strip(",").isidentifier() and word != "all"), len(words))
    names = [name for word in (*names, *words[split:]) for name in word.split(",") if name]
    if not names:
        raise BadInput(f"{magic}: type the names of variables, such as {magic} model losses")
    return names, placement.parse_ranks(words[:split], size, "-r") if typed else None


def seen(typed: list[str] | None, ranks: list[int], size: int, usual: str) -> list[int]:
    """The ranks to show: those of -S, else those of the trait, the `usual`, that run the cell, else the first that
    does."""
    if typed is not None:
        shown = placement.parse_ranks(typed, size, "-S")
        if not set(shown).intersection(ranks):
            who = f"{ranks_text(shown)} {'does' if len(shown) == 1 else 'do'} not run this cell"
            raise BadInput(f"-S {' '.join(typed)}: {who}, {ranks_text(ranks)} would; type -S {ranks[0]}, or -S all")
        return shown
    shown = placement.parse_ranks([usual], size, "DipMagics.show_ranks")
    return [rank for rank in shown if rank in ranks] or ranks[:1]
