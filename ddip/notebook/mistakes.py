"""What people type by mistake after a magic, and what they meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator

from IPython.core.error import UsageError
from IPython.core.magic_arguments import MagicArgumentParser

UNKNOWN = "unrecognized arguments: "
"""How argparse begins its list of the words that it could not place."""
SIZE = re.compile(r"-n\d*|-g.*|--gpus.*")


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


def _parses(parser: MagicArgumentParser, words: list[str]) -> bool:
    try:
        parser.parse_argstring(" ".join(words))
    except (UsageError, ValueError):
        return False
    return True


def _better(name: str, words: list[str], unknown: list[str], options: list[str]) -> Iterator[str]:
    has_size = any(SIZE.fullmatch(word.lower()) for word in words)
    for word in words:
        option, equals, value = word.partition("=")
        if name == "%%dip" and word in ("-all", "--all"):
            yield "-S all"
        elif re.fullmatch(r"-[a-z]{2,}", word) and f"-{word}" in options:  # -repair
            yield f"-{word}"
        elif word not in unknown:
            yield word
        elif name == "%makedip" and word.isdecimal() and not has_size:
            yield f"-n {word}"
        elif re.fullmatch(r"-[A-Za-z]", word) and word.swapcase() in options:
            yield word.swapcase()
        elif option.startswith("--") and (like := difflib.get_close_matches(option, options, 1, 0.7)):
            yield like[0] + equals + value
        else:
            yield word
