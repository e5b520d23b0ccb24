"""Random steps on real groups, compared with a model; a failing sequence is shrunk and printed as a program.

python -m tests.fuzz --steps 10000 --seed 7
"""

from __future__ import annotations

import argparse
import random
import sys

from .run import Run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--stretch", type=int, default=0, help="start at this stretch of the seed")
    parser.add_argument("--shrink", type=float, default=120, help="seconds for shrinking a failing sequence")
    parser.add_argument("--go-on", action="store_true", help="continue with the next stretch after a failure")
    parser.add_argument("--only", help="run one step of each kind whose name contains this, each on a separate group")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    run = Run(seed, arguments.steps, arguments.stretch, arguments.shrink, arguments.go_on, arguments.only)
    code = run.all()
    exec("pass")  # Python kills itself with SIGINT if the last executed code ended with a KeyboardInterrupt
    return code


if __name__ == "__main__":
    sys.exit(main())
