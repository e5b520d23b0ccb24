"""Play steps on a real group, one line of Python at a time, and compare the results with the model."""

from __future__ import annotations

import contextlib
import faulthandler
import inspect
import io
import os
import re
import signal
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

import ddip

from . import kinds, steps, tools
from .model import Broken, Model
from .steps import Step

DOCUMENTED = (
    ddip.CellError,
    ddip.errors.CellTimeout,
    ddip.errors.CellInterrupted,
    ddip.errors.GroupError,
    ddip.errors.TransferError,
    ddip.errors.BadInput,
    KeyboardInterrupt,
)
"""Exceptions that ddip may raise."""
BOUND = 30.0
"""Seconds that a line may take on an idle machine."""
OUT_OF_REACH = 3
"""Exit code if a line does not end even when interrupted."""

BEFORE = """\
import os, signal, sys, threading, time, torch, torch.distributed as dist
n, who = {n}, {who}
seen = (globals().get("seen") or 0) + 1
"""
AFTER = "\ndone = (globals().get('done') or 0) + 1"


def load_factor() -> float:
    """Return how many times slower this machine is than when idle."""
    return max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def as_function(name: str, body: str) -> str:
    """Return `body` as a function without arguments."""
    return f"def {name}():\n{textwrap.indent(body.strip(chr(10)), '    ')}\n"


def as_literal(code: str) -> str:
    """Return `code` as a string literal."""
    return repr(code) if '"""' in code or code.endswith(('"', "\\")) else f'r"""{code}"""'


class Line:
    """A stand-in for ``shown`` that records the exception of a line instead of printing it."""

    error: BaseException | None = None
    seconds = 0.0

    def __call__(self) -> Line:
        return self

    def __enter__(self) -> None:
        self.error = None
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self._began = time.monotonic()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        signal.signal(signal.SIGINT, lambda *_: None)
        self.seconds = time.monotonic() - self._began
        self.error = error
        return True


class Player:
    """A group, its model, and the program that has led to their state."""

    def __init__(self, size: int) -> None:
        self.program: list[str] = []
        self.n = 0
        self.line = Line()
        self.heard = io.StringIO()
        self.slowest = 0.0
        self.names: dict[str, Any] = {
            **vars(tools),
            "shown": self.line,
            "after": self._after,
            "ddip": ddip,
        }
        self._timers: list[Any] = []
        self._do(f"group = ddip.Group({size}, failure_grace=0.1)")
        self._must(None)
        self.model = Model([member.pid for member in self.group.members])
        self.prove()

    @property
    def group(self) -> ddip.Group:
        return self.names["group"]  # type: ignore[no-any-return]

    def end(self) -> None:
        """Shut the group down."""
        if "group" in self.names:
            self._do("group.shutdown()")
            self._must(None)

    # -- lines

    def _after(self, *args: Any) -> Any:
        self._timers.append(tools.after(*args))
        return self._timers[-1]

    def _do(self, line: str, around: str = "", stops: bool = False, lasts: float = 0.0) -> None:
        """Play a line; raise Broken if it does not end, or raises an undocumented exception.

        With `stops` the line raises KeyboardInterrupt by itself; it is expected to last `lasts` seconds.
        """
        line = f"with shown(){around}: {line}"
        self.program.append(line)
        self._timers = []
        bound = BOUND * load_factor() + lasts
        redirected = contextlib.redirect_stdout(self.heard), contextlib.redirect_stderr(self.heard)
        with Watch(bound, self.program) as watch, redirected[0], redirected[1]:
            try:
                exec(compile(line, f"<line {len(self.program)}>", "exec"), self.names)
            except KeyboardInterrupt as late:  # raised between the last statement of the block and its end
                self.line.error = self.line.error or late
            finally:
                signal.signal(signal.SIGINT, lambda *_: None)
                for timer in self._timers:
                    timer.__exit__()
        if watch.stacks:
            raise Broken(f"the line did not end in {bound:.0f} s; the notebook was here:\n{watch.stacks}")
        error = self.line.error
        if error is not None and not isinstance(error, DOCUMENTED):
            raise Broken(f"undocumented: {type(error).__name__}: {error}") from error
        self.happened = any(timer.happened for timer in self._timers)
        if type(error) is KeyboardInterrupt and not (self.happened or stops):
            raise Broken("a KeyboardInterrupt, and nobody has pressed stop") from error

    def _must(self, kind: type[BaseException] | tuple[type[BaseException], ...] | None, part: str = "") -> None:
        """Check the exception of the last line: its type, and a part of its text."""
        error = self.line.error
        if kind is None:
            if error is not None:
                raise Broken(f"failed: {type(error).__name__}: {error}") from error
        elif error is None or not isinstance(error, kind) or part not in str(error):
            wanted = kind.__name__ if isinstance(kind, type) else " or ".join(k.__name__ for k in kind)
            what = "nothing" if error is None else f"{type(error).__name__}: {error}"
            raise Broken(f"{what} instead of {wanted} {part}".rstrip()) from error

    def _cell(
        self,
        body: str,
        who: int,
        more: str = "",
        before: str = BEFORE,
        end: str = AFTER,
        around: str = "",
        lasts: float = 0.0,
    ) -> None:
        code = before.format(n=self.n, who=who) + body.strip("\n") + end
        self._do(f"group.run({as_literal(code)}{more})", around, lasts=lasts)

    # -- steps

    def play(self, step: Step) -> None:
        """Play one step, and prove that it did no harm."""
        self.heard.seek(0)
        self.heard.truncate()
        self.n += 1
        self.program.append(f"# {step.family}: {step.what}")
        getattr(self, "_" + re.sub(r"\W+", "_", step.family))(step, step.who % self.model.size)
        self.settle()
        self.prove()

    def settle(self) -> None:
        """Restart or repair the group if the model says so; ddip must agree."""
        if self.model.lost:
            self._do("group.restart()")
            self._must(None)
            self.model.members([member.pid for member in self.group.members], [])
            self.model.lost = ""
        elif self.model.dead:
            kept = self.model.live
            for rank in sorted(self.model.dead):
                self._do(f"wait_for_end_of_rank(group, {rank})")
                self._must(None)
            self._do("replaced = group.repair()")
            self._must(None)
            if self.names["replaced"] != sorted(self.model.dead):
                raise Broken(f"repair replaced {self.names['replaced']}, not {sorted(self.model.dead)}")
            self.model.members([member.pid for member in self.group.members], kept)

    def prove(self) -> None:
        """Prove that all ranks work together, and have the expected variables."""
        self.n += 1
        self._do(f"proof = prove(group, {self.n})")
        self._must(None)
        self.model.check(self.n, self.names["proof"])

    @property
    def _everybody(self) -> range:
        return range(self.model.size)

    def _well(self, ranks: Iterable[int]) -> None:
        self._must(None)
        ranks = list(ranks)
        self.model.count("seen", ranks)
        self.model.count("done", ranks)

    def _maybe(self, ranks: Iterable[int], done: bool = True) -> None:
        ranks = list(ranks)
        self.model.count("seen", ranks, surely=False)
        if done:
            self.model.count("done", ranks, surely=False)

    def _work(self, step: Step, who: int) -> None:
        self._cell(as_function("work", kinds.WORK[step.what]) + "work()", who)
        self._well(self._everybody)

    def _alone(self, step: Step, who: int) -> None:
        end = "" if step.what in kinds.IN_THE_END else AFTER
        before, body = BEFORE, kinds.ALONE[step.what]
        if end:
            before, end = before + AFTER.strip() + "\n", ""  # magics must start their line, and may end the code
        else:
            before += AFTER.strip() + "\n"
        self._cell(body, who, before=before, end=end)
        if step.what == "an alarm between cells":  # otherwise the alarm would count as the next cell's
            self._do("time.sleep(0.5)")
            self._must(None)
            self._maybe(self._everybody)
            return
        if step.what in kinds.HARMFUL:
            self._repair_only(who)
            return
        self._well(self._everybody)
        if step.what in kinds.FORGETFUL:
            self.model.forget(self._everybody)

    def _later(self, step: Step, who: int) -> None:
        first, second = kinds.LATER[step.what]
        n = self.n
        self._cell(first, who)
        self._well(self._everybody)
        if step.all:
            self.prove()
        self._cell(second.replace("<n>", str(n)), who)
        self._well(self._everybody)

    def _fault(self, step: Step, who: int) -> None:
        fault, name = kinds.FAULTS[step.what]
        call = "fault()" if step.all else "if rank == who: fault()"
        lines = {
            "before": f"{call}\nwork()",
            "in": f"work()\nfor i in range(2):\n    {call}\n    work()",
            "after": f"work()\n{call}",
        }[step.where]
        body = as_function("work", kinds.WORK[step.work]) + as_function("fault", fault) + lines
        self._cell(body, who)
        culprits = list(self._everybody) if step.all else [who]
        self._must(ddip.CellError)
        error = self.line.error
        assert isinstance(error, ddip.CellError)
        for rank, what in error.by_rank.items():
            if rank in culprits and what.name != name:
                raise Broken(f"rank {rank} raised {name}, and is said to have raised {what.name}: {error}")
            if rank not in culprits and not what.waited:
                raise Broken(f"rank {rank} raised nothing, and is said to have raised {what}: {error}")
        missing = [rank for rank in culprits if rank not in error.by_rank]
        if missing:
            raise Broken(f"nothing is said of the errors of ranks {missing}: {error}")
        self.model.count("seen", self._everybody, surely=name != "RankEnded")
        self.model.count("done", [rank for rank in self._everybody if rank not in culprits], surely=False)
        if name == "RankEnded":
            self.model.dead.update(culprits)

    def _whole(self, step: Step, who: int) -> None:
        code, name = kinds.WHOLE[step.what]
        self._do(f"group.run({as_literal(code)})")
        self._must(ddip.CellError, name or "")
        error = self.line.error
        assert isinstance(error, ddip.CellError)
        if set(error.by_rank) != set(self._everybody) and step.what not in kinds.OF_SOME:
            raise Broken(f"only ranks {set(error.by_rank)} are said to have failed: {error}")

    def _stop(self, step: Step, who: int) -> None:
        again = f", after({(step.ms + 300) / 1000}, press)" if step.all else ""
        self._cell(kinds.BUSINESS[step.what], who, around=f", after({step.ms / 1000}, press){again}")
        self._must(KeyboardInterrupt)
        self._maybe(self._everybody, done=False)
        self._wait_for_slow(step)

    def _wait_for_slow(self, step: Step) -> None:
        """Wait for ranks, because torch waits seconds for workers that were stopped as they started."""
        if step.what == "a data loader without end" or "a stop within an import" in kinds.KNOWN:
            self._do("wait_until_free(group)")
            self._must(None)

    def _stop_of_work(self, step: Step, who: int) -> None:
        body = as_function("work", kinds.WORK[step.what]) + "for i in range(10): work()"
        self._cell(body, who, around=f", after({step.ms / 1000}, press)")
        if self.line.error is not None:
            self._must(KeyboardInterrupt)
            self._maybe(self._everybody)
            self._wait_for_slow(step)
        else:
            self._well(self._everybody)

    def _time_out(self, step: Step, who: int) -> None:
        self._cell(kinds.BUSINESS[step.what], who, more=f", timeout={0.05 + step.ms / 1000}")
        self._must(ddip.errors.CellTimeout)
        self._maybe(self._everybody, done=False)
        self._wait_for_slow(step)

    def _some(self, step: Step, who: int) -> None:
        ranks, body = kinds.SOME[step.what]
        if step.what == "run on a rank that is not there":
            self._cell(body, who, more=f", ranks={ranks}")
            self._must(ddip.errors.BadInput)
            return
        ranks = [rank % self.model.size for rank in ranks]
        limit = ", timeout=0.3" if "barrier" in body else ""
        self._cell(body, who, more=f", ranks={ranks}{limit}")
        if limit:
            self._must(ddip.errors.CellTimeout)
            self._maybe(ranks, done=False)
        elif "raise" in body:
            self._must(ddip.CellError, f"rank {ranks[0]}: ValueError")
            self.model.count("seen", ranks)
        else:
            self._well(ranks)

    # -- transfers

    def _transfer(self, table: dict[str, kinds.Transfer], step: Step, who: int) -> tuple[kinds.Transfer, str]:
        transfer = table[step.what]
        return transfer, transfer.code.replace("<n>", str(self.n)).replace("<who>", str(who))

    def _push(self, step: Step, who: int) -> None:
        transfer, code = self._transfer(kinds.PUSHED, step, who)
        name = f"v{step.ms % 3}"
        stop = f", after({step.ms / 1000}, press)" if "and stop" in step.what else ""
        ranks = self._everybody if step.all or transfer.dies or stop or "one rank" in step.what else [who]
        more = "" if ranks == self._everybody else f", ranks={list(ranks)}"
        self._do(f"group.push({{'{name}': {self.n}, 'x': {code}}}{more})", stop, transfer.stops)
        if stop or transfer.stops:
            self._must(KeyboardInterrupt)
        elif transfer.dies:
            self._must((ddip.errors.TransferError, ddip.errors.GroupError), f"rank {who}: {transfer.fails}")
            self.model.dead.add(who)
        elif transfer.fails:
            self._must((ddip.errors.TransferError, ddip.errors.GroupError), transfer.fails)
        else:
            self._must(None)
            self.model.put(name, self.n, ranks)

    def _pull(self, step: Step, who: int) -> None:
        if step.what == "pull what is not there":
            self._do(f"group.pull(['_proof', 'never_there'], {who})")
            self._must(ddip.errors.TransferError, f"rank {who} has no")
            return
        transfer, code = self._transfer(kinds.PULLED, step, who)
        own = inspect.getsource(tools.Evaluated) if "Evaluated" in code else ""
        self._cell(f"{own}x = {code}", who)
        self._well(self._everybody)
        stop = f", after({step.ms / 1000}, press)" if "and stop" in step.what else ""
        pull = f"pull_all(['_proof', 'x'], {list(self._everybody)})" if step.all else f"pull(['_proof', 'x'], {who})"
        self._do(f"pulled = group.{pull}", stop, transfer.stops)
        if stop or transfer.stops:
            self._must(KeyboardInterrupt)
        elif transfer.fails:
            self._must((ddip.errors.TransferError, ddip.errors.GroupError), transfer.fails)
        else:
            self._must(None)
            found = self.names["pulled"][0] if step.all else [self.names["pulled"]]
            for values in found:
                if transfer.code == "<n>" and values["x"] != self.n:
                    raise Broken(f"pulled {values['x']}, not {self.n}")
        self.names.pop("pulled", None)
        if transfer.dies:
            self.model.dead.update(self._everybody if step.all else [who])
        else:
            self._do("group.run('x = None')")
            self._must(None)

    # -- faults of processes

    def _beside(self, step: Step, who: int) -> None:
        body = as_function("work", kinds.WORK[step.work]) + "for i in range(5): work()\ntime.sleep(0.05)"
        self._cell(body, who, around=f", asking(group, '{step.what}')")
        self._well(self._everybody)

    def _disturbed(self, step: Step, who: int) -> None:
        how, _, action = step.what.partition(" in ")
        size = self.model.size
        lines = {
            "push": f"group.push({{'v0': {self.n}, 'x': bytes(40_000_000)}})",
            "pull": f"group.pull(['_proof', 'x'], {who})",
            "change": f"group.change(ddip.group.members.placement.Request({2 + step.ms % 3}))",
            "repair": "group.repair()",
            "restart": "group.restart()",
            "info": "group.info()",
            "stacks": "group.stacks()",
        }
        killed, pid = set[int](), self.model.pids[who]
        if action == "repair":
            other = (who + 1) % size
            self._do(f"kill(rank(group, {other})); wait_for_end_of_rank(group, {other})")
            self._must(None)
            killed.add(other)
        if action == "pull":
            self._do("group.run('x = bytes(40_000_000)')")
            self._must(None)
        do = steps.HOW[how].format(who=who)
        around = f", after({step.ms / 1000}, {do})"
        if action == "a cell":
            body = as_function("work", kinds.WORK[step.work]) + "for i in range(20): work()"
            self._cell(body, who, around=around)
            self._maybe(self._everybody)
        else:
            self._do(lines[action], around)
        happened, failed = self.happened, self.line.error is not None
        if not happened or how.startswith("freeze"):
            self._must(None)
        if action == "push":
            self.model.put("v0", self.n, self._everybody, surely=False)
        if happened and how.startswith("kill the"):
            self.model.lost = how
            return
        if happened and how == "kill":
            killed.add(who)
            self._do(f"wait_until_noticed(group, {pid})")
            self._must(None)
        if failed and action == "a cell" and how == "stop":
            self._wait_for_slow(step)
        self._take_stock(killed, replaced=action == "restart")
        if action in ("push", "pull"):
            self._do("group.run('x = None')")
            self._must(None)

    def _repair_only(self, who: int) -> None:
        """Check a rank that has harmed itself: it is well, or a repair replaces it and no other."""
        self._must(None if self.line.error is None else ddip.CellError)
        self._maybe(self._everybody)
        self._do("replaced = group.repair()")
        self._must(None)
        replaced = self.names["replaced"]
        if replaced not in ([], [who]):
            raise Broken(f"repair replaced {replaced}, not rank {who} alone")
        healthy = [rank for rank in self._everybody if rank not in replaced]
        self.model.members([member.pid for member in self.group.members], healthy)

    def _take_stock(self, killed: set[int], replaced: bool) -> None:
        """Bring the group back after a disturbed action of unknown progress; a repair must suffice."""
        if not self.group.alive:
            self._do("group.restart()")
            self._must(None)
            self.model.members([member.pid for member in self.group.members], [])
            return
        former = list(self.model.pids)
        self._do("replaced = group.repair()")
        self._must(None)
        pids = [member.pid for member in self.group.members]
        healthy = [rank for rank in range(min(len(former), len(pids))) if rank not in killed and not replaced]
        self.model.members(pids, healthy)

    def _change(self, step: Step, who: int) -> None:
        size, former = int(step.what), self.model.size
        self._do(f"group.change(ddip.group.members.placement.Request({size}))")
        self._must(None)
        pids = [member.pid for member in self.group.members]
        if len(pids) != size:
            raise Broken(f"{len(pids)} ranks instead of {size}")
        self.model.members(pids, range(min(size, former)))

    def _life(self, step: Step, who: int) -> None:
        model, errors = self.model, ddip.errors
        what, _, then = step.what.partition(", and ")
        if what == "kill":
            self._do(f"kill(rank(group, {who}))")
            self._must(None)
            model.dead.add(who)
            if then != "a cell":
                self._do(f"wait_for_end_of_rank(group, {who})")
                self._must(None)
        if step.what == "kill, and a cell":
            self._cell("dist.barrier()", who)
            self._must((ddip.CellError, errors.GroupError), f"rank {who}")
            self._maybe(model.live)
        elif then == "info":
            self._do(
                f"assert group.info()[{who}].state == 'ended'; assert group.stacks()[{who}].place.state == 'ended'"
            )
            self._must(None)
        elif then == "push":
            self._do(f"group.push({{'v0': {self.n}}})")
            self._must(errors.GroupError, f"rank {who}")
        elif then == "pull":
            self._do(f"group.pull(['_proof'], {who})")
            self._must(errors.GroupError, f"rank {who}")
        elif then == "change":
            self._do(f"group.change(ddip.group.members.placement.Request({2 + step.ms % 3}))")
            if self.line.error is not None:
                self._must(errors.GroupError, f"rank {who}")
            else:
                raise Broken("changed, with a rank that is gone")
        elif then == "restart":
            model.lost = step.what
        elif then == "repair with names":
            source = model.live[step.ms % len(model.live)]
            source_variables = model.has[model.pids[source]]
            copied = {name: values for name, values in source_variables.items() if None not in values}
            self._do(f"group.repair({['_proof', *copied]}, {source})")
            self._must(None)
            model.members([member.pid for member in self.group.members], model.live)
            model.has[model.pids[who]].update(copied)
        elif what == "terminate":
            self._do(f"os.kill(rank(group, {who}), signal.SIGTERM)")
            self._must(None)
            model.dead.add(who)
        elif what == "kill all":
            self._do("[kill(member.pid) for member in group.members]")
            self._must(None)
            model.dead.update(self._everybody)
        elif what in ("kill the controller", "kill the preload process"):
            self._do(f"kill({what.split()[2]}(group)); wait_for_end_of_controller(group)")
            self._must(None)
            self._cell("dist.barrier()", who)
            self._must((ddip.CellError, errors.GroupError))
            model.lost = what
        elif what in ("freeze", "SIGSTOP for 40 s"):
            seconds = 0.5 if what == "freeze" else 40
            around = f", after(0, freeze, rank(group, {who}), {seconds})"
            self._cell("for i in range(5): dist.barrier()", who, around=around, lasts=seconds)
            self._well(self._everybody)
        elif what == "repair":
            self._do("assert group.repair() == []")
            self._must(None)
        elif what == "restart":
            model.lost = what
        elif what == "interrupt while nothing runs":
            self._do("group.interrupt()")
            self._must(None)
        elif what == "pull from a rank that is not there":
            self._do("group.pull(['_proof'], 9)")
            self._must(errors.BadInput)


class Watch:
    """Press the stop button if a line takes too long; end this process if that does not help."""

    def __init__(self, bound: float, program: Sequence[str]) -> None:
        self.stacks = ""
        self._bound, self._program = bound, program
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        if self._over.wait(self._bound):
            return
        with tempfile.TemporaryFile("w+") as file:
            faulthandler.dump_traceback(file, all_threads=True)
            file.seek(0)
            self.stacks = file.read()
        for _ in range(6):
            tools.press()
            if self._over.wait(5):
                return
        print(f"a line does not end, not even when it is interrupted:\n{self.stacks}", file=sys.__stdout__)
        print("\n".join(self._program), file=sys.__stdout__, flush=True)
        os._exit(OUT_OF_REACH)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
