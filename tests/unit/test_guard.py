"""Threads that watch ranks survive random bytes and raising callbacks."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
from tornado.ioloop import IOLoop

from ddip import guard
from ddip.cluster import ipp_private
from ddip.cluster.hosts import agent
from ddip.cluster.hosts.relay import Relay, Sender
from ddip.cluster.hosts.remote_host import RemoteHost
from ddip.cluster.ipyparallel.launchers import EngineSetLauncher, Launcher, log_text
from ddip.cluster.ipyparallel.loop import Loop
from ddip.cluster.processes import processes
from ddip.cluster.processes.children import Children
from ddip.cluster.processes.exit_diagnosis import EngineLogs
from ddip.cluster.processes.preload_client import PreloadProcess
from ddip.group.members import time_left
from ddip.guard import Guard
from ddip.protocol import remote
from ddip.rank.profiling.profile_sampler import Sampler
from ddip.rank.streams.pipes import Records

SECONDS = 20
SEED = 7
MESSAGES = 40


def malformed_messages() -> list[bytes]:
    """Return malformed messages; none is empty, so that none ends a connection."""
    chance = random.Random(SEED)
    return [b"\x00", b"{", b"[]", b'{"answer": 1}', *(chance.randbytes(chance.randint(1, 60)) for _ in range(MESSAGES))]


def raise_exit(*_: object) -> None:
    raise SystemExit("a faulty callback")


@pytest.fixture(autouse=True)
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    texts: list[str] = []
    monkeypatch.setattr(guard, "show", texts.append)
    yield texts


def test_an_exception_is_shown_once_per_kind_but_always_logged(
    shown: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    watched = Guard("it failed")
    with caplog.at_level(logging.DEBUG, "ddip"):
        for error in (ValueError("one"), ValueError("two"), SystemExit(3)):
            with watched:
                raise error
    assert shown == ["it failed: ValueError: one", "it failed: SystemExit: 3"]
    assert [record.getMessage() for record in caplog.records][1] == "it failed: ValueError: two"
    with pytest.raises(KeyboardInterrupt), watched:
        raise KeyboardInterrupt


def test_an_exception_whose_text_raises_is_reported(shown: list[str]) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise ValueError

    with Guard("it failed"):
        raise Odd
    assert shown == ["it failed: Odd: its text cannot be shown"]


def launcher_of(process: Any, exits: list[Any]) -> Any:
    one = Launcher()
    one.process, one.pid, one.loop = process, 1, IOLoop(make_current=False)
    one.cmd_and_args = ["engine"]
    one.on_stop(raise_exit)
    one.on_stop(exits.append)
    one.notify_start(1)
    return one


@pytest.mark.parametrize("log", [b"\xff\xfe", random.Random(SEED).randbytes(5000)], ids=["FFFE", "random"])
def test_a_launcher_notices_that_a_process_ended_despite_odd_logs(log: bytes, tmp_path: Path) -> None:
    exits: list[Any] = []
    failures = [OSError(9, "bad descriptor"), ValueError("odd"), psutil.NoSuchProcess(1)]

    def wait(timeout: float) -> int:
        if failures:
            raise failures.pop()
        return -9

    one = launcher_of(SimpleNamespace(wait=wait), exits)
    one.output_file = str(tmp_path / "log")
    Path(one.output_file).write_bytes(log)
    one._start_waiting()
    one._wait_thread.join(SECONDS)
    one.loop.run_sync(lambda: asyncio.sleep(0))
    one.loop.close()
    assert [data["exit_code"] for data in exits] == [-9]
    assert one.get_output() == log.decode(errors="replace") and log_text(one.output_file) == ""


def test_a_set_of_engines_notifies_all_listeners_of_its_end() -> None:
    exits: list[Any] = []
    engines = EngineSetLauncher()
    engines.on_stop(raise_exit)
    engines.on_stop(exits.append)
    engines.notify_start([])
    engines.notify_stop({"exit_code": 1})
    assert exits == [{"exit_code": 1}]


def test_the_reader_of_the_preload_process_survives_odd_messages() -> None:
    ours, theirs = socket.socketpair()
    warm = PreloadProcess.__new__(PreloadProcess)
    warm._guard, warm._lock, warm.asleep = Guard("odd"), threading.Lock(), threading.Event()
    warm._link, warm._process = Connection(ours.detach()), cast(Any, SimpleNamespace(wait=lambda: 0))
    warm._log = cast(Any, Path(os.devnull).open("rb"))  # noqa: SIM115 - the reader closes it
    warm._retired, warm.owner = False, 0
    warm._children = Children(lambda **_: None, lambda pid: None)
    child = warm._children.ask()
    child.pid.add_done_callback(raise_exit)
    child.exit.add_done_callback(raise_exit)
    reader = threading.Thread(target=warm._read)
    reader.start()
    with Connection(theirs.detach()) as far:
        for message in malformed_messages():
            far.send_bytes(message)
        far.send({"forked": 0, "pid": "x"})
        far.send({"forked": 0, "pid": "twice"})
        far.send({"exited": 0, "code": 5})
        assert child.exit.result(SECONDS) == 5
    reader.join(SECONDS)
    assert warm.ended and not reader.is_alive()
    assert warm.died
    warm.retire()
    assert not warm.died


AGENT = """
import json, sys
from multiprocessing.connection import Connection
from ddip.cluster.hosts.agent import MARKER
from tests.unit.test_guard import malformed_messages
sys.stderr.buffer.write(b"\\xff\\xfe\\n")
sys.stdout.buffer.write(b"\\xff noise" + MARKER)
sys.stdout.buffer.flush()
say = Connection(1, readable=False)
for message in malformed_messages():
    say.send_bytes(message)
say.send_bytes(json.dumps({"facts": {"run_folder": "/tmp", "address": "", "missing": "", "cores": 3}}).encode())
sys.stdin.read()
"""


@pytest.mark.grid(in_ci=True)
def test_the_threads_of_another_host_survive_odd_messages() -> None:
    host = RemoteHost("h1", [sys.executable, "-c", AGENT], "")
    try:
        host.wait(SECONDS)
        assert host.facts["cores"] == 3
    finally:
        host.close()


def test_an_agent_answers_after_odd_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    (near, to_agent), (from_agent, far) = Pipe(duplex=False), Pipe(duplex=False)
    one = agent.Agent.__new__(agent.Agent)
    one._near, one._far, one._guard = near, Sender(far, "sender"), Guard("odd")
    one._relay = Relay(one._far.send_frame, "relay")
    one._watch = cast(Any, SimpleNamespace(heard=lambda: None, is_lost=lambda: raise_exit()))
    one._children, one._logs, one.run_folder, one.missing = {}, EngineLogs(), Path("/tmp"), ""
    monkeypatch.setattr(agent.Agent, "leave", lambda self: None)
    monkeypatch.setattr(agent, "LOOK_SECONDS", 0.01)
    serving = threading.Thread(target=one.serve, daemon=True)
    serving.start()
    for message in malformed_messages():
        to_agent.send_bytes(message)
    to_agent.send_bytes(json.dumps({"ask": 1, "function": "count_cores", "args": []}).encode())
    answer: dict[str, Any] = {}
    while answer.get("answer") != 1:
        assert from_agent.poll(SECONDS)
        output = from_agent.recv_bytes()
        answer = json.loads(output) if output[:1] == b"{" else {}
    assert answer["value"] >= 1
    (beat,) = (thread for thread in threading.enumerate() if thread.name == "ddip-beat")
    monkeypatch.setattr(threading, "excepthook", lambda raised: None)
    one._watch = cast(Any, SimpleNamespace(is_lost=_end_thread))
    to_agent.close()
    serving.join(SECONDS)
    beat.join(SECONDS)
    assert not beat.is_alive()
    one._relay.close()
    one._far.close()


def _end_thread() -> bool:
    raise KeyboardInterrupt


def test_a_relay_serves_after_odd_frames(tmp_path: Path) -> None:
    sent: list[bytes] = []
    arrived = threading.Event()

    def send(frame: bytes) -> None:
        if not sent:
            sent.append(frame)
            raise ValueError("the first frame cannot be sent")
        sent.append(frame)
        arrived.set()

    relay = Relay(send, "relay")
    for frame in malformed_messages():
        relay.heard(frame)
    relay.listen([str(tmp_path / "socket")])
    for _ in range(2):
        with socket.socket(socket.AF_UNIX) as one:
            one.connect(str(tmp_path / "socket"))
            one.sendall(b"x")
    assert arrived.wait(SECONDS)
    relay.close()
    assert not relay._thread.is_alive()


def test_an_event_loop_continues_after_an_exit() -> None:
    loop = Loop("test")
    loop._loop.call_soon_threadsafe(raise_exit)
    assert loop.run(asyncio.sleep(0, "done"), SECONDS) == "done"
    loop.close()


def test_the_client_receives_the_next_message_after_an_odd_one() -> None:
    client = ipp_private.RankClient.__new__(ipp_private.RankClient)
    received: list[bytes] = []

    def take(frames: list[bytes]) -> None:
        received.append(frames[0])
        raise SystemExit

    odd_messages = [[message] for message in malformed_messages()]
    expected = [b"first", *(frames[0] for frames in odd_messages)]
    stub: Any = SimpleNamespace(
        socket=SimpleNamespace(
            get=lambda _: 1 if odd_messages else 0, recv_multipart=lambda *_, **__: odd_messages.pop(0)
        )
    )
    for name, value in {"_guard": Guard("odd"), "_mux_stream": stub, "_take_reply": take, "_take_output": take}.items():
        object.__setattr__(client, name, value)
    client._dispatch_reply([b"first"])
    assert received == expected
    client._dispatch_iopub([b"output"])
    assert received[-1] == b"output"


def test_a_link_receives_the_next_message_after_an_exception() -> None:
    client = ipp_private.LinkClient.__new__(ipp_private.LinkClient)
    received: list[Any] = []

    def take(message: Any) -> None:
        received.append(message)
        raise SystemExit

    for name, value in {"_guard": Guard("odd"), "_heard": take, "_futures": {}}.items():
        object.__setattr__(client, name, value)
    for number in range(3):
        dispatch = ipp_private.LinkClient._dispatch_single_reply.__wrapped__
        dispatch(client, {"parent_header": {}, "number": number})
    assert [message["number"] for message in received] == [0, 1, 2]


def test_a_profile_continues_after_a_failed_sample() -> None:
    looked = threading.Semaphore(0)

    def look_and_raise() -> None:
        looked.release()
        raise_exit()

    sampler = Sampler(look_and_raise)
    sampler.start()
    assert looked.acquire(timeout=SECONDS) and looked.acquire(timeout=SECONDS)
    assert sampler._thread.is_alive()
    sampler.stop()


def test_the_end_of_a_job_is_followed_despite_failed_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    exits = threading.Event()
    seconds = iter([time_left.WARN_SECONDS[0] + 0.05])

    def seconds_left(job: int) -> float:
        found = next(seconds, None)
        if found is None:
            exits.set()
            raise ValueError("Slurm says something odd")
        return found

    monkeypatch.setattr(time_left.slurm, "seconds_left", seconds_left)
    follower = time_left.TimeLeft()
    follower.follow([17])
    assert exits.wait(SECONDS)


def test_records_of_forked_processes_are_read_after_odd_bytes() -> None:
    records = Records()
    for message in malformed_messages():
        os.write(records.writes, message)
        records.take()
    while records._unread:  # bytes that look like the start of a record wait for its end
        os.write(records.writes, b"\x00" * 60_000)
        records.take()
    records.write(1, 5, "first", "text")
    assert [written.text for written in records.take()] == ["text"]
    os.close(records.reads)
    os.close(records.writes)


def test_a_request_to_a_rank_that_exits_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    import ddip.rank.streams.pipes

    monkeypatch.setattr(ddip.rank.streams.pipes, "odd", raise_exit, raising=False)
    assert remote.call_target("streams.pipes.odd")["error"] == "SystemExit"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_processes_are_distinguished_even_with_odd_names() -> None:
    """``_started_by`` inspects every process of the machine."""
    PR_SET_NAME = 15
    code = f"import ctypes; ctypes.CDLL(None).prctl({PR_SET_NAME}, b'\\xff) (\\xfe'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as one:
        assert one.stdout is not None and one.stdout.readline()
        assert processes.Proc.of(one.pid).find() is not None
        processes.end_processes([processes.Proc.of(one.pid)])
        assert one.wait(SECONDS) < 0


def test_no_reader_of_a_process_decodes_strictly() -> None:
    """Read files that a user's process may write as bytes, or with an ``errors=`` rule."""
    root = Path(guard.__file__).parent
    strict = []
    for path in root.rglob("*.py"):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if ("read_text()" in line or "text=True" in line or "decode()" in line) and "errors=" not in line:
                strict.append(f"{path.relative_to(root)}:{number}")
    allowed = {name.partition(":")[0] for name in strict} - KNOWN
    assert not allowed, [name for name in strict if name.partition(":")[0] in allowed]


KNOWN = {
    "apps/once.py",
    "cluster/attach/clusters.py",
    "cluster/limits.py",
    "cluster/processes/exit_diagnosis.py",
    "cluster/processes/ownership.py",
    "cluster/hosts/ways.py",
    "doctor/gpus.py",
    "doctor/torch_build.py",
    "protocol/text.py",
    "rank/runtime/housekeeping.py",
    "rank/profiling/profile_sampler.py",
    "rank/process_group/rank_vitals.py",
}
"""Files that read numbers, JSON or ASCII written by ddip, ipyparallel or the kernel."""
