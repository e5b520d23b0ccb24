"""Wait until started engines can be used: registered with the controller, and connected on every channel."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from ddip.cluster import ipp_private
from ddip.cluster.cluster_api import Recipient
from ddip.cluster.ipp_private import RankClient
from ddip.protocol import on_rank
from ddip.protocol.reports import Hello

MANY_PER_CORE = 4
"""Number of engines per core above which their answers take longer than the first repetition."""


def wait_for(
    client: RankClient, engines: list[int], on_ready: Callable[[int], None], check: Callable[[set[int]], None]
) -> list[Hello]:
    """Wait until all `engines` answer on all their channels, and return their hellos, in order.

    `on_ready` gets the number of engines registered so far. There is no time limit: `check` is called repeatedly with
    the engines that are missing, and may raise to end the wait.
    """
    missing = set(engines)
    last_refresh = 0.0
    while missing:
        registered = missing.intersection(client.ids)
        if registered:
            missing -= registered
            on_ready(len(engines) - len(missing))
        elif time.monotonic() > last_refresh + 0.1:
            last_refresh = time.monotonic()
            with contextlib.suppress(concurrent.futures.TimeoutError):
                ipp_private.refresh_engines(client, 0.1)
        else:
            time.sleep(0.01)
        check(missing)
    return _greet_engines(client, engines, check)


def _greet_engines(client: RankClient, engines: list[int], check: Callable[[set[int]], None]) -> list[Hello]:
    """Send requests on every channel of every engine until all have answered, and return the hellos in order.

    `check` as in `wait_for`. Messages are repeated, since a router drops what it receives before the engine has
    connected to it; if many engines share the cores, only once no more answers arrive.
    """
    hellos: dict[int, Hello] = {}
    listening: set[int] = set()
    are_many = len(engines) > MANY_PER_CORE * (os.cpu_count() or 1)
    interval = 0.1 if are_many else 0.05
    while len(hellos) < len(engines) or len(listening) < len(engines):
        hello_requests = {_request_hello(client, engine): engine for engine in engines if engine not in hellos}
        pings = {_ping_engine(client, engine): engine for engine in engines if engine not in listening}
        waiting = arrived = {*hello_requests, *pings}
        while waiting and arrived:
            arrived, waiting = concurrent.futures.wait(waiting, timeout=interval)
            hellos.update((hello_requests[one], one.result()["ok"]) for one in arrived if one in hello_requests)
            listening.update(pings[one] for one in arrived if one in pings)
            check({*engines} - ({*hellos} & listening))
            if not are_many:
                break
        interval = min(2 * interval, 1)
    return [hellos[engine] for engine in engines]


def _request_hello(client: RankClient, engine: int) -> concurrent.futures.Future[Any]:
    """Request the hello of `engine` on its control channel.

    The future is never done if the engine has ended, which the `check` of `wait_for` reports.
    """
    with contextlib.suppress(KeyError):
        return ipp_private.send_control_request(
            client, engine, "ddip_request", {"target": on_rank.make_hello.target, "args": []}
        )
    return concurrent.futures.Future()


def _ping_engine(client: RankClient, engine: int) -> concurrent.futures.Future[Any]:
    """Run an empty cell on `engine`; the future is done once its last message came back.

    This uses the shell and iopub channels.
    """
    (ping,) = ipp_private.execute_cell(client, "", [Recipient(engine, lambda message: None)], {}, silent=True)
    return ping.output
