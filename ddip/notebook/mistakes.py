"""What people type by mistake after a magic, and what they meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

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
