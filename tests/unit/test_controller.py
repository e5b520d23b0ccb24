"""The controller's ports are its own."""

from __future__ import annotations

import errno
import socket
import sys

import pytest
import zmq

from ddip.controller import Controller


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such reservation")
def test_a_port_that_was_chosen_is_free_for_zmq_and_for_nobody_else() -> None:
    controller = Controller()
    controller.engine_ip = "127.0.0.1"
    ports = [controller.next_port() for _ in range(100)]
    assert len(set(ports)) == 100
    for port in ports[:5]:
        with socket.socket() as other, pytest.raises(OSError) as raised:
            other.bind(("127.0.0.1", port))
        assert raised.value.errno == errno.EADDRINUSE
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as listener, socket.socket() as client:
        listener.bind(f"tcp://127.0.0.1:{ports[0]}")
        client.connect(("127.0.0.1", ports[0]))
    context.term()
    for reserved in controller._reserved:
        reserved.close()
