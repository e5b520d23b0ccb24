"""The table of frameworks: their scripts, and the losses of these under torchrun."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).parent
STEPS = 20
RANKS = 2

Losses = list[list[float]]
"""Loss of each step, by rank."""


@dataclass(frozen=True)
class Script:
    """A script of scripts/, which both torchrun and ranks run.

    It defines

        train(on_step) -> list[float]

    which calls `on_step(step)` after each of 20 steps and returns their losses, on every rank. Its first line may be
    ``# app: NAME``, for `%makedip -a NAME`.
    """

    path: Path

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def app(self) -> str | None:
        found = re.match(r"# app: (\w+)", self.code)
        return found[1] if found else None

    @property
    def code(self) -> str:
        return self.path.read_text()

    @cached_property
    def under_torchrun(self) -> Losses:
        """Run the script under torchrun once, and return its losses."""
        with TemporaryDirectory() as folder:
            launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
            command = [*launch, str(HERE / "under_torchrun.py"), str(self.path), folder]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, timeout=300)
            return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(RANKS)]


SCRIPTS = sorted(map(Script, (HERE / "scripts").glob("*.py")), key=lambda script: (script.app or "", script.name))
