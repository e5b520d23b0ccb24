"""The agent of a host: one process, which the notebook starts there, by ssh or by a scheduler.

    notebook  --stdin, JSON-->  agent  --socket pair-->  warm process  --fork-->  ranks (engines)
              <-stdout, JSON--

Run as ``python -P -m ddip.cluster.hosts.agent``. It does on its host what the notebook does on its own: it has the warm
process fork, answers what is asked of processes (``on_host.py``), and ends what ranks leave behind. It imports nothing
big, so it always answers. First it says MARKER, since the shell that starts it may print; then, after

    {"begin": {...}}                what `Begin` has

    {"facts": {...}}                what this host is, with the folder of this run
    {"fork": id, ...}, {"end": id}  and what comes back: ``children.py``
    {"ask": id, "function": ..., "args": [...]}     ->  {"answer": id, "value": ...} or {"answer": id, "error": ...}
    {"listen": [path...], "ask": id}    sockets here that lead to the controller's (``relay.py``)
    {"beat": n}                     both ways, every so often

It leaves, and takes everything with it, when its stdin ends, on SIGTERM or SIGHUP, and when the notebook's host has
acknowledged nothing for too long (``links.py``). Killed, it is followed by the warm process, and that by the ranks: the
kernel tells them.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypedDict

from ddip.cluster.attach.far_end import ADDRESS
from ddip.cluster.hosts.relay import FRAME, Relay, Sender
from ddip.cluster.processes import host, links, on_host, ownership, preload_client, processes
from ddip.cluster.processes.children import Child
from ddip.cluster.processes.processes import Proc
from ddip.guard import Guard

MARKER = b"\n#ddip agent 1\n"
"""Its number is the version of what travels after it."""
PROFILE = "profile"
"""IPython's profile of the ranks, in the run folder: what ipyparallel keeps goes with that."""
LOOK_SECONDS = 0.5
"""How often the connection is looked at."""
LOG_BYTES = 1 << 16
"""Of what a process has logged when it ended, the end."""


class Begin(TypedDict):
    """What the agent is told first."""

    notebook: str
    """What to call the notebook where people look at processes."""
    variables: dict[str, str]
    """Of the notebook's environment, for the ranks."""
    directory: str
    """Where the ranks are to begin: the notebook's, or another; empty for the home directory."""
    path: list[str]
    """The notebook's own folders for modules: those that are here, too, come first."""


class Agent:
    """One notebook, its ranks on this host, and the run folder that they share."""

    def __init__(self, near: Connection, far: Connection) -> None:
        self._near, self._far = near, Sender(far, "ddip-sender")
        self._guard = Guard("the agent of this host failed in one step")
        self._once = threading.Lock()
        self._watch = links.Watch(_ports)
        self._relay = Relay(self._far.send_frame, "ddip-relay")
        self._children: dict[int, Child] = {}
        self._started: dict[int, list[Proc]] = {}
        self._logs: dict[int, Path] = {}
        self._marks: dict[int, int] = {}
        """Bytes of each log from before the last cell."""
        begin: Begin = json.loads(near.recv_bytes())["begin"]
        os.environ.update(begin["variables"])
        os.environ["JPY_SESSION_NAME"] = begin["notebook"]
        ownership.clear_up_orphans()
        self.run_folder = ownership.make_run_folder()
        (self.run_folder / PROFILE).mkdir(mode=0o700)
        ownership.Record(Proc.of(os.getpid()), (), "", "").write(self.run_folder)
        self.missing = _enter(begin["directory"])
        modules = on_host.modules(self.run_folder)
        modules.mkdir(mode=0o700)
        here = [str(modules), os.getcwd(), *(folder for folder in begin["path"] if os.path.exists(folder))]
        sys.path[:] = [*here, *(entry for entry in sys.path if entry and entry not in here)]
        self._host = host.LocalHost(self.run_folder)
        mark = {processes.MARKED: processes.MARK}
        self._environment = host.environment(self.run_folder, preload_client.notebook(), mark)
        if preload_client.possible():
            preload_client.begin()

    def serve(self) -> NoReturn:
        """Do what the notebook asks for, until it is gone."""
        self.say(
            facts={
                **on_host.facts(),
                "run_folder": str(self.run_folder),
                "address": _address(),
                "missing": self.missing,
            }
        )
        threading.Thread(target=self._beat, name="ddip-beat", daemon=True).start()
        with contextlib.suppress(EOFError, OSError):
            while True:
                message = self._near.recv_bytes()
                with self._guard:
                    self._watch.heard()
                    if message[0] == FRAME:
                        self._relay.heard(message)
                    else:
                        self._heard(json.loads(message))
        self.leave()

    def say(self, **message: Any) -> None:
        """Tell the notebook."""
        self._far.say(json.dumps(message).encode())  # if it is gone, stdin tells

    def _heard(self, message: dict[str, Any]) -> None:
        match message:
            case {"fork": number, **request}:
                self._fork(number, request)
            case {"end": number}:
                child = self._children.get(number)
                if child is None:
                    self.say(exited=number, code=None)
                else:
                    child.end()
            case {"mark": number}:
                with contextlib.suppress(KeyError, OSError):  # it has ended
                    self._marks[number] = self._logs[number].stat().st_size
            case {"listen": paths, "ask": number}:
                self._answer(number, lambda: self._relay.listen(paths))
            case {"ask": number, "function": name, "args": args}:
                called = lambda: getattr(on_host, name)(*args)  # noqa: E731
                threading.Thread(target=self._answer, args=(number, called), daemon=True).start()

    def _fork(self, number: int, request: dict[str, Any]) -> None:
        if not preload_client.possible():
            self.say(refused=number, why=f"{sys.platform} cannot fork; ranks on other hosts need Linux")
            return
        request["env"] = {**self._environment, **request["env"]}
        self._logs[number] = Path(self.run_folder, request["log"])
        child = self._children[number] = self._host.fork(**request)
        child.pid.add_done_callback(lambda done: self._forked(number, child))
        child.exit.add_done_callback(lambda done: self._exited(number, child))

    def _forked(self, number: int, child: Child) -> None:
        error = child.pid.exception()
        if error is None:
            self._started[number] = processes.existing([child.pid.result()])
            self.say(forked=number, pid=child.pid.result())
        else:
            del self._children[number]
            self.say(refused=number, why=str(error))

    def _exited(self, number: int, child: Child) -> None:
        if self._children.pop(number, None) is None or self._once.locked():
            return  # or this leaves, and they with it: that the host is lost says more
        text = ""
        with contextlib.suppress(OSError):
            log = self._logs.pop(number).read_bytes()
            begin = self._marks.pop(number, 0)
            if begin <= len(log):  # else it has begun anew within the cell
                log = log[begin:]
            text = log[-LOG_BYTES:].decode(errors="replace")
        self.say(exited=number, code=child.exit.result(), log=text)
        # what it had forked holds its connections, and the other ranks would wait for them
        started = self._started.pop(number, [])
        self._guard.start_thread("ddip-end", processes.end_processes, started)

    def _answer(self, number: int, function: Callable[[], object]) -> None:
        try:
            self.say(answer=number, value=function())
        except Exception as error:
            self.say(answer=number, error=f"{type(error).__name__}: {error}")

    # -- the end

    def _beat(self) -> None:
        """Say something every so often, and leave when the notebook's host does not take it."""
        said = 0.0
        while True:
            with self._guard:
                now = time.monotonic()
                if now > said + links.BEAT_SECONDS:
                    said = now
                    self.say(beat=now)
                if self._watch.is_lost():
                    self.leave()
            time.sleep(LOOK_SECONDS)

    def leave(self) -> NoReturn:
        """End the ranks and all that they have started, and remove every file."""
        self._once.acquire()  # never released: whoever comes second waits for the end
        with contextlib.suppress(BaseException):
            processes.end_processes([process for started in self._started.values() for process in started])
            preload_client.end()
        with contextlib.suppress(BaseException):
            ownership.remove_files(self.run_folder, "", "")
        os._exit(0)


def _enter(directory: str) -> str:
    """Make `directory`, or the home directory, the working one; returns what is the matter with it, if it cannot be."""
    try:
        os.chdir(os.path.expanduser(directory or "~"))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.chdir(os.path.expanduser("~"))
        gone = isinstance(error, FileNotFoundError)
        return f"{directory} is not there" if gone else f"{directory} cannot be entered ({error.strerror})"
    return ""


def _address() -> str:
    """The address of this host towards the notebook, as ssh, Slurm or its engines know it; empty: nobody does."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    if ADDRESS in os.environ:
        return os.environ.pop(ADDRESS)
    if len(words) == 4:
        return words[2]
    notebook = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return on_host.route(notebook)[0] if notebook else ""


def _ports() -> list[tuple[int, int]]:
    """Of the connection by which ssh has come in: ours and theirs."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return [(int(words[3]), int(words[1]))] if len(words) == 4 else []


def main() -> None:
    """Entry point."""
    near, far = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what anybody prints here is for ssh's stderr
    os.write(far.fileno(), MARKER)
    try:
        agent = Agent(near, far)
    except EOFError:
        return
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: threading.Thread(target=agent.leave, daemon=True).start())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    agent.serve()


if __name__ == "__main__":
    main()
