"""The notebook's side of another host: a local process that connects to the agent there (``agent.py``)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from ddip.cluster import ssh
from ddip.cluster.hosts import agent, beats
from ddip.cluster.hosts.relay import FRAME, Relay, Sender
from ddip.cluster.processes import links, on_host, preload_client, processes
from ddip.cluster.processes.children import Child, Children
from ddip.cluster.processes.host import ASK_SECONDS, HostLost, wait_for
from ddip.cluster.processes.on_host import Facts
from ddip.errors import GroupError
from ddip.guard import Guard

P = ParamSpec("P")
R = TypeVar("R")
FORWARDED = ("NCCL_", "GLOO_", "TORCH", "OMP_", "MKL_", "HF_", "CUDA_LAUNCH_BLOCKING", "PYTHONHASHSEED")
"""Variables of the notebook's environment, or their prefixes, that ranks on other hosts also get."""
SHELL_LINE = f"{ssh.SHELL_MARKER}\n".encode()
NOISE_LINES, NOISE_BYTES = 12, 4096
LOOK_SECONDS = 1.0
"""Interval between checks of the connection."""
PAUSE_SECONDS = 0.02
"""Pause after a message that cannot be used."""


class RemoteHost:
    """One host: the local process that connects to it, and the agent at its other end.

    The constructor starts `command`, which starts the agent, and does not wait for it. `name` is the user's name for
    the host, `directory` the requested folder of its ranks; `relayed`: a relay such as ProxyJump is between. Raises
    GroupError if the program of `command` is not on the PATH.
    """

    def __init__(self, name: str, command: Sequence[str], directory: str, relayed: bool = False) -> None:
        self.name = name
        self.lost = ""
        self.run_folder = Path()
        self.address = self.missing = ""
        self._facts: Future[Facts] = Future()
        self._pending: dict[int, Future[Any]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self.shell_has_run = False
        """True once the host's shell has got as far as ddip's command, if ssh is the way there."""
        self._agent_runs = False
        """True once the agent has written its MARKER; earlier, a line of the host's shell could read messages."""
        self._guard = Guard(f"a message of the agent on {name} could not be used", pause_seconds=PAUSE_SECONDS)
        self._before = bytearray()
        """The end of the host's output on stdout before the agent runs."""
        self._output = bytearray()
        """The end of the output on stderr."""
        try:
            self._process = subprocess.Popen(
                [*((sys.executable, "-P", "-m", beats.__name__) if relayed else ()), *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**os.environ, processes.MARKED: processes.MARK},
                start_new_session=True,
            )
        except FileNotFoundError:
            raise GroupError(f"{name}: {command[0]} is not on the PATH of the notebook") from None
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to_agent = Sender(Connection(os.dup(self._process.stdin.fileno()), readable=False), f"ddip-host-{name}")
        self._from_agent = Connection(os.dup(self._process.stdout.fileno()), writable=False)
        self._process.stdin.close()
        self._process.stdout.close()
        self._relay = Relay(self._to_agent.send_frame, f"ddip-relay-{name}")
        self._link = self._watch_link(relayed=False)
        self.children = Children(self._send, lambda pid: None)  # only the agent can kill them
        self._begin: agent.Begin = {
            "notebook": preload_client.notebook_name(),
            "variables": {name: value for name, value in os.environ.items() if name.startswith(FORWARDED)},
            "directory": directory,
            "path": _portable_path(),
            "relayed": relayed,
        }
        self._noise = threading.Thread(target=self._read_noise, name=f"ddip-host-{name}", daemon=True)
        self._noise.start()
        self._reader = threading.Thread(target=self._read, name=f"ddip-host-{name}", daemon=True)
        self._reader.start()
        threading.Thread(target=self._watch, name=f"ddip-host-{name}", daemon=True).start()

    @property
    def pid(self) -> int:
        """PID of the local process that connects to the host."""
        return self._process.pid

    @property
    def silent(self) -> str:
        """Describe the host's silence, with a remedy, if its agent sends no beats any more; empty otherwise."""
        if self.lost or not self._facts.done() or self._link.silence < links.SILENT_SECONDS:
            return ""
        return (
            f"{self.name} has sent nothing for {self._link.silence:.0f} s: if its agent or sshd is stopped, continue "
            f"that process, or give the host up with `kill {self.pid}` on the notebook's machine"
        )

    @property
    def facts(self) -> Facts:
        """The host's facts; waits until the host has reported them. Raises HostLost."""
        return self._facts.result()

    def wait(self, seconds: float) -> None:
        """Wait until the host has reported its facts; raise HostLost, or TimeoutError after `seconds`."""
        self._facts.result(seconds)

    @property
    def exit_code(self) -> int | None:
        """Exit code of the local process; None while it runs."""
        return self._process.poll()

    @property
    def output_text(self) -> str:
        """The last lines of output outside the protocol, stderr's at the end."""
        lines = b"\n".join((self._before, self._output)).decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if line.strip() and line != ssh.SHELL_MARKER][-NOISE_LINES:])

    def fork(
        self,
        module: str,
        *,
        needs: Sequence[str],
        imports: Sequence[str],
        argv: Sequence[str],
        env: Mapping[str, str],
        log: str,
    ) -> Child:
        """Fork the process from the agent's preload process; arguments and result as in `Host.fork`."""
        return self.children.ask(
            module=module, needs=list(needs), imports=list(imports), argv=list(argv), env=dict(env), log=log
        )

    def begin(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Call the `function` of ``on_host`` in the agent, and return a future without waiting.

        Arguments and result must be plain data for JSON. The future raises HostLost, or RuntimeError if the function
        raised.
        """
        assert not kwargs, "arguments travel by position"
        return self._request(function=function.__name__, args=list(args))

    def relay(self, sockets: Mapping[str, str]) -> None:
        """Create sockets on the host, and relay each to a local one; `sockets` maps remote to local paths.

        Waits until they exist. Raises HostLost, or RuntimeError if the agent could not create them.
        """
        self._relay.targets = list(sockets.values())
        answer: Future[None] = self._request(listen=list(sockets))
        wait_for(self, answer)

    def _request(self, **request: Any) -> Future[R]:
        answer: Future[R] = Future()
        number = next(self._numbers)
        with self._lock:
            lost = self.lost
            self._pending[number] = answer
        if lost:
            self._fail_pending()
        self._send(ask=number, **request)
        return answer

    def ask(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call `function` in the agent, and return its result; raise HostLost if there is no answer in time.

        A silent agent is not asked.
        """
        if silent := self.silent:
            raise HostLost(silent)
        return wait_for(self, self.begin(function, *args, **kwargs), ASK_SECONDS)

    def close(self) -> None:
        """Make the agent end all processes there, and wait for up to ASK_SECONDS until it has."""
        self.hang_up()
        if self._facts.done():  # else there may be no agent that could be waited for
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ASK_SECONDS)
        self.kill()

    def hang_up(self) -> None:
        """Ask the agent to end all processes there; return at once."""
        self._to_agent.close()

    def kill(self) -> None:
        """Kill the local process, which disconnects the host."""
        self._kill_process()
        self._reader.join()

    def _kill_process(self) -> None:
        """Kill the local process and its children: it leads a process group of its own."""
        with contextlib.suppress(ProcessLookupError):
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)

    # -- the agent

    def _send(self, **message: Any) -> None:
        self._to_agent.say(json.dumps(message).encode())  # if the agent has ended, _read reports it

    def _read(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            if self._skip_noise():
                if self._begin["relayed"]:
                    self._link = self._watch_link(relayed=True)  # an agent that does not run yet sends no beats
                self._send(begin=self._begin)
                self._agent_runs = True
                while True:
                    message = self._from_agent.recv_bytes()
                    with self._guard:
                        self._link.heard()
                        if message[0] == FRAME:
                            self._relay.heard(message)
                        else:
                            self._handle_message(json.loads(message))
        with self._guard:
            self._from_agent.close()
            self._relay.close()
        code = self._process.wait()
        self._ended.set()
        self._noise.join(1)
        with self._lock:
            self.lost = self.output_text.strip().rpartition("\n")[2] or f"its agent ended (exit code {code})"
        if not self._facts.done():
            self._facts.set_exception(HostLost(self.lost))
        self._fail_pending()
        self.children.end_all(f"{self.name} is lost: {self.lost}")

    def _watch_link(self, *, relayed: bool) -> links.Watch:
        return links.Watch(lambda: on_host.ports_of(self.pid), relayed)

    def _watch(self) -> None:
        """Send a beat every so often, and drop the host once its kernel acknowledges nothing any more."""
        last_beat = 0.0
        while not self._ended.wait(LOOK_SECONDS):
            with self._guard:
                now = time.monotonic()
                if self._agent_runs and now > last_beat + links.BEAT_SECONDS:
                    last_beat = now
                    self._send(beat=now)
                if not self._link.is_lost():
                    continue
                self._output += f"\n{self.name} has sent nothing for {links.LOST_SECONDS:g} s".encode()
                self._kill_process()

    def _skip_noise(self) -> bool:
        """Skip the output of the host's shell; return False if it ends before the agent begins."""
        while not self._before.endswith(agent.MARKER):
            byte = os.read(self._from_agent.fileno(), 1)
            if not byte:
                return False
            self._before += byte
            self.shell_has_run = self.shell_has_run or self._before.endswith(SHELL_LINE)
            del self._before[:-NOISE_BYTES]
        self._before.clear()
        return True

    def _read_noise(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as stderr:
            while some := os.read(stderr.fileno(), 4096):
                self._output += some
                del self._output[:-NOISE_BYTES]

    def _handle_message(self, message: dict[str, Any]) -> None:
        match message:
            case {"facts": {"run_folder": folder, "address": address, "missing": missing, **facts}}:
                self.run_folder, self.address, self.missing = Path(folder), address, missing
                self._facts.set_result(facts)  # type: ignore[arg-type]
            case {"answer": number, **outcome}:
                answer = self._pending.pop(number, None)
                if answer is not None and "error" in outcome:
                    answer.set_exception(RuntimeError(outcome["error"]))
                elif answer is not None:
                    answer.set_result(outcome["value"])
            case _:
                self.children.heard(message)

    def _fail_pending(self) -> None:
        while self._pending:
            with contextlib.suppress(KeyError):
                self._pending.popitem()[1].set_exception(HostLost(f"{self.name} is lost: {self.lost}"))


def _portable_path() -> list[str]:
    """Return ``sys.path`` without the folders of this process's Python, which other hosts have themselves."""
    theirs = tuple(f"{prefix}/" for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix})
    folders = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return [folder for folder in folders if not folder.startswith(theirs)]
