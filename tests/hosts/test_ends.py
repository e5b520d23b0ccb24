"""However the network of hosts ends, nothing is left: tested with a network within another one's host."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..cluster.leftovers import wait_until
from .network import KINDS, Network

NETWORK = [sys.executable, "-m", "tests.hosts.network", "run", "--"]


def snapshot_of_host() -> dict[str, set[str]]:
    """Return the processes, namespaces, mounts, interfaces and temporary files that this host sees."""
    processes, namespaces = set(), set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            processes.add(f"{path.name} {(path / 'cmdline').read_text()}")
            namespaces |= {os.readlink(path / "ns" / kind) for kind in KINDS}
    return {
        "processes": processes,
        "namespaces": namespaces,
        "mounts": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "interfaces": {name for _, name in socket.if_nameindex()},
        "files": {str(path) for folder in ("/tmp", "/run", "/dev/shm") for path in Path(folder).iterdir()},
    }


@contextlib.contextmanager
def nothing_left() -> Iterator[dict[str, set[str]]]:
    before = snapshot_of_host()
    yield before
    with contextlib.suppress(AssertionError):
        wait_until(lambda: snapshot_of_host() == before, 10)
    assert snapshot_of_host() == before


@contextlib.contextmanager
def running_network() -> Iterator[subprocess.Popen[str]]:
    """Start a network of hosts whose command has reached another host and continues."""
    command = ["sh", "-c", "ssh h1 hostname && exec ssh h2 sleep 1000"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([*NETWORK, *command], text=True, **pipes) as running:
        try:
            assert running.stdout and running.stdout.readline() == "h1\n"
            yield running
        finally:
            running.kill()


@pytest.mark.parametrize(("command", "status"), [("exit 3", 3), ("kill -9 $$", 137), ("ssh h1 exit 4", 4)])
def test_an_ended_command_leaves_nothing(hosts: Network, command: str, status: int) -> None:
    with nothing_left():
        done = subprocess.run([*NETWORK, "sh", "-c", command], capture_output=True, text=True)
        assert (done.returncode, done.stdout, done.stderr) == (status, "", "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_network_and_leaves_nothing(hosts: Network, number: signal.Signals) -> None:
    with nothing_left() as before, running_network() as running:
        assert len(snapshot_of_host()["namespaces"] - before["namespaces"]) == 4 * len(hosts) + len(hosts) - 1 + len(
            KINDS
        )
        running.send_signal(number)
        assert running.wait(10) == 128 + number
        assert running.stderr and running.stderr.read() == ""


def test_a_signal_during_the_start_leaves_nothing(hosts: Network) -> None:
    with nothing_left() as before, subprocess.Popen([*NETWORK, "sleep", "1000"]) as starting:
        wait_until(lambda: len(snapshot_of_host()["namespaces"] - before["namespaces"]) > len(KINDS))
        starting.terminate()
        assert starting.wait(10) not in (0, None)


def test_a_killed_network_leaves_nothing(hosts: Network) -> None:
    with nothing_left(), running_network() as running:
        running.kill()


def test_a_failed_start_leaves_nothing(hosts: Network) -> None:
    """Replace sshd, so that no host can start."""
    program = """
import os, sys
from tests.hosts.first_process import bind_mount
bind_mount("/bin/false", "/usr/sbin/sshd")
os.execv(sys.argv[1], sys.argv[1:])
"""
    command = ["unshare", "--mount", sys.executable, "-c", program, *NETWORK, "true"]
    with nothing_left():
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert "nb did not boot" in done.stderr
