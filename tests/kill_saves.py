"""Kill a session, or one of its ranks, at random moments while it saves; load each time, and check that all is there.

Usage: python -m tests.kill_saves --kills 200 --seed 1
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time

import ddip
from tests.cluster.test_saves import CHECK, KILLED


def main() -> None:
    """Print one line per kill; fails if a save is damaged or older than the last complete one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    with ddip.Group(2) as group, tempfile.TemporaryDirectory() as folder:
        for kill in range(args.kills):
            with subprocess.Popen([sys.executable, "-c", KILLED, folder], stdout=subprocess.PIPE, text=True) as script:
                assert script.stdout is not None
                pids = [int(word) for word in script.stdout.readline().split()]
                saved = [int(script.stdout.readline()) for _ in range(2)]
                who, delay = chance.choice(range(len(pids))), chance.random() * 0.3
                time.sleep(delay)
                os.kill(pids[who], signal.SIGKILL)
                saved += [int(line) for line in script.stdout if line.strip().isdigit()]
            group.load(folder)
            group.run(CHECK)
            step = group.pull(["step"])["step"]
            assert step >= saved[-1] - 1, (step, saved)
            print(f"kill {kill + 1}: {'session' if not who else f'rank {who - 1}'} after {delay:.3f} s: step {step}")


if __name__ == "__main__":
    main()
