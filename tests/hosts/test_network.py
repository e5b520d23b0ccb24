"""The network of hosts has the properties that the other tests rely on."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

import ddip

from ..cluster.leftovers import wait_until
from .first_process import HOME
from .host import BARE, DOCKER, NUMBERS, Host, Interface
from .network import Network

OTHERS = ("h1", "h2", "h3")
SERVER = "import socket; s = socket.create_server(('', 5000)); c, _ = s.accept(); c.sendall(c.recv(99)); c.recv(1)"


def run_by_ssh(host: str, command: str) -> str:
    done = subprocess.run(["ssh", "-o", "BatchMode=yes", host, command], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def process_on(host: Host, *command: str) -> Iterator[None]:
    """Run a command on a host in an ssh session for the length of the block."""
    session = subprocess.Popen(["ssh", "-tt", host.name, *command], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        wait_until(lambda: any(line.startswith(command[0]) for _, line in host.processes()))
        yield
    finally:
        session.kill()
        session.communicate()


@contextlib.contextmanager
def connection_to(host: Host) -> Iterator[socket.socket]:
    """Open a TCP connection to an echo server on a host.

    The server echoes once, and ends when the connection says so or the host dies.
    """
    server = subprocess.Popen(host.command(["python3", "-c", SERVER]))
    try:
        wait_until(lambda: any(found.local[1] == 5000 for found in host.sockets()))
        with socket.create_connection((host.address, 5000), timeout=20) as connection:
            yield connection
    finally:
        server.wait(20)


@pytest.mark.parametrize("name", OTHERS)
def test_ssh_asks_nothing_and_finds_the_same_python(hosts: Network, name: str) -> None:
    assert run_by_ssh(name, "hostname; echo $SSH_CONNECTION").split()[:2] == [name, hosts["nb"].address]
    assert run_by_ssh(name, "python -c 'import sys; print(sys.prefix)'").strip() == sys.prefix


def test_each_host_has_its_own_folders(hosts: Network) -> None:
    run_by_ssh("h1", "touch ~/a /tmp/b /dev/shm/c /run/d")
    assert hosts["h1"].files() == ["/dev/shm/c", f"{HOME}/a", "/run/d", "/tmp/b"]
    assert hosts["h2"].files() == []
    assert not hosts["nb"].path("/tmp/b").exists()
    run_by_ssh("h1", "rm ~/a /tmp/b /dev/shm/c /run/d")


def test_processes_are_listed_by_host_until_they_end(hosts: Network) -> None:
    with process_on(hosts["h2"], "sleep", "1000"):
        assert "sleep 1000" in [line for _, line in hosts["h2"].processes()]
        assert "ssh -tt h2 sleep 1000" in [line for _, line in hosts["nb"].processes()]
        assert hosts["h1"].processes() == []
    wait_until(lambda: not hosts["h2"].processes())


def test_a_host_that_loses_power_sends_nothing(hosts: Network) -> None:
    h1 = hosts["h1"]
    with connection_to(h1) as connection:
        connection.sendall(b"hello")
        assert connection.recv(99) == b"hello"
        h1.lose_power()
        assert not h1.is_up()
        assert h1.processes() == []
        connection.settimeout(1)
        with pytest.raises(TimeoutError):  # neither an end of file nor a reset
            connection.recv(99)
    h1.boot()
    assert run_by_ssh("h1", "hostname").split() == ["h1"]


def test_a_link_that_is_cut_for_a_moment_loses_nothing(hosts: Network) -> None:
    with connection_to(hosts["h1"]) as connection:
        hosts["h1"].cut()
        connection.sendall(b"hello")
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            connection.recv(99)
        hosts["h1"].mend()
        connection.settimeout(20)
        assert connection.recv(99) == b"hello"


def test_the_notebook_host_can_be_cut_off(hosts: Network) -> None:
    hosts["nb"].cut()
    assert subprocess.run(["ssh", "-o", "ConnectTimeout=1", "h1", "true"], capture_output=True).returncode == 255
    hosts["nb"].mend()
    run_by_ssh("h1", "true")


def test_two_hosts_can_have_one_name(hosts: Network) -> None:
    with hosts["h1"].booted(hostname="node"), hosts["h2"].booted(hostname="node"):
        assert (
            run_by_ssh("h1", "hostname; cat /etc/hostname")
            == run_by_ssh("h2", "hostname; cat /etc/hostname")
            == "node\nnode\n"
        )
    assert run_by_ssh("h1", "hostname") == "h1\n"


def test_a_host_can_have_itself_at_127_0_1_1(hosts: Network) -> None:
    with hosts["h1"].booted(names={"h1": "127.0.1.1"}):
        assert run_by_ssh("h1", "getent hosts h1").split()[0] == "127.0.1.1"
        assert run_by_ssh("h2", "getent hosts h1").split()[0] == hosts["h1"].address


def test_a_host_can_be_unable_to_resolve_its_own_name(hosts: Network) -> None:
    with hosts["h1"].booted(names={"h1": None}):
        assert run_by_ssh("h1", "hostname; getent hosts h1 || echo no; getent hosts h2").split()[:2] == ["h1", "no"]


def test_hosts_can_have_a_second_network_and_docker(hosts: Network) -> None:
    with contextlib.ExitStack() as stack:
        for name in OTHERS[:2]:
            shared = Interface("eth1", f"10.79.0.{NUMBERS[name]}/24", bridge="br1")
            stack.enter_context(hosts[name].booted(interfaces=[shared, DOCKER]))
        names = [name for name, _ in (line.split()[:2] for line in run_by_ssh("h1", "ip -br link").splitlines())]
        assert [name.partition("@")[0] for name in names] == ["lo", "eth0", "eth1", "docker0"]
        with socket.create_server(("", 0)):
            assert "open" in run_by_ssh("h1", "timeout 5 bash -c '< /dev/tcp/10.79.0.12/22' && echo open")
            refused = run_by_ssh("h1", "timeout 1 bash -c '< /dev/tcp/172.17.0.2/22' 2> /dev/null || echo lost")
            assert refused == "lost\n"


def test_sshd_can_forbid_forwarding(hosts: Network) -> None:
    forward = ["ssh", "-o", "ExitOnForwardFailure=yes", "-R", "/tmp/socket:127.0.0.1:22", "h1", "true"]
    with hosts["h1"].booted(sshd=["AllowTcpForwarding no", "AllowStreamLocalForwarding no"]):
        assert subprocess.run(forward, capture_output=True).returncode == 255
    assert subprocess.run(forward, capture_output=True).returncode == 0
    run_by_ssh("h1", "rm /tmp/socket")  # sshd does not remove it


def test_a_bashrc_can_print(hosts: Network) -> None:
    with hosts["h1"].booted(bashrc="echo welcome"):
        assert run_by_ssh("h1", "echo there") == "welcome\nthere\n"


def test_a_host_can_have_another_python(hosts: Network) -> None:
    look = 'python -c \'import importlib.util as i; print(*(bool(i.find_spec(n)) for n in ("torch", "ddip")))\''
    with hosts["h1"].booted(path=BARE):
        assert run_by_ssh("h1", look) == "False False\n"
    assert run_by_ssh("h1", look) == "True True\n"


REFUSED = "reject with tcp reset"


@pytest.mark.parametrize(("answer", "error"), [("drop", TimeoutError), (REFUSED, ConnectionRefusedError)])
def test_a_firewall_stands_between_two_hosts(hosts: Network, answer: str, error: type[OSError]) -> None:
    h1, nb = hosts["h1"], hosts["nb"]
    with h1.blocks(nb, "1-21, 23-65535", answer):
        with pytest.raises(error):
            socket.create_connection((h1.address, 5000), timeout=1)
        run_by_ssh("h1", "true")  # on port 22
        assert run_by_ssh("h2", "timeout 5 bash -c '< /dev/tcp/h1/5000' 2>&1 || echo refused").endswith("refused\n")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((h1.address, 5000), timeout=5)


def test_the_sniffer_sees_unencrypted_messages(hosts: Network) -> None:
    with hosts.sniffed() as frames, connection_to(hosts["h1"]) as connection:
        connection.sendall(b"marker in the clear")
        assert connection.recv(99) == b"marker in the clear"
        run_by_ssh("h2", "echo marker in ssh")
    assert b"marker in the clear" in frames
    assert b"marker in ssh" not in frames
    seen = len([frame for frame in frames if b"marker in the clear" in frame])
    assert seen == 2  # once in each direction


def test_the_sniffer_sees_all_of_a_large_transfer(hosts: Network) -> None:
    """Send 100 MB of zeros between two other hosts."""
    with hosts.sniffed() as frames:
        receiver = threading.Thread(target=hosts["h2"].run, args=[["python3", "-c", RECEIVER]])
        receiver.start()
        wait_until(lambda: hosts["h2"].sockets())
        hosts["h1"].run(["bash", "-c", "head -c 100000000 /dev/zero > /dev/tcp/h2/5000"])
        receiver.join()
    assert sum(map(len, frames)) > 100_000_000


RECEIVER = """
import socket
server = socket.create_server(("", 5000))
connection, _ = server.accept()
while connection.recv(1 << 20):
    pass
"""


def test_torch_forms_a_group_over_two_hosts(hosts: Network) -> None:
    program = "import torch, torch.distributed as d; d.init_process_group('gloo'); x = torch.ones(1); d.all_reduce(x)"
    program += "; print(d.get_rank(), x.item(), flush=True); import os; os._exit(0)"  # torch may abort at exit
    found = {}

    def join_as_rank(rank: int) -> None:
        variables = f"RANK={rank} WORLD_SIZE=2 MASTER_ADDR=h1 MASTER_PORT=29500 GLOO_SOCKET_IFNAME=eth0"
        found[rank] = run_by_ssh(f"h{rank + 1}", f'{variables} python -c "{program}"')

    threads = [threading.Thread(target=join_as_rank, args=[rank]) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0: "0 2.0\n", 1: "1 2.0\n"}


def test_a_group_of_this_process_runs_on_the_notebook_host(hosts: Network) -> None:
    with ddip.Group(2) as group:
        group.run("import torch; torch.distributed.all_reduce(torch.ones(1))")
        pids = {pid for pid, _ in hosts["nb"].processes()}
        assert {rank.pid for rank in group.info()} <= pids


def test_the_hosts_fixture_finds_leftovers(hosts: Network) -> None:
    before = hosts.contents()
    with process_on(hosts["h3"], "sleep", "1001"):
        run_by_ssh("h3", "touch /dev/shm/left")
        left = [text for key, text in hosts.contents().items() if key not in before]
        assert any("sleep 1001" in text for text in left)
        assert "h3: /dev/shm/left" in left
        assert any("ESTABLISHED" in text for text in left)
    run_by_ssh("h3", "rm /dev/shm/left")
