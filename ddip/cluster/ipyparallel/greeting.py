"""Until an engine that was started can be used: the controller has to know it, and each of its channels to be open."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Callable
from typing import Any

from ddip.cluster import ipp_private
from ddip.cluster.cluster_api import Recipient
from ddip.cluster.ipp_private import RankClient
from ddip.protocol import on_rank
from ddip.protocol.reports import Hello


def wait_for(
    client: RankClient, engines: list[int], on_ready: Callable[[int], None], check: Callable[[set[int]], None]
) -> list[Hello]:
    """Wait until all `engines` answer on all their channels; `on_ready` is told how many are known.

    `check` is called with those that are missing, again and again, and may raise. Returns the hellos, in order.
    """
    missing = set(engines)
    asked = 0.0
    while missing:
        here = missing.intersection(client.ids)
        if here:
            missing -= here
            on_ready(len(engines) - len(missing))
        elif time.monotonic() > asked + 0.1:
            asked = time.monotonic()
            with contextlib.suppress(concurrent.futures.TimeoutError):
                ipp_private.refresh(client, 0.1)
        else:
            time.sleep(0.01)
        check(missing)
    return _greet(client, engines, check)


def _greet(client: RankClient, engines: list[int], check: Callable[[set[int]], None]) -> list[Hello]:
    """Use every channel of every engine: a router drops what it gets before the engine has connected to it."""
    hellos: dict[int, Hello] = {}
    listening: set[int] = set()
    interval = 0.05
    while len(hellos) < len(engines) or len(listening) < len(engines):
        asked = {_hello(client, engine): engine for engine in engines if engine not in hellos}
        tried = {_nothing(client, engine): engine for engine in engines if engine not in listening}
        done, _ = concurrent.futures.wait([*asked, *tried], timeout=interval)
        hellos.update((asked[answer], answer.result()["ok"]) for answer in done if answer in asked)
        listening.update(tried[answer] for answer in done if answer in tried)
        check({*engines} - ({*hellos} & listening))
        interval = min(2 * interval, 1)
    return [hellos[engine] for engine in engines]


def _hello(client: RankClient, engine: int) -> concurrent.futures.Future[Any]:
    """What `engine` tells of itself on its control channel; never done if it has ended, which `check` will say."""
    with contextlib.suppress(KeyError):
        return ipp_private.control(client, engine, "ddip_request", {"target": on_rank.hello.target, "args": []})
    return concurrent.futures.Future()


def _nothing(client: RankClient, engine: int) -> concurrent.futures.Future[Any]:
    """Done when an empty cell has come back on the other channels."""
    (ping,) = ipp_private.execute(client, "", [Recipient(engine, lambda message: None)], {}, silent=True)
    return ping.output
