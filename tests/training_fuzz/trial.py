"""One group of two ranks that trains loops of the fuzzer, and one fault on it at a time."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sysconfig
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ddip
from ddip.errors import CellInterrupted, CellTimeout, DdipError
from ddip.protocol import on_rank

from . import plan
from .loops import LOOPS
from .plan import Fault, Seen

MOST_LOAD = 3.0
RANKS = 2
MODULES = ("tracer", "state")
"""Files of this folder that run on ranks."""
INSTALLED = sysconfig.get_path("purelib") + "/training_fuzz/"
"""Folder of these files as the ranks see it: that of a library, so that neither an interrupt nor ddip mistakes their
code and variables for the user's."""
HURRY = """
from ddip.rank.inspection import state_history as _made
_made.IDLE_SECONDS, _made.SUM_SECONDS, _made.REST = 0.02, 0.02, 0
del _made
"""
"""Makes the ranks record their state sooner after a good cell than they do for a person."""
FORGET = "%reset_selective -f ^(?!rank$|world_size$|device$).*"
NEXT_CELL_SECONDS = 5.0
LIMIT_SECONDS = 0.5
"""Time limit of a cell whose fault is a time limit."""
RECORDED_SECONDS = 5.0
"""How long a fault waits until ddip has recorded the state after the last good cell: people type more slowly."""
LONGEST_SECONDS = 12.0
"""A training cell that takes longer counts as hanging."""
GOOD_CALLS = 2
"""Cells with ``train(1)`` before the first fault, as the history that ddip compares with."""


def load_factor() -> float:
    """Return how many times slower this machine is than when idle."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), MOST_LOAD)


class Presser(threading.Thread):
    """Press stop once the victims of a fault have reached its place; let them continue if that fails."""

    def __init__(self, folder: Path, fault: Fault, limit: float) -> None:
        super().__init__(daemon=True)
        self._folder, self._fault, self._limit = folder, fault, limit
        self._over = threading.Event()

    def run(self) -> None:
        first = 0.0
        while not self._over.wait(0.005):
            reached = [rank for rank in self._fault.ranks if (self._folder / f"reached.{rank}").exists()]
            if not reached:
                continue
            first = first or time.monotonic()
            if self._fault.kind == "timeout":
                self._over.wait(self._limit)
                break
            if len(reached) == len(self._fault.ranks) or time.monotonic() > first + 0.5:
                os.kill(os.getpid(), signal.SIGINT)
                break
        if not self._over.wait(0.3):  # the interrupt waits for a library, so the rank is still at the place
            (self._folder / "go").write_text("")

    def __enter__(self) -> None:
        if self._fault.kind in ("stop", "timeout"):
            self.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self.is_alive():
            self.join()


class Trials:
    """A group, the loop that its ranks have set up, and trials of faults on it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._heard = io.StringIO()
        self._loop = LOOPS["DDP"]
        self._baseline: list[dict[str, Any]] = []
        self._app, self._has_modules = "", False
        self._group = self._new_group()

    def _new_group(self) -> ddip.Group:
        with self._listening():
            return ddip.Group(RANKS, app=self._app or None, failure_grace=0.1)

    def close(self) -> None:
        """End the group."""
        self._group.shutdown()

    # -- cells

    def _run(self, code: str, timeout: float | None = None) -> None:
        limit = LONGEST_SECONDS * 5 if timeout is None else timeout
        with self._listening():
            self._group.run(code, timeout=limit * load_factor())

    def _words(self) -> str:
        return plan.notices_of_ddip(self._heard.getvalue())

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """Capture ddip's messages; the loops write to stdout."""
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(self._heard):
            yield

    def _call(self, module: str, call: str, timeout: float | None = None) -> None:
        """Call a function of the harness on every rank, without leaving a name."""
        self._run(f"__import__('training_fuzz_{module}').{call}", timeout)

    def _ask(self, call: str, timeout: float | None = None) -> list[dict[str, Any]]:
        """Call a function of the harness, and return what it writes to its file on each rank."""
        files = [self._folder / f"answer.{rank}" for rank in range(RANKS)]
        for file in files:
            file.unlink(missing_ok=True)
        self._call("state", f"{call[:-1]}, f'{self._folder}/answer.{{rank}}')", timeout)
        return [json.loads(file.read_text()) for file in files]

    def _look(self, timeout: float | None = None) -> list[dict[str, Any]]:
        return self._ask(f"write_digests(globals(), {dict(self._loop.state)!r})", timeout)

    def _load_modules(self) -> None:
        for name in MODULES:
            source = (Path(__file__).parent / f"{name}.py").read_text()
            self._run(f"""
import sys, types
_made = types.ModuleType("training_fuzz_{name}")
_made.__file__ = {INSTALLED + name + ".py"!r}
sys.modules[_made.__name__] = _made
exec(compile({source!r}, _made.__file__, "exec"), vars(_made))
del _made
""")
        self._run(HURRY)
        self._has_modules = True

    # -- loops

    def set_up(self, name: str) -> None:
        """Create the objects of a loop on a working group, and run some good steps."""
        self._loop = LOOPS[name]
        if self._loop.app != self._app:
            self._group.shutdown()
            self._app = self._loop.app
            self._group = self._new_group()
            self._has_modules = False
        if not self._has_modules:
            self._load_modules()
        for attempt in range(3):
            try:
                if attempt:
                    self._recover(whole=attempt == 2)
                self._run(FORGET)
                for code in (self._loop.code, *["losses = train(1)"] * GOOD_CALLS):
                    self._run(code, LONGEST_SECONDS * 3)
                    self._wait_until_recorded()
                break
            except (CellTimeout, DdipError):
                if attempt == 2:
                    raise
        self._baseline = self._look()

    def _recover(self, *, whole: bool) -> None:
        """Bring the group back from any state."""
        with self._listening():
            if whole:
                self._group.restart()
            else:
                self._group.repair()
        self._load_modules()

    def record(self) -> dict[str, int]:
        """Return how often two steps reach each of their lines."""
        file = self._folder / "places"
        call = f"record(train, {str(file)!r}, rank)"
        self._run(f"with __import__('training_fuzz_tracer').{call}:\n    losses = train(2)")
        counts: dict[str, int] = json.loads(file.read_text())
        return counts

    # -- one fault

    def play(self, fault: Fault) -> Seen:
        """Cause the fault, inspect the ranks, and continue training."""
        seen = Seen(good=self._baseline)
        self._heard = io.StringIO()
        for file in self._folder.glob("reached.*"):
            file.unlink()
        (self._folder / "go").unlink(missing_ok=True)
        try:
            if self._loop.sharded:
                self._call("state", f"hold(globals(), {dict(self._loop.state)!r}, 'start')")
            self._wait_until_recorded()
            self._let_happen(fault, seen)
            if not seen.hung:
                (self._after_kill if fault.kind == "kill" and seen.fired else self._after)(fault, seen)
        finally:
            seen.heard = seen.heard or self._words()
        return seen

    def _wait_until_recorded(self) -> None:
        until = time.monotonic() + RECORDED_SECONDS
        while not all(self._group.ranks.call_on_control_channel(range(RANKS), on_rank.is_recorded(True)).values()):
            if time.monotonic() > until:
                return
            time.sleep(0.01)

    def _let_happen(self, fault: Fault, seen: Seen) -> None:
        limit = LIMIT_SECONDS * load_factor() + 2 * self._loop.seconds_per_step * self._loop.per_call
        place = f"{fault.kind!r}, {fault.place!r}, {fault.nth}, {str(self._folder)!r}, rank, {fault.ranks}"
        code = f"with __import__('training_fuzz_tracer').plant(train, {place}):\n    losses = train(2)"
        timeout = limit / load_factor() if fault.kind == "timeout" else LONGEST_SECONDS
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with Presser(self._folder, fault, limit):
                self._run(code, timeout)
        except CellTimeout as error:
            if fault.kind != "timeout":
                seen.hung = f"the cell with the fault: {_one_line(error)}"
        except (ddip.CellError, CellInterrupted, KeyboardInterrupt):
            pass
        finally:
            signal.signal(signal.SIGINT, lambda *_: None)
        seen.fired = any(self._folder.glob("reached.*"))

    def _after(self, fault: Fault, seen: Seen) -> None:
        try:
            seen.looks = self._look(NEXT_CELL_SECONDS)
        except CellTimeout as error:
            seen.hung = f"the next cell: {_one_line(error)}"
            return
        except DdipError as error:
            seen.error = _one_line(error)
            return
        finally:
            seen.heard = self._words()
        seen.settings = [
            f"{name} is {look['flags'][name]}"
            for look, good in zip(seen.looks, self._baseline, strict=True)
            for name in look.get("flags", {})
            if look["flags"][name] != good["flags"][name]
        ]
        seen.stale = plan.stale_models(fault, seen.looks) if seen.fired else []
        seen.unsharded = any(
            look.get("shards") != good["shards"] for look, good in zip(seen.looks, self._baseline, strict=True)
        )
        differ = [name for name in plan.differing_objects(seen.looks, seen.good) if not name.endswith("gradients")]
        if differ or plan.mentions_difference(seen.heard, self._loop.state):
            offers_any = "--from RANK" in seen.heard  # a rebuild has given DDP models rank 0's parameters otherwise
            self._synchronise(seen, source=fault.nth % RANKS if offers_any else 0)
        if not (seen.refused or seen.error or seen.hung):
            self._train_on(seen)
        if seen.error or seen.refused or seen.found:
            self._set_up_again(fault.loop, seen)

    def _synchronise(self, seen: Seen, source: int) -> None:
        seen.synced = True
        heard = len(self._heard.getvalue())
        try:
            with self._listening():
                self._group.sync(source=source)
            seen.again = self._look(NEXT_CELL_SECONDS)
        except CellTimeout as error:
            seen.hung = f"the synchronisation: {_one_line(error)}"
        except DdipError as error:
            seen.refused = _one_line(error)
        else:
            words = self._heard.getvalue()[heard:]
            if "was not copied" in words and plan.differing_objects(seen.again, seen.good):
                seen.refused = words

    def _train_on(self, seen: Seen) -> None:
        state, calls = dict(self._loop.state), max(1, self._loop.steps_after // self._loop.per_call)
        try:
            self._call("state", f"hold(globals(), {state!r}, 'before')", NEXT_CELL_SECONDS)
            self._run(f"losses = train({calls})", LONGEST_SECONDS)
        except CellTimeout as error:
            seen.hung = f"a cell that trains after the fault: {_one_line(error)}"
            return
        except DdipError as error:
            since = self._words()[len(seen.heard) :]  # ddip's actions since the digests may explain this failure
            seen.error = f"{_one_line(error)} {since}"
            return
        twin = f"{self._loop.code!r}, {state!r}, {calls}, {self._loop.close!r}, {self._loop.sharded}"
        try:
            answers = self._ask(f"compare(globals(), {twin})")
            seen.found = [f"rank {rank}: {text}" for rank, found in enumerate(answers) for text in found["found"]]
            seen.torn = plan.torn_objects([answer["matching"] for answer in answers])
        except DdipError as error:
            seen.found = [f"no undisturbed run from this state: {_one_line(error)}"]

    def _after_kill(self, fault: Fault, seen: Seen) -> None:
        try:
            with self._listening():
                replaced = self._group.repair()
            assert replaced, "the repair replaced no rank"
            began = time.monotonic()
            with contextlib.suppress(ddip.CellError):
                self._run("losses = train(1)", NEXT_CELL_SECONDS)
            seen.heard = self._words()
            assert time.monotonic() - began < NEXT_CELL_SECONDS * load_factor()
            self._load_modules()
        except CellTimeout as error:
            seen.hung = f"the cell after the repair: {_one_line(error)}"
            return
        self._set_up_again(fault.loop, seen)
        if seen.recreated:
            self._train_on(seen)

    def _set_up_again(self, name: str, seen: Seen) -> None:
        """Create everything again, as the user would with the set-up cell."""
        try:
            self._run(LOOPS[name].code)
            self._run("losses = train(1)", LONGEST_SECONDS)
            seen.recreated = True
        except (CellTimeout, DdipError) as error:
            seen.error = seen.error or f"set up again: {_one_line(error)}"


def _one_line(error: BaseException) -> str:
    """Return the text of an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]
