"""Random steps on real groups, held against a model; a sequence that fails is shrunk and printed as a program.

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
    parser.add_argument("--stretch", type=int, default=0, help="begin with this stretch of the seed")
    parser.add_argument("--shrink", type=float, default=120, help="seconds that a failing sequence is shrunk for")
    parser.add_argument("--go-on", action="store_true", help="after a failure, with the next stretch")
    parser.add_argument("--only", help="one step of each kind of which this is a part, each on a group of its own")
    arguments = parser.parse_args()
    seed = random.randrange(10**6) if arguments.seed is None else arguments.seed
    run = Run(seed, arguments.steps, arguments.stretch, arguments.shrink, arguments.go_on, arguments.only)
    code = run.all()
    exec("pass")  # Python ends itself by SIGINT if a KeyboardInterrupt has left the last text that it ran
    return code


if __name__ == "__main__":
    sys.exit(main())
