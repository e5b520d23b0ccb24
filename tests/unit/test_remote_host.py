"""The notebook's end of the connection to another host."""

from __future__ import annotations

import sys

import pytest

from ddip.cluster import ssh
from ddip.cluster.hosts import remote_host
from ddip.cluster.hosts.remote_host import NOISE_BYTES, RemoteHost
from ddip.cluster.processes import links
from ddip.cluster.processes.host import HostLost
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
