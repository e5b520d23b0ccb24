"""Random faults in training loops on a real group; afterwards ranks are equal, or ddip names the differences.

python -m tests.training_fuzz --faults 2000 --seed 1
"""

from __future__ import annotations

import argparse
import sys

from .run import Run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.training_fuzz", description=__doc__)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further fault after this time")
    parser.add_argument("--only", default="", help="loops whose names contain this")
    parser.add_argument("--replay", default="", help="run only this fault, as printed in the table")
    parser.add_argument("--verbose", action="store_true", help="print every fault, and ddip's messages about it")
    arguments = parser.parse_args()
    run = Run(arguments.seed, arguments.faults, arguments.only, arguments.replay, arguments.verbose)
    return run.all(60 * arguments.minutes)


if __name__ == "__main__":
    sys.exit(main())
