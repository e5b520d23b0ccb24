"""Parse the arguments of magics; for invalid ones, raise an error of one line that says what to type instead."""

from __future__ import annotations

import difflib
import functools
import keyword
import re
import shlex
import unicodedata
from argparse import Action
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

PLACES = ("remote", "local", "everywhere")
"""Where ``%%dip`` runs a cell."""
UNKNOWN = "unrecognized arguments: "
"""Beginning of argparse's message about unknown words."""
VALUE = re.compile(r"argument (\S+): expected (?:one|at least one) argument")
DASHES = re.compile(r"[\u2012-\u2015\u2212]+")
"""Typographic dashes, into which some pages convert ``-`` and ``--``."""
SIZE_OPTION = re.compile(r"-n\d*|-g.*|--gpus.*")
NP_OPTION = re.compile(
    r"-np|--num|--?(?:nproc|num|n)[-_](?:per[-_]node|processes|procs|ranks)|--?(?:nproc|ranks|world[-_]size)"
)
"""Options of torchrun, accelerate and mpirun for the number of ranks."""
WITHOUT_COUNT = ("-i", "--info", "-k", "--kill", "--repair")
"""Options of ``%makedip`` after which a number is not a number of ranks."""


def suggest_line(name: str, line: str, parser: MagicArgumentParser, error: str = "") -> str:
    """Return the line to type instead of `line` after the magic `name`; empty if there is no suggestion.

    `error` is the message of the `parser`; without it `line` is valid, but may mean something else than it seems.

    >>> parser = MagicArgumentParser(); _ = parser.add_argument("-S", "--see")
    >>> suggest_line("%%dip", "-s all", parser, "unrecognized arguments: -s all")
    '%%dip -S all'
    """
    options = [option for action in parser._actions for option in action.option_strings]
    words, unknown = line.split(), error.partition(UNKNOWN)[2].split()
    suggestion = list(_suggest_words(name, words, unknown, options))
    return " ".join([name, *suggestion]) if suggestion != words and _is_valid(parser, suggestion) else ""


def is_code(line: str) -> bool:
    """Return True if `line` looks like Python code rather than arguments.

    >>> is_code("print(rank)"), is_code("local"), is_code("-S 0,1")
    (True, False, False)
    """
    first, _, rest = line.strip().partition(" ")
    options = rest.lstrip() if first in PLACES else line.strip()
    return not options.startswith("-") and bool(re.search(r"[()=\[\]{}:]", line))


def missing_value_text(parser: MagicArgumentParser, error: str) -> str:
    """Describe the value of the option that lacks one according to `error`; empty for other errors."""
    found = VALUE.search(error)
    actions = [action for action in parser._actions if found and "/".join(action.option_strings) == found[1]]
    return _value_text(actions[0]) if actions else ""


def _value_text(action: Action) -> str:
    return f"type a value after {action.option_strings[0]}: {action.help}".replace("%%", "%")  # argparse doubles it


def _find_repeated(parser: MagicArgumentParser, line: str) -> str:
    """Return advice for an option with a value that is typed twice; empty if there is none.

    argparse would use the last one.
    """
    options = {option: action for action in parser._actions for option in action.option_strings if action.nargs != 0}
    typed = [
        options[word] for word in (word.partition("=")[0] for word in shlex.split(line, posix=False)) if word in options
    ]
    for action in typed:
        if typed.count(action) > 1:
            several = ", with all its values after it" if action.nargs == "+" else ""
            return f"type {action.option_strings[0]} only once{several}"
    return ""


def _find_empty(parser: MagicArgumentParser, args: Any) -> str:
    """Return advice for an option whose value is empty, such as ``-a ''``; empty if there is none."""
    for action in parser._actions:
        typed = getattr(args, action.dest)
        values = typed if isinstance(typed, list) else [typed]
        if action.option_strings and any(value and strip_quotes(value) == "" for value in values):
            return _value_text(action)
    return ""


def _is_valid(parser: MagicArgumentParser, words: list[str]) -> bool:
    try:
        parser.parse_argstring(" ".join(words))
    except (UsageError, ValueError):
        return False
    return True


def _suggest_words(name: str, words: list[str], unknown: list[str], options: list[str]) -> Iterator[str]:
    has_size = any(SIZE_OPTION.fullmatch(word.lower()) for word in words)
    previous = ""
    for word in words:
        for suggestion in _suggest_word(name, word, unknown, options, has_size, previous):
            previous = suggestion
            yield suggestion


def _suggest_word(
    name: str, word: str, unknown: list[str], options: list[str], has_size: bool, previous: str
) -> Iterator[str]:
    """Yield the words to type instead of `word`, after the suggested word `previous`."""
    dashed = DASHES.sub(lambda found: "-" if len(word) - found.end() == 1 else "--", word, count=1)
    option, equals, value = dashed.partition("=")
    if name == "%%dip" and word in ("-all", "--all"):
        yield "-S all"
    elif name == "%makedip" and NP_OPTION.fullmatch(option):
        yield f"-n {value}".rstrip()
    elif re.fullmatch(r"-[a-z]{2,}", word) and f"-{word}" in options:  # -repair
        yield f"-{word}"
    elif dashed != word and option in options:
        yield dashed
    elif word not in unknown:
        yield word
    elif word.isdecimal() and previous in WITHOUT_COUNT:
        return
    elif name == "%makedip" and word.isdecimal() and not has_size and (previous in options or previous[:1] != "-"):
        yield f"-n {word}"
    elif re.fullmatch(r"-[A-Za-z]", word) and word.swapcase() in options:
        yield word.swapcase()
    elif option.startswith("--") and (like := difflib.get_close_matches(option, options, 1, 0.75)):
        yield like[0] + equals + value
    else:
        yield word


F = TypeVar("F", bound=Callable[..., object])


def with_examples(*lines: str) -> Callable[[F], F]:
    """Decorate a magic to show `lines` as examples above the help that ``magic_arguments`` generates."""

    def add_examples(magic: F) -> F:
        magic.__doc__ = "\n".join(["Examples::", "", *(f"    {line}" for line in lines), "", magic.__doc__ or ""])
        return magic

    return add_examples


COMMENT = re.compile(r"""(?:^|\s+)#[^"']*$""")
"""A comment at the end of a line; with a quote in it, it may be part of an argument."""
CODE_BELOW = "type %%dip alone in the first line of a cell, and the code below it"
NAME_ARGUMENTS = ("name", "names", "ranks", "source")
"""Arguments that contain names of variables."""
RANKS_PER_CORE = 8
"""Maximum number of ranks per core without ``--yes``."""
HOST_OPTIONS = ("hosts", "slurm", "here", "cluster", "engines")
"""Options of ``%makedip`` that select the hosts of the ranks."""
MOST_GPUS = 64
"""Maximum number of GPUs on another host."""


def parse_line(magic: Any, name: str, line: str) -> Any:
    """Parse the arguments typed after `magic`, which users call `name`; return them as attributes.

    Comments and quotes are removed. Raises BadInput, with the line to type instead, for an invalid `line` and for
    ``--help``.
    """
    line = COMMENT.sub("", line).rstrip().removesuffix(";")  # users type ";" to hide the value of a line
    if name == "%%dip" and is_code(line):
        raise BadInput(f"%%dip {line.strip()}: {CODE_BELOW}")
    if {"-h", "--help", "-help"}.intersection(DASHES.sub("-", line).split()):
        raise BadInput(f"{name} {line.strip()}: type %{name.lstrip('%')}? for its options and examples")
    suggestion = suggest_line(name, line, magic.parser)
    if suggestion:
        raise BadInput(f"{name} {line.strip()}: type {suggestion}")
    try:
        args = parse_argstring(magic, line)
    except UsageError as error:
        suggestion = suggest_line(name, line, magic.parser, str(error))
        value = missing_value_text(magic.parser, str(error))
        what = f"type {suggestion}" if suggestion else value or f"{error}; %{name.lstrip('%')}? lists the options"
        raise BadInput(f"{name} {line.strip()}: {what}") from None
    except ValueError:
        what = "a quote is not closed; type it on both sides of the text, or leave it out"
        raise BadInput(f"{name} {line.strip()}: {what}") from None
    what = _find_repeated(magic.parser, line) or _find_empty(magic.parser, args)
    if what:
        raise BadInput(f"{name} {line.strip()}: {what}")
    for key, value in vars(args).items():
        typed = [strip_quotes(item) for item in value] if isinstance(value, list) else strip_quotes(value)
        if key in NAME_ARGUMENTS and typed is not None:  # Python normalizes identifiers
            typed = [*map(as_python_reads, typed)] if isinstance(typed, list) else as_python_reads(typed)
        setattr(args, key, typed)
    return args


as_python_reads = functools.partial(unicodedata.normalize, "NFKC")
"""Normalizes a name as Python's parser does (PEP 3131)."""


def strip_quotes(value: Any) -> Any:
    """Remove the quotes around an argument, which IPython keeps."""
    if isinstance(value, str) and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
        return value[1:-1]
    return value


def parse_flag(typed: str) -> bool:
    """Parse the value of ``-v``; raises BadInput."""
    if typed.lower() not in ("true", "false"):
        raise BadInput(f"-v {typed}: type -v, -v True or -v False")
    return typed.lower() == "true"


UNITS = {"s": 1, "m": 60, "h": 3600}
"""Seconds of each unit of time."""


def parse_seconds(typed: str, option: str, least: float) -> float:
    """Return the seconds of a time such as ``120``, ``90s``, ``10m`` or ``1h``, which must be at least `least`.

    Raises BadInput, which names the `option`.
    """
    has_unit = typed[-1:] in UNITS
    try:
        found = float(typed[:-1]) * UNITS[typed[-1]] if has_unit else float(typed)
    except ValueError:
        found = -1
    if not least <= found < float("inf"):
        ways = f"{option} 120, {option} 10m or {option} 1h"
        raise BadInput(f"{option} {typed}: type a time of {least:g} s or more, such as {ways}")
    return found


NOW_SECONDS = 5.0
"""Seconds that ``%dipull --now`` waits for a rank by default."""


def peek_timeout(args: Any, line: str) -> float | None:
    """Return the seconds that ``%dipull --now`` waits for a rank; None without ``--now``. Raises BadInput."""
    if args.now:
        return NOW_SECONDS if args.timeout is None else parse_seconds(args.timeout, "-t", 0.1)
    if args.timeout is not None:
        raise BadInput(f"%dipull {line.strip()}: -t works only with --now; leave it out, or add --now")
    return None


def refuse_rank_options(parser: MagicArgumentParser, args: Any) -> None:
    """Raise BadInput if an option of ``%%dip local`` was typed: all of them are for cells on ranks."""
    for action in parser._actions:
        if action.option_strings and getattr(args, action.dest) != action.default:
            option = action.option_strings[0]
            raise BadInput(f"%%dip local {option}: {option} is for cells on ranks; type %%dip local, or %%dip {option}")


def parse_request(args: Any) -> placement.Request:
    """Return the request for a group that the arguments of ``%makedip`` state. Raises BadInput."""
    hosts = () if args.hosts is None else placement.parse_hosts(args.hosts)
    reach = _parse_reach(args)
    is_remote = bool(hosts) or reach.finds
    return placement.Request(
        None if args.n is None else placement.parse_count(args.n) if is_remote else _parse_count(args.n, args.yes),
        None if args.gpus is None else _parse_gpus(args.gpus, is_remote),
        args.backend,
        args.app,
        hosts,
        reach,
    )


def _parse_reach(args: Any) -> Reach:
    """Return how to reach or find the hosts; raises BadInput."""
    ways = [f"--{name}" for name in HOST_OPTIONS if getattr(args, name)]
    if len(ways) > 1:
        raise BadInput(f"{' and '.join(ways)}: type only one of them; each selects the hosts of the ranks")
    if args.slurm is not None:
        slurm.parse_options(args.slurm)
    if args.engines is not None:
        launcher_engines.check_launcher(args.engines)
    elif args.profile is not None:
        raise BadInput(f"--profile {args.profile} configures a launcher, so it needs --engines, such as --engines ssh")
    for option in () if ways else ("cd", "python", "setup"):
        if getattr(args, option) is not None:
            typed = f"--{option} {getattr(args, option)}"
            raise BadInput(f"{typed}: it is for ranks on other hosts; type it with --hosts, such as --hosts h1:4,h2:4")
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
    """Return the script that ``--slurm`` would submit, for ``--dry-run``; raises BadInput."""
    if args.slurm is None:
        raise BadInput(f"--dry-run shows the script of a job, so it needs --slurm, {slurm.EXAMPLE}")
    return slurm.batch_script(args.slurm)


def _parse_gpus(words: list[str], is_remote: bool) -> tuple[int, ...] | Literal["all"]:
    """Parse ``-g``; the GPUs of remote hosts are not known yet."""
    if is_remote:
        return placement.ALL if words == [placement.ALL] else tuple(placement.parse_gpus(words, MOST_GPUS, "a host"))
    with folder.left_out():
        from ddip.cluster.devices import gpu_names

    return tuple(placement.parse_gpus(words, len(gpu_names())))


def _parse_count(typed: str, yes: bool) -> int:
    """Parse ``-n``; raise BadInput if so many ranks could overload the machine, unless `yes`."""
    count, cores = placement.parse_count(typed), on_host.count_cores()
    if count > RANKS_PER_CORE * cores and not yes:
        machine = f"{cores} core{'s' * (cores != 1)}"
        raise BadInput(
            f"-n {count}: {count} processes on {machine}; to start them anyway, type %makedip -n {count} --yes"
        )
    return count


def asks_for_a_group(args: Any) -> bool:
    """Return True if the arguments of ``%makedip`` describe a group to start."""
    return any(getattr(args, name) for name in ("n", "gpus", "backend", "app", "restart", *HOST_OPTIONS))


def split_renames(typed: Sequence[str], magic: str) -> tuple[list[str], dict[str, str]]:
    """Return the names in `typed`, and the new name of each one that ``as`` follows; raises BadInput.

    >>> split_renames(["loss,model", "as", "best"], "%dipull")
    (['loss,model'], {'model': 'best'})
    """
    names: list[str] = []
    renames: dict[str, str] = {}
    words = iter(typed)
    for word in words:
        if word != "as":
            names.append(word)
            continue
        name = next(words, "").removesuffix(",")
        if not names or names[-1].rpartition(",")[2] in renames or not name.isidentifier() or keyword.iskeyword(name):
            raise BadInput(f"{magic} {' '.join(typed)}: type a name on each side of as, such as {magic} model as best")
        renames[names[-1].rpartition(",")[2]] = name
    return names, renames


def names_and_ranks(
    names: list[str], typed: list[str] | None, size: int, magic: str
) -> tuple[list[str], list[int] | None]:
    """Return the names of variables, each once, and the ranks, or None if no ``-r`` was `typed`.

    `names`: words before ``-r``; `typed`: words after it; `size`: number of ranks; `magic`: for messages. In ``-r 1
    model`` the words after the ranks are names, as a user expects. Raises BadInput, for example if there is no name.
    """
    words = list(typed or [])
    split = next((i for i, word in enumerate(words) if word.strip(",").isidentifier() and word != "all"), len(words))
    names = [*dict.fromkeys(name for word in (*names, *words[split:]) for name in word.split(",") if name)]
    if not names:
        raise BadInput(f"{magic}: type the names of variables, such as {magic} model losses")
    return names, parse_ranks(words[: split or 1], size, "-r") if typed else None


def suggest_names(magic: str, missing: Sequence[str], known: Sequence[str]) -> str:
    """Return an error's end that suggests `known` names similar to the `missing` ones; empty if none is.

    >>> suggest_names("%dipull", ["modle"], ["model", "loss"])
    '; type %dipull model'
    """
    similar = [like for name in missing for like in difflib.get_close_matches(name, known, 1, 0.7)]
    return f"; type {magic} {' '.join(similar)}" if similar else ""


def ranks_to_show(typed: list[str] | None, ranks: list[int], size: int, usual: str) -> list[int]:
    """Return the ranks whose output a cell on `ranks` shows.

    `typed` is the value of -S: all its ranks are returned, also those that do not run the cell. Without it, these are
    the ranks of the setting `usual` that run the cell, or if none of them does, the first rank that runs it. Raises
    BadInput if `typed` or `usual` is invalid, or if none of the typed ranks runs the cell.
    """
    if typed is not None:
        shown = parse_ranks(typed, size, "-S")
        if not set(shown).intersection(ranks):
            who = f"{ranks_text(shown)} {'does' if len(shown) == 1 else 'do'} not run this cell"
            raise BadInput(f"-S {' '.join(typed)}: {who}, only {ranks_text(ranks)}; type -S {ranks[0]}, or -S all")
        return shown
    shown = parse_ranks([usual], size, "DipMagics.show_ranks")
    return [rank for rank in shown if rank in ranks] or ranks[:1]


def parse_ranks(words: Sequence[str], world_size: int, option: str) -> list[int]:
    """Parse ``0,2``, ``0 2``, ``1-3`` or ``all`` into distinct ranks in the order typed; raise BadInput."""
    typed = f"{option} " + " ".join(words)
    last = world_size - 1
    range_text = f"this group has ranks 0 to {last}" if last else "this group has only rank 0"
    ranks: dict[int, None] = {}
    for item in [item for word in words for item in word.split(",") if item]:
        first, _, end = item.partition("-")
        if item == "all":
            ranks |= dict.fromkeys(range(world_size))
        elif re.fullmatch(r"\d+(-\d+)?", item, re.ASCII) and int(first) <= int(end or first):
            for rank in range(int(first), int(end or first) + 1):
                if rank > last:
                    raise BadInput(f"{typed}: there is no rank {rank}; {range_text}")
                ranks[rank] = None
        else:
            raise BadInput(
                f"{typed}: {item!r} is not a rank; {range_text}: type {option} 0, {option} 0,1 or {option} all"
            )
    if not ranks:
        raise BadInput(f"{typed}: type at least one rank; {range_text}")
    return list(ranks)


def parse_rank(typed: str, size: int, option: str) -> int:
    """Parse the number of one rank of `size`; raise BadInput, which names the `option`."""
    if not re.fullmatch(r"\d+", typed, re.ASCII) or int(typed) >= size:
        raise BadInput(f"{option} {typed}: type one rank from 0 to {size - 1}, such as {option} 0")
    return int(typed)


def parse_source(typed: Sequence[str] | None, size: int) -> tuple[int | None, list[str]]:
    """Parse the words after ``--from``, such as ``0 model opt``, into a rank and names of variables.

    Raises BadInput. Without the option, return None and no names. `size`: number of ranks.
    """
    if typed is None:
        return None, []
    source = parse_rank(typed[0], size, "--from")
    names = variable_names(typed[1:], f"--from {source}")
    if not names:
        raise BadInput(f"--from {source}: add names of variables of this rank, such as --from {source} model opt")
    return source, names


def variable_names(typed: Sequence[str], magic: str) -> list[str]:
    """Return the names in `typed`, each once; raise BadInput, with the command `magic`, for other words."""
    names = [*dict.fromkeys(name for word in typed for name in word.split(",") if name)]
    for name in names:
        if not name.isidentifier():
            raise BadInput(f"{magic} {name}: type names of variables, such as {magic} model opt")
    return names
