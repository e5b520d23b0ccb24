"""The connections of processes, read from outside."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from ddip.cluster.processes import on_host


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_both_ends_of_each_connection_are_found_and_no_listener(family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as listener:
        try:
            listener.bind((address, 0))
        except OSError:
            pytest.skip(f"there is no {address} here")
        listener.listen()
        with socket.create_connection(listener.getsockname()[:2]) as ours, listener.accept()[0] as theirs:
            both_ends = [*ours.getsockname()[:2], *ours.getpeername()[:2]]
            back = [*theirs.getsockname()[:2], *theirs.getpeername()[:2]]
            found, nothing = on_host.list_connections([os.getpid(), 1 << 28])
            assert both_ends in found and back in found and nothing == []
            assert not any(ends[:2] == both_ends[2:] and not ends[3] for ends in found)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the names may differ")
def test_ipv4_addresses_on_ipv6_sockets_are_shown_as_ipv4() -> None:
    with socket.socket() as listener, socket.socket(socket.AF_INET6) as ours:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        try:
            ours.connect(("::ffff:127.0.0.1", port))
        except OSError:
            pytest.skip("there is no version 6 here")
        assert ["127.0.0.1", ours.getsockname()[1], "127.0.0.1", port] in on_host.list_connections([os.getpid()])[0]


def test_a_shared_socket_is_found_with_each_process() -> None:
    """Share a socket, as the workers of a data loader share those of their rank."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()) as ours:
            command = [sys.executable, "-c", "input()"]
            with subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[ours.fileno()]) as child:
                ends = [*ours.getsockname(), *ours.getpeername()]
                mine, child_ends = on_host.list_connections([os.getpid(), child.pid])
                child.kill()
    assert ends in mine and ends in child_ends
