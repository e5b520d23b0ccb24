"""A cluster of scripted engines, which fail on command, in no time: an implementation of ``ClusterApi``.

    group = ScriptedGroup(3)
    group.run("0: raise ValueError the cause\n1: wait\n2: sleep")

No process and no thread is started. An engine answers before ``execute`` returns, or when an event such as an abort
ends its work. ``tests/cluster`` shows what torch, ipyparallel and IPython do.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddip.cluster.cluster_api import EngineSpec, Listener, Message, Recipient, RemoteException, Reply, Request
from ddip.cluster.processes.host import LocalHost
from ddip.cluster.reach import Reach
from ddip.errors import GroupError
from ddip.group.group import Group
from ddip.group.members import placement
from ddip.protocol import on_rank
from ddip.protocol.cell_messages import CellOptions
from ddip.protocol.objects import pickling, shared
from ddip.protocol.objects.pickling import Loader, Pickled
from ddip.protocol.on_rank import RemoteCall
from ddip.protocol.reports import (
    CellReport,
    GroupUse,
    Hello,
    IterationReport,
    LostObjects,
    PackedObjects,
    Paths,
    Peeked,
    Place,
)

FIRST_PID = 1 << 28
"""Larger than any real PID."""
Answer = Callable[..., Any]


def group_use(collectives: int, messages: dict[str, int] | None = None) -> GroupUse:
    """Return a rank's report on a group that only its main thread uses."""
    return {
        "collectives": collectives,
        "messages": messages or {},
        "ranks": None,
        "by_python": collectives,
        "digest": 0,
        "positions": 0,
        "by_main": True,
        "by_threads": False,
        "may_begin": "no",
    }


class EngineEnds(BaseException):
    """Raised by a scripted answer: the engine ends instead of answering."""


class Silence(BaseException):
    """Raised by a scripted answer: the engine does not answer until it is interrupted."""


class Deafness(BaseException):
    """Raised by a scripted answer: the engine never answers."""


class ScriptedEngine:
    """One engine: its state and its scripted answers."""

    def __init__(self, number: int, environment: Mapping[str, str], also: Sequence[str]) -> None:
        self.number = number
        self.environment = dict(environment)
        self.also = list(also)
        self.names: dict[str, Any] = {}
        self.calls: list[str] = []
        """Targets of all calls so far."""
        self.begun = {"default cpu": group_use(0)}
        self.released = self.computes = False
        self.gpu_lost = ""
        self.iteration: IterationReport | None = None
        self.rank, self.size, self.groups = 0, 1, 1
        self.running: tuple[Request, str, Listener] | None = None
        """The pending request, and how it ends: ``wait``, ``sleep``, ``deaf``."""
        self.hello: Hello = {
            "version": on_rank.VERSION,
            "pid": FIRST_PID + number,
            "host": "here",
            "torch": "2.15",
            "cuda": True,
            "off": {},
            "native_off": [],
            "backends": ["gloo", "nccl"],
        }
        self.answers: dict[str, Answer] = {
            on_rank.make_hello.target: lambda: self.hello,
            on_rank.join_group.target: self._join,
            on_rank.leave_group.target: self._leave,
            on_rank.revive_wrappers.target: lambda: 0,
            on_rank.find_changed_settings.target: lambda: {},
            on_rank.take_over_settings.target: self.take_over_settings,
            on_rank.iteration_facts.target: lambda: {"unfinished": False, "gradients": {}, "models": []},
            on_rank.reset_iteration.target: lambda broken, models, is_same_group: {"cleared": [], "hooks": []},
            on_rank.list_snapshots.target: lambda failed: [],
            on_rank.hash_variables.target: lambda cells, after_fault: {
                "now": b"",
                "good": b"",
                "former": b"",
                "has_history": False,
                "at_rest": [],
                "is_cut": False,
            },
            on_rank.find_stepped_objects.target: lambda: ([], 0),
            on_rank.find_copied_ranks.target: lambda names, source, size: [],
            on_rank.rank_marks.target: lambda rank: [],
            on_rank.refuse_stale.target: lambda marks, size: [],
            on_rank.check_group.target: lambda: None,
            on_rank.append_part.target: self._add,
            on_rank.attach_load.target: self._attach,
            on_rank.apply_push.target: self._put,
            on_rank.settle_push.target: lambda: None,
            on_rank.lacking_names.target: lambda names: [name for name in names if name not in self.names],
            on_rank.drop_transfers.target: self._drop,
            on_rank.pack_variables.target: self._pack,
            on_rank.pull_part.target: lambda name, begin, end: self._packed(name).joined()[begin:end],
            on_rank.take_peek.target: self._take_peek,
            on_rank.part_of_peek.target: lambda number, name, begin, end: self._packed(name).joined()[begin:end],
            on_rank.drop_peek.target: lambda number: {"state": "finished"},
            on_rank.prepare_app.target: lambda module: None,
            on_rank.release_app.target: lambda module: None,
            on_rank.run_app_command.target: lambda module, text: f"{module}: {text}",
            on_rank.complete_code.target: lambda code, cursor: {"matches": sorted(self.names)},
            on_rank.rank_figures.target: self._figures,
            on_rank.current_vitals.target: lambda every, keep: self._vitals(),
            on_rank.set_collect.target: lambda collect: None,
            on_rank.main_thread_location.target: self._here,
            on_rank.waiting_location.target: self._here,
            on_rank.whole_stack.target: lambda: {"place": self._here(), "threads": {"main": "a stack"}},
            on_rank.main_thread_pulse.target: lambda: [0, 0.0],
            on_rank.main_thread_phase.target: lambda: "code" if self.running else "idle",
            on_rank.tcp_connections.target: lambda: [],
            on_rank.release_group.target: self._release,
            on_rank.forget_lost_objects.target: lambda: [],
            on_rank.adopt_group.target: lambda former_port, port: True,
            on_rank.begun_operations.target: lambda: self.begun,
            on_rank.line_of.target: lambda key, number: {"cell": 1, "line": 2},
            on_rank.set_groups_made.target: lambda count: None,
            on_rank.variable_names.target: lambda beginning: [n for n in self.names if n.startswith(beginning)],
        }
        """Functions that answer calls, by target."""
        self._before: tuple[int, dict[str, Any]] = 0, {}
        self._received: dict[int, Any] = {}
        self._began = 0.0

    def answer(self, call: RemoteCall[Any]) -> dict[str, Any]:
        """Answer a call as ``ddip.protocol.remote.call_target`` does on a rank."""
        self.calls.append(call.target)
        try:
            return {"ok": self.answers[call.target](*call.args)}
        except Exception as error:
            return {"error": type(error).__name__, "message": str(error), "traceback": f"traceback of {error}"}

    def _join(self, spec: Any) -> tuple[list[Any], list[int]]:
        self.rank, self.size, self.groups = spec.rank, spec.world_size, spec.groups
        self.released, self.begun = False, {"default cpu": group_use(0)}
        return [], []

    def _leave(self) -> LostObjects:
        return {"wrappers": 0, "meshes": 0, "subgroups": 0, "rpc": False, "gpu_lost": ""}

    def _add(self, load: int, part: bytes, first: bool, share: bool) -> str:
        self._received[load] = bytearray(part) if first else self._received[load] + part
        return ""

    def _attach(self, load: int, path: str, size: int) -> bool:
        self._received[load] = shared.map_file(path)
        return len(self._received[load]) == size

    def _put(
        self,
        push: int,
        places: list[Place],
        along: list[str],
        small: bytes = b"",
        paths: Paths | None = None,
    ) -> dict[str, Any]:
        if not all(self._attach(load, path, size) for load, (path, size) in (paths or {}).items()):
            return {"errors": {}, "unread": True, "replaces": False, "trained": []}
        errors, values, received = {}, {}, {0: bytearray(small)} if small else self._received
        pickled = {name: Pickled.of(received[load], sizes, begin) for name, load, begin, sizes in places}
        loader = Loader(pickled)
        for name in pickled:
            try:
                values[name] = loader.load(name)
            except Exception as error:
                errors[name] = f"{type(error).__name__}: {error}"
                break
        self._before = push, {**self.names}
        self.names.update({} if errors else values)
        return {"errors": errors, "unread": False, "replaces": False, "trained": []}

    def _drop(self, push: int = 0) -> None:
        if push and push == self._before[0]:
            self.names.clear()
            self.names.update(self._before[1])

    def _packed(self, name: str) -> Pickled:
        return pickling.pickle_value(self.names[name])[0]

    def _pack(self, names: list[str], most: int, share: bool, known: str) -> PackedObjects:
        packed = pickling.dump_all({name: self.names[name] for name in names if name in self.names}).pickled
        return {
            "values": {name: pickled.joined() for name, pickled in packed.items() if pickled.size <= most},
            "sizes": [(name, pickled.sizes) for name, pickled in packed.items()],
            "paths": {},
            "errors": {},
            "missing": [name for name in names if name not in self.names],
            "moved": [],
            "along": [],
            "shares": [],
            "wrappers": {},
        }

    def _take_peek(self, number: int, names: list[str], most: int, known: str) -> Peeked:
        return {**self._pack(names, most, False, []), "inside": ""}

    def _figures(self) -> dict[str, Any]:
        busy = self.running is not None
        return {
            "memory": 1000,
            "gpu": None,
            "busy": busy,
            "busy_for": 2.0 if busy else None,
            "doing": "",
            "seconds": 0.5,
        }

    def _vitals(self) -> dict[str, Any]:
        busy = self.running is not None
        known = {"at": time.monotonic(), "cell": 1 if busy else None, "place": self._here(), "cpu": 1.0, "steps": 0}
        known |= {"collectives": 0, "bars": [], "waited": 0.0, "looked": 0.0, "device": None}
        return {**self._figures(), **known}

    def _here(self) -> dict[str, Any]:
        if self.running is None:
            return {"state": "idle"}
        return {"function": "all_reduce" if self.running[1] == "wait" else "", "cell": 1, "line": 2, "source": "run()"}

    def _release(self, store: str, connections: list[Any]) -> bool:
        self.released = True
        cut_off, self.computes = self.computes, False
        if self.running is not None and self.running[1] == "wait":
            self.end("RuntimeError", "Connection closed by peer", waited="all_reduce")
        elif self.running is not None and self.running[1] == "compute":
            self.end("KeyboardInterrupt", waited="work on the GPU")
        return cut_off

    # -- cells

    def run(self, request: Request, word: str, rest: str, listener: Listener) -> None:
        """Run one line of a cell.

        The line is ``pass``, ``print TEXT``, ``raise NAME TEXT``, ``begin N`` collectives, ``die``, ``wait`` for other
        ranks, ``compute`` on the GPU with other ranks, ``lose`` the GPU, ``sleep``, or be ``deaf``.
        """
        self._began = time.time()
        self.running = request, word, listener
        match word:
            case "pass":
                self.end()
            case "print":
                listener(stream_message(rest))
                self.end()
            case "raise":
                name, _, text = rest.partition(" ")
                self.end(name, text)
            case "begin":
                self.begun = {"default cpu": group_use(self.begun["default cpu"]["collectives"] + int(rest))}
                self.end()
            case "catch":
                name, _, text = rest.partition(" ")
                self.end(caught={"name": name, "message": text, "traceback": ["caught"]})
            case "help":
                self.end(payload=[{"source": "page", "data": {"text/plain": rest}}])
            case "lose":
                self.gpu_lost = rest
                self.end("AcceleratorError", rest)
            case "compute":
                self.computes = True
            case "die":
                raise EngineEnds
            case "wait" | "sleep" | "deaf":
                pass
            case _:
                raise AssertionError(f"{word} is no word of a script")

    def take_over_settings(self, changed: dict[str, bytes]) -> list[tuple[str, str]]:
        """Take over process settings from another rank."""
        return []

    def end(
        self, name: str = "", text: str = "", waited: str = "", caught: Any = None, payload: Sequence[Any] = ()
    ) -> None:
        """End the cell, with an error `name` or well."""
        assert self.running is not None
        (request, _, _), self.running = self.running, None
        report: CellReport = {
            "released": self.released,
            "state": "ours",
            "rank": self.rank,
            "size": self.size,
            "begun": self.begun,  # type: ignore[typeddict-item]
            "groups": self.groups,
            "changes": {},
            "at": time.time(),
            "seconds": time.time() - self._began,
        }
        if self.gpu_lost:
            report.update(gpu="lost", gpu_lost=self.gpu_lost)
        if self.iteration is not None:
            report["iteration"] = self.iteration
        if name:
            report["waited"] = waited
        if caught is not None:
            report["caught"] = caught
        request.set_result(
            Reply(
                raised=RemoteException(name, text, f"traceback of {name}") if name else None,
                report=report,
                payload=[*payload],
            )
        )
        request.output.set_result(None)

    def interrupt(self, msg_id: str | None) -> None:
        """Raise KeyboardInterrupt in a cell or call that sleeps."""
        if self.running is None or msg_id not in (None, self.running[0].msg_id):
            return
        if self.running[1] == "sleep":
            self.end("KeyboardInterrupt")
        elif self.running[1] == "a call":
            (request, _, _), self.running = self.running, None
            request.set_result(Reply({"error": "KeyboardInterrupt", "message": "", "traceback": ""}))


def stream_message(text: str, name: str = "stdout") -> Message:
    """Return the message of written text."""
    return {"header": {"msg_type": "stream"}, "content": {"name": name, "text": f"{text}\n"}}


Script = Callable[[ScriptedEngine], None]


def do_nothing(engine: ScriptedEngine) -> None:
    """Do nothing: the default script of an engine."""


def _request_to_ended() -> Request:
    """Return a request that its engine did not live to answer."""
    request = Request("")
    request.output.set_result(None)
    request.set_result(Reply(ended=True))
    return request


class ScriptedCluster:
    """A cluster whose engines are objects of this process."""

    def __init__(self, on_start: Script) -> None:
        self._on_start = on_start
        self._folder = tempfile.TemporaryDirectory(prefix="ddip-scripted-")
        self.run_folder = Path(self._folder.name)
        self.hosts = [LocalHost(self.run_folder)]
        self.spawned = ""
        self.off: dict[str, dict[str, list[str]]] = {}
        self.exits: dict[int, int | None] = {}
        self.engines: dict[int, ScriptedEngine] = {}
        self.connected = False
        self.controller_ended = False
        self.listeners: dict[str, Listener] = {}
        self.interrupted: list[int] = []
        """Engine numbers, one per interrupt."""
        self._requests = 0

    @property
    def live(self) -> set[int]:
        return self.engines.keys() - self.exits.keys()

    def ensure_controller(self) -> None:
        if self.controller_ended:
            raise GroupError("the controller process ended; %makedip -r restarts the group")

    def wait_for_hosts(self, deadline: float, progress: Callable[[str], None]) -> None:
        pass

    def replace_host(self, number: int, name: str, reach: Reach, deadline: float) -> None:
        raise AssertionError("scripts have one host")

    def host_of(self, engine: int) -> LocalHost:
        return self.hosts[0]

    def stopped(self) -> str:
        return ""

    def carry_on(self) -> None:
        pass

    def log_tail(self, engine: int) -> list[str]:
        return [f"last words of engine {engine}"]

    def start(
        self,
        engines: Sequence[EngineSpec],
        also: Sequence[str],
        deadline: float,
        on_up: Callable[[int], None],
    ) -> dict[int, Hello]:
        self.connected = True
        first = max(self.engines, default=-1) + 1
        for number, spec in enumerate(engines, first):
            self.engines[number] = engine = ScriptedEngine(number, spec.environment, also)
            self._on_start(engine)
            on_up(number - first + 1)
        return {number: self.engines[number].hello for number in range(first, first + len(engines))}

    def stop_engines_but(self, keep: Collection[int]) -> None:
        for number in self.live - set(keep):
            self.end_engine(number, 0)

    def stop(self) -> None:
        self._folder.cleanup()

    def end_engine(self, number: int, code: int) -> None:
        """End the process of engine `number`: its pending request returns without an answer."""
        self.exits[number] = code
        engine = self.engines[number]
        if engine.running is not None:
            (request, _, _), engine.running = engine.running, None
            request.set_result(Reply(ended=True))
            request.output.set_result(None)

    def _request(self) -> Request:
        self._requests += 1
        return Request(f"request {self._requests}")

    def execute(self, code: str, to: Sequence[Recipient], asked: CellOptions, *, history: bool = True) -> list[Request]:
        return [self._execute(one.engine, code, one.listener) for one in to]

    def _execute(self, engine: int, code: str, listener: Listener) -> Request:
        if engine not in self.live:
            return _request_to_ended()
        request, scripted_engine = self._request(), self.engines[engine]
        self.listeners[request.msg_id] = listener
        lines = dict(line.split(": ", 1) for line in code.splitlines() if ": " in line)
        word, _, rest = lines.get(
            str(scripted_engine.rank), "pass" if lines or code.startswith("assert") else code
        ).partition(" ")
        try:
            scripted_engine.run(request, word, rest, listener)
        except EngineEnds:
            self.end_engine(engine, -int(rest or signal.SIGKILL))
        return request

    def call(self, engine: int, call: RemoteCall[object]) -> Request:
        if engine not in self.live:
            return _request_to_ended()
        request, scripted_engine = self._request(), self.engines[engine]
        try:
            request.set_result(Reply(scripted_engine.answer(call)))
        except Silence:
            scripted_engine.running = request, "a call", lambda message: None
        except Deafness:
            scripted_engine.running = request, "deaf", lambda message: None
        except EngineEnds:
            self.exits[engine] = -signal.SIGKILL
            request.set_result(Reply(ended=True))
        return request

    def call_on_control_channel(
        self, engine: int, call: RemoteCall[object]
    ) -> concurrent.futures.Future[dict[str, Any]]:
        if engine not in self.live:
            raise KeyError(engine)
        answer: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        with contextlib.suppress(Silence, Deafness):
            answer.set_result(self.engines[engine].answer(call))
        return answer

    def interrupt(self, engine: int, msg_id: str | None) -> concurrent.futures.Future[dict[str, Any]]:
        if engine not in self.live:
            raise KeyError(engine)
        self.interrupted.append(engine)
        self.engines[engine].interrupt(msg_id)
        done: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        done.set_result({})
        return done

    def send_comm(self, engine: int, message: Message, listener: Listener) -> str:
        if engine not in self.live:
            raise KeyError(engine)
        request = self._request()
        self.listeners[request.msg_id] = listener
        return request.msg_id

    def stop_listening(self, msg_id: str) -> None:
        self.listeners.pop(msg_id, None)


class ScriptedGroup(Group):
    """A group of scripted engines; `script` is called with each new engine, and may raise."""

    def __init__(self, n: int | None = 2, script: Script = do_nothing, **options: Any) -> None:
        self.script = script
        super().__init__(n, **options)

    def _new_cluster(self, request: placement.Request) -> ScriptedCluster:
        return ScriptedCluster(lambda engine: self.script(engine))

    @property
    def scripted(self) -> ScriptedCluster:
        """Return the scripted cluster."""
        assert isinstance(self.cluster, ScriptedCluster)
        return self.cluster

    def engine(self, rank: int) -> ScriptedEngine:
        """Return the engine that `rank` runs in."""
        return self.scripted.engines[self.members[rank].engine]


def press_stop() -> None:
    """Press the stop button."""
    os.kill(os.getpid(), signal.SIGINT)


def press_stop_once(answer: Any) -> Callable[..., Any]:
    """Return a function that returns `answer`; its first call presses the stop button.

    A request that is repeated, such as one for a rank's pulse, would press it again after the cell.
    """
    presses = iter([press_stop])

    def press_and_answer(*_: Any) -> Any:
        next(presses, lambda: None)()
        return answer

    return press_and_answer
