"""What people type by mistake after a magic, and what they meant."""

from __future__ import annotations

import argparse
import difflib
import re


def meant(name: str, line: str, parser: argparse.ArgumentParser, error: str = "") -> str:
    """The line to type instead of `line` after the magic `name`; empty if that cannot be told.

    Without an `error` of the `parser`: is it one that can be parsed, and is not what it looks like?

    >>> parser = argparse.ArgumentParser(); _ = parser.add_argument("-S", "--see")
    >>> meant("%%dip", "-s all", parser, "unrecognized arguments: -s all")
    '%%dip -S all'
    """
    words = line.split()
    better = [_better(name, word, _options(parser), bool(error)) for word in words]
    return "" if better == words else " ".join([name, *better])


def _options(parser: argparse.ArgumentParser) -> list[str]:
    return [option for action in parser._actions for option in action.option_strings]


def _better(name: str, word: str, options: list[str], failed: bool) -> str:
    if name == "%%dip" and word in ("-all", "--all"):
        return "-S all"
    if re.fullmatch(r"-[a-z]{2,}", word) and f"-{word}" in options:  # -repair
        return f"-{word}"
    if not failed or word in options:
        return word
    if name == "%makedip" and word.isdecimal():
        return f"-n {word}"
    if re.fullmatch(r"-[A-Za-z]", word):
        return word.swapcase() if word.swapcase() in options else word
    if word.startswith("--"):
        return (difflib.get_close_matches(word.partition("=")[0], options, 1, 0.7) or [word])[0]
    return word
