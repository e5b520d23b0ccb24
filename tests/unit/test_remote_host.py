"""The notebook's end of the connection to another host."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ddip.cluster import ssh
from ddip.cluster.hosts import remote_host
from ddip.cluster.hosts.remote_host import NOISE_BYTES, RemoteHost
from ddip.cluster.hosts.ways import Ssh
from ddip.cluster.processes import links, on_host
from ddip.cluster.processes.host import HostLost, ensure_reachable
from ddip.cluster.reach import Reach
from ddip.errors import GroupError
from tests.cluster.leftovers import wait_until

SECONDS = 30.0


def test_a_start_behind_a_relay_may_be_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent sends its first beat when it runs, which may take longer than a running agent may be silent."""
    is_lost, looks = links.Watch.is_lost, list[bool]()

    def look(watch: links.Watch) -> bool:
        looks.append(is_lost(watch))
        return looks[-1]

    monkeypatch.setattr(links.Watch, "is_lost", look)
    monkeypatch.setattr(links, "LOST_SECONDS", 0.0)
    monkeypatch.setattr(remote_host, "LOOK_SECONDS", 0.01)
    host = RemoteHost("h1", [sys.executable, "-c", "input()"], "", relayed=True)
    try:
        wait_until(lambda: len(looks) > 2)
        assert not any(looks)
    finally:
        host.close()


def test_a_shell_that_prints_much_has_run_the_command() -> None:
    code = f"print({ssh.SHELL_MARKER!r}); print('x' * {NOISE_BYTES})"
    host = RemoteHost("h1", [sys.executable, "-c", code], "")
    with pytest.raises(HostLost):
        host.wait(SECONDS)
    assert host.shell_has_run
    host.close()


AGENT = """
import json, sys
from multiprocessing.connection import Connection
from ddip.cluster.hosts.agent import MARKER
sys.stdout.buffer.write(MARKER)
sys.stdout.buffer.flush()
facts = {"run_folder": "/tmp", "address": "", "missing": ""}
Connection(1, readable=False).send_bytes(json.dumps({"facts": facts}).encode())
sys.stdin.read()
"""


def test_an_agent_without_heartbeats_is_named_and_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    host = RemoteHost("h1", [sys.executable, "-c", AGENT], "")
    try:
        host.wait(SECONDS)
        assert host.silent == ""
        monkeypatch.setattr(links, "SILENT_SECONDS", 0.0)
        assert host.silent.startswith("h1 has sent nothing for 0 s: ") and f"`kill {host.pid}`" in host.silent
        with pytest.raises(HostLost, match="^h1 has sent nothing"):
            host.ask(on_host.count_cores)
    finally:
        host.close()
    assert host.silent == ""


def test_a_link_cut_before_the_shell_began_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.Watch, "is_lost", lambda watch: True)
    host = RemoteHost("h1", [sys.executable, "-c", "input()"], "")
    with pytest.raises(HostLost):
        host.wait(SECONDS)
    text = "h1: h1 has sent nothing for 10 s; try again once `ssh h1 true` works in a terminal"
    assert Ssh(Reach(("h1",))).explain_failure(host) == text
    with pytest.raises(GroupError, match="h1 was lost while a rank started there .*; once it is reachable, type"):
        ensure_reachable(host)
    host.close()


def test_an_agent_without_a_first_message_ends() -> None:
    """The link of its notebook may be cut just before that."""
    code = "from ddip.cluster.hosts import agent; agent.BEGIN_SECONDS = 1; agent.main()"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=subprocess.DEVNULL) as started:
        assert started.wait(SECONDS) == -signal.SIGALRM
