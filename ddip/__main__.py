"""``python -m ddip``: the commands to run from a shell."""

from __future__ import annotations

import os
import sys

ABOUT = """\
ddip runs in notebooks: %load_ext ddip, then %makedip -n 2 starts two ranks, and %%dip runs a cell on them.

From a shell:
  python -m ddip doctor      check this machine and suggest remedies; --help lists its options
  python -m ddip groups      list your groups on this machine; --end NAME ends a kept one
  python -m ddip --version   the version
"""


def main(words: list[str]) -> int:
    """Run the command that was typed after ``python -m ddip``, and return the exit code."""
    match words:
        case ["doctor", *options]:
            from ddip.doctor import command

            return command.main(options)
        case ["groups", *options]:
            from ddip.kept import kept_command

            return kept_command.main(options)
        case ["--version"]:
            from ddip import __version__

            print(f"ddip {__version__}")
            return 0
        case [] | ["-h" | "--help"]:
            print(ABOUT, end="")
            return 0
    print(f"python -m ddip {' '.join(words)}: there is no such command\n\n{ABOUT}", end="", file=sys.stderr)
    return 2


def _remove_current_folder_from_path() -> None:
    """Remove the current folder from ``sys.path``: files there must not shadow modules.

    ``python -m`` puts it first.
    """
    try:
        folder = os.getcwd()
    except FileNotFoundError:
        return
    if not sys.flags.safe_path and sys.path[:1] == [folder]:
        del sys.path[0]


if __name__ == "__main__":
    _remove_current_folder_from_path()
    sys.exit(main(sys.argv[1:]))
