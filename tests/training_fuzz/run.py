"""A run of the fuzzer: stretches of faults on one group, loop after loop."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from pathlib import Path

from . import plan
from .loops import LOOPS, is_installed
from .plan import Fault, Places
from .table import NOT_REACHED, Table
from .trial import Trials


class Run:
    """One run of the fuzzer; with `replay`, of that fault alone."""

    def __init__(self, seed: int, count: int, only: str, replay: str, verbose: bool) -> None:
        self._seed, self._count, self._verbose = seed, count, verbose
        self._replay = Fault.parse(replay) if replay else None
        wanted = [name for name in LOOPS if only in name]
        self._loops = {name: LOOPS[name].app for name in wanted if is_installed(LOOPS[name])}
        self._absent = [name for name in wanted if name not in self._loops]
        self._places: dict[str, Places] = {}
        self._table = Table(seed)
        self._until = float("inf")
        """Deadline on ``time.monotonic`` after which no further fault begins."""

    def all(self, seconds: float) -> int:
        """Play the faults, but begin none after `seconds`; print the table, and return the exit code."""
        print(f"seed {self._seed}, {self._count} faults, {len(self._loops)} loops", flush=True)
        if self._absent:
            print(f"not installed: {', '.join(self._absent)}")
        signal.signal(signal.SIGINT, lambda *_: None)
        began = time.monotonic()
        self._until = began + seconds
        with tempfile.TemporaryDirectory(prefix="training_fuzz_") as folder:
            os.environ["TMPDIR"] = folder
            tempfile.tempdir = None
            trials = Trials(Path(folder))
            try:
                if self._replay:
                    trials.set_up(self._replay.loop)
                    self._play(trials, self._replay)
                else:
                    for loop, drawn in plan.draw_faults(self._seed, self._loops, self._count):
                        self._play_stretch(trials, loop, drawn)
                        print(f"{self._table.count} faults, {time.monotonic() - began:.0f} s", flush=True)
            finally:
                trials.close()
                del os.environ["TMPDIR"]
                tempfile.tempdir = None
        print(self._table.text({name: (places.used, places.counts) for name, places in self._places.items()}))
        print(f"{time.monotonic() - began:.0f} s")
        return 1 if self._table.failed else 0

    def _play_stretch(self, trials: Trials, loop: str, drawn: list[tuple[str, str]]) -> None:
        if time.monotonic() > self._until:
            return
        trials.set_up(loop)
        if loop not in self._places:
            self._places[loop] = Places(random.Random(f"{self._seed} {loop}"), trials.record())
        for kind, victims in drawn:
            if time.monotonic() > self._until:
                return
            place, nth = self._places[loop].draw()
            if not self._play(trials, Fault(loop, kind, victims, place, nth)):
                trials.set_up(loop)

    def _play(self, trials: Trials, fault: Fault) -> bool:
        """Play a fault, and return True if the objects can be used for another one."""
        began = time.monotonic()
        seen = trials.play(fault)
        outcome, reason = plan.judge_outcome(seen)
        if not seen.fired and outcome not in plan.BAD:
            outcome = NOT_REACHED
        elif fault.loop in self._places:
            self._places[fault.loop].used.add(fault.place)
        self._table.add(fault, outcome, reason, time.monotonic() - began)
        if self._verbose or outcome in plan.BAD:
            print(f"{outcome:11} {fault} | {reason}", flush=True)
            print("    " + seen.heard.strip().replace("\n", "\n    "), flush=True)
        return outcome in ("equal", "named", "refuses", NOT_REACHED)
