"""The agent of a host: one process, started there by the notebook through ssh, a scheduler or an engine.

    notebook  --stdin, JSON-->  agent  --socket pair-->  preload process  --fork-->  ranks (engines)
              <-stdout, JSON--

Run as ``python -P -m ddip.cluster.hosts.agent``. It does on its host what the notebook does on its own: it requests
forks from the preload process, calls the functions of ``on_host.py``, and ends processes that ranks leave behind. It
imports nothing big, so it always answers. First it writes MARKER, since the shell that starts it may print. It receives

    {"begin": {...}}                the fields of `Begin`, once

and then both sides send

    {"facts": {...}}                name, hardware and software of this host, with the run folder
    {"fork": id, ...}, {"end": id}  and the reports on children: ``children.py``
    {"mark": id}                    leave earlier output out of the log in the report of a child's end
    {"ask": id, "function": ..., "args": [...]}     ->  {"answer": id, "value": ...} or {"answer": id, "error": ...}
    {"listen": [path...], "ask": id}    create sockets here that are relayed to the controller's (``relay.py``)
    {"beat": n}                     both ways, every BEAT_SECONDS

It ends, with all its processes, when its stdin ends, on SIGTERM or SIGHUP, and when the notebook's host has
acknowledged nothing for too long, or behind a relay has sent no beat (``links.py``). If it is killed, the preload
process ends, and then the ranks, each on the kernel's signal.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn, TypedDict

from ddip.cluster.attach.far_end import ADDRESS
from ddip.cluster.hosts.relay import FRAME, Relay, Sender
from ddip.cluster.processes import host, links, on_host, ownership, preload_client, processes
from ddip.cluster.processes.children import Child
from ddip.cluster.processes.exit_diagnosis import EngineLogs
from ddip.cluster.processes.processes import Proc
from ddip.guard import Guard

MARKER = b"\n#ddip agent 1\n"
"""Separates the shell's output from the protocol, whose version is the number in it."""
PROFILE = "profile"
"""IPython profile of the ranks, in the run folder, so that ipyparallel's files are removed with it."""
BEGIN_SECONDS = 30
"""Limit of the wait for the first message, which the notebook sends as soon as it has read MARKER."""
LOOK_SECONDS = 0.5
"""Interval between checks of the connection."""
FULL_BYTES = 1 << 16
"""Free space in the run folder below which the end of a process is said to have happened on a full disk."""


class Begin(TypedDict):
    """The first message to the agent."""

    notebook: str
    """Name of the notebook, for the titles of processes."""
    variables: dict[str, str]
    """Variables of the notebook's environment that the ranks get."""
    directory: str
    """Working directory of the ranks: the notebook's, or another; empty for the home directory."""
    path: list[str]
    """The notebook's folders for modules; the ones that exist here come first on ``sys.path``."""
    relayed: bool
    """True if a relay stands between, which acknowledges in the notebook's place; its beats then come in time."""


class Agent:
    """The ranks of one notebook on this host, and the run folder that they share."""

    def __init__(self, near: Connection, far: Connection) -> None:
        self._near, self._far = near, Sender(far, "ddip-sender")
        self._guard = Guard("the agent of this host failed in one step")
        self._leaving = threading.Lock()
        self._relay = Relay(self._far.send_frame, "ddip-relay")
        self._children: dict[int, Child] = {}
        self._started: dict[int, list[Proc]] = {}
        self._logs = EngineLogs()
        signal.alarm(BEGIN_SECONDS)  # ends the process: a notebook that is lost before its first message sends no beats
        begin: Begin = json.loads(near.recv_bytes())["begin"]
        signal.alarm(0)
        self._watch = links.Watch(_ssh_ports, begin.get("relayed", False))
        os.environ.update(begin["variables"])
        os.environ["JPY_SESSION_NAME"] = begin["notebook"]
        ownership.clear_up_orphans()
        self.run_folder = ownership.make_run_folder()
        (self.run_folder / PROFILE).mkdir(mode=0o700)
        ownership.Record(Proc.of(os.getpid()), (), "", "").write(self.run_folder)
        self.missing = _change_directory(begin["directory"])
        modules = on_host.modules_folder(self.run_folder)
        modules.mkdir(mode=0o700)
        first = [str(modules), os.getcwd(), *(folder for folder in begin["path"] if os.path.exists(folder))]
        sys.path[:] = [*first, *(entry for entry in sys.path if entry and entry not in first)]
        self._host = host.LocalHost(self.run_folder)
        if preload_client.can_fork():
            preload_client.ensure_process()

    def serve(self) -> NoReturn:
        """Send the host's facts, and handle the notebook's messages until stdin ends; then end the process."""
        self.say(
            facts={
                **on_host.collect_facts(),
                "run_folder": str(self.run_folder),
                "address": _own_address(),
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
                        self._handle_message(json.loads(message))
        self.leave()

    def say(self, **message: Any) -> None:
        """Send the notebook a message."""
        self._far.say(json.dumps(message).encode())  # if the notebook has ended, stdin ends

    def _handle_message(self, message: dict[str, Any]) -> None:
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
                self._logs.cell_begins(number)
            case {"listen": paths, "ask": number}:
                self._answer(number, lambda: self._relay.listen(paths))
            case {"ask": number, "function": name, "args": args}:
                called = lambda: getattr(on_host, name)(*args)  # noqa: E731
                threading.Thread(target=self._answer, args=(number, called), daemon=True).start()

    def _fork(self, number: int, request: dict[str, Any]) -> None:
        if not preload_client.can_fork():
            self.say(refused=number, why=f"{sys.platform} cannot fork; ranks on other hosts need Linux")
            return
        mark = {processes.MARKED: processes.MARK}  # read again, as IPython's folder may be read-only by now
        common = host.process_environment(self.run_folder, preload_client.notebook_name(), mark)
        request["env"] = {**common, **request["env"]}
        self._logs.opened(number, self.run_folder / request["log"])
        child = self._children[number] = self._host.fork(**request)
        child.pid.add_done_callback(lambda done: self._report_fork(number, child))
        child.exit.add_done_callback(lambda done: self._report_exit(number, child))

    def _report_fork(self, number: int, child: Child) -> None:
        error = child.pid.exception()
        if error is None:
            self._started[number] = processes.find_existing([child.pid.result()])
            self.say(forked=number, pid=child.pid.result())
        else:
            del self._children[number]
            self.say(refused=number, why=str(error))

    def _report_exit(self, number: int, child: Child) -> None:
        if self._children.pop(number, None) is None or self._leaving.locked():
            return  # while the agent ends, the notebook reports that the host is lost, which says more
        text = "\n".join(self._logs.tail(number))
        if shutil.disk_usage(self.run_folder).free < FULL_BYTES:
            text = "\n".join(filter(None, (text, f"no space is left in {self.run_folder.parent}")))
        self.say(exited=number, code=child.exit.result(), log=text)
        # its children hold its connections open, and the other ranks would wait for them
        started = self._started.pop(number, [])
        self._guard.start_thread("ddip-end", processes.end_processes, started)

    def _answer(self, number: int, function: Callable[[], object]) -> None:
        try:
            self.say(answer=number, value=function())
        except Exception as error:
            self.say(answer=number, error=f"{type(error).__name__}: {error}")

    # -- the end

    def _beat(self) -> None:
        """Send a beat every BEAT_SECONDS; end the agent once the notebook's host acknowledges none."""
        last_beat = 0.0
        while True:
            with self._guard:
                now = time.monotonic()
                if now > last_beat + links.BEAT_SECONDS:
                    last_beat = now
                    self.say(beat=now)
                if self._watch.is_lost():
                    self.leave()
            time.sleep(LOOK_SECONDS)

    def leave(self) -> NoReturn:
        """End the ranks and all processes that they started, remove every file, and exit; never raises."""
        self._leaving.acquire()  # never released: a second caller waits until the process exits
        with contextlib.suppress(BaseException):
            processes.end_processes([process for started in self._started.values() for process in started])
            preload_client.end_process()
        with contextlib.suppress(BaseException):
            ownership.remove_files(self.run_folder, "", "")
        os._exit(0)


def _change_directory(directory: str) -> str:
    """Change to `directory`, or to the home directory if that fails, and return the reason of the failure."""
    try:
        os.chdir(os.path.expanduser(directory or "~"))
    except OSError as error:
        with contextlib.suppress(OSError):
            os.chdir(os.path.expanduser("~"))
        if isinstance(error, FileNotFoundError):
            return f"{directory} does not exist"
        return f"{directory} cannot be entered ({error.strerror})"
    return ""


def _own_address() -> str:
    """Return the address at which the notebook's host reaches this one; empty if unknown.

    The engine, ssh or Slurm supplies it.
    """
    words = os.environ.get("SSH_CONNECTION", "").split()
    if ADDRESS in os.environ:
        return os.environ.pop(ADDRESS)
    if len(words) == 4:
        return words[2]
    notebook = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")
    return on_host.find_route(notebook)[0] if notebook else ""


def _ssh_ports() -> list[tuple[int, int]]:
    """Return the (local, remote) ports of the ssh connection that started the agent, if there is one."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    return [(int(words[3]), int(words[1]))] if len(words) == 4 else []


def main() -> None:
    """Write MARKER, and serve the notebook on stdin and stdout."""
    os.umask(os.umask(0o077) & 0o077)  # a mask of the owner's own bits would make the run folder unusable
    near, far = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # prints of any code in this process go to ssh's stderr
    os.write(far.fileno(), MARKER)
    try:
        agent = Agent(near, far)
    except EOFError:
        sys.exit("stdin ended before the notebook's first message; does ~/.ssh/config set StdinNull for this host?")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: threading.Thread(target=agent.leave, daemon=True).start())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a scheduler's warning to all processes
    agent.serve()


if __name__ == "__main__":
    main()
