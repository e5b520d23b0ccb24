"""The controller's sockets are files with the names that engines and clients expect."""

from __future__ import annotations

import contextlib
import socket
from pathlib import Path

import zmq
from ipyparallel import util

from ddip.cluster.processes.controller import Controller


def test_socket_names_match_the_spelling_of_engines_and_clients() -> None:
    for interface in ("ipc:///tmp/a-b/s", "ipc:///tmp/a:b-c/s"):
        controller = Controller()
        controller.engine_info = {"interface": interface, "mux": 7, "broadcast": [8, 9]}
        assert controller.engine_url("mux") == f"{interface}:7"
        assert controller.engine_url("broadcast", 1) == f"{interface}:9"
        assert util.disambiguate_url(f"{interface}:7", "127.0.0.1") == f"{interface}:7"


def test_no_two_sockets_have_one_name() -> None:
    controller = Controller()
    assert [controller.next_port("engine"), controller.next_port("client"), controller.next_port()] == [1, 2, 3]


def test_a_zap_domain_refuses_a_peer_without_a_handshake(tmp_path: Path) -> None:
    """Check a property of libzmq that ``Controller.initialize`` relies on."""
    for number, (domain, arrives) in enumerate([(b"", True), (b"ddip", False)]):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        context.setsockopt(zmq.ZAP_DOMAIN, domain)
        with context.socket(zmq.ROUTER) as listener, context.socket(zmq.DEALER) as peer:
            address = tmp_path / f"s{number}"
            listener.bind(f"ipc://{address}")
            _send_without_handshake(address)
            assert bool(listener.poll(100 if domain else 5000)) is arrives
            if arrives:
                assert listener.recv_multipart()[1:] == [b"junk"]
            peer.connect(f"ipc://{address}")
            peer.send(b"good")
            assert listener.poll(5000) and listener.recv_multipart()[1:] == [b"good"]
        context.term()


def _send_without_handshake(address: Path) -> None:
    """Send a ZeroMQ 2 frame, as anyone who can connect may do."""
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(str(address))
        stranger.send(b"\x01\x00\x05\x00junk")
        stranger.settimeout(0.5)
        with contextlib.suppress(OSError):
            while stranger.recv(64):
                pass
