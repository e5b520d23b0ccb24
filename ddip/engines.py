"""Engines for ranks: which of them stay when a group changes, and new ones where there is none."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from ddip import apps, devices, formation, placement
from ddip.errors import BadInput
from ddip.placement import Berth, Wish
from ddip.progress import Report
from ddip.ranks import Member, Ranks

HELLO_SECONDS = 2.0
"""How long a rank may take to tell what its torch can do."""


class Engines:
    """The engines of a group's cluster."""

    def __init__(self, ranks: Ranks, progress: Report) -> None:
        self._ranks = ranks
        self._progress = progress

    def complete(self, wish: Wish, app: str | None, deadline: float) -> list[Member]:
        """All members of the group of `wish` in rank order; until `deadline` on ``time.monotonic``.

        Raises GroupError; engines that were started before stay then, for the caller to end.
        """
        members = self._ranks.members
        kept = placement.keep([member.berth for member in members], wish)
        new = [rank for rank, index in enumerate(kept) if index is None]
        started = dict(zip(new, self._start(new, wish, app, deadline), strict=True))
        return [members[index] if index is not None else started[rank] for rank, index in enumerate(kept)]

    def replace(self, gone: Sequence[int], wish: Wish, app: str | None, deadline: float) -> list[Member]:
        """The present members with new engines for the ranks `gone`; raises as `complete` does."""
        members = list(self._ranks.members)
        for rank, member in zip(gone, self._start(gone, wish, app, deadline), strict=True):
            members[rank] = member
        return members

    def check_torch(self, wish: Wish) -> None:
        """Raise BadInput if the ranks' torch cannot do what `wish` needs."""
        answers = self._ranks.ask_beside(self._ranks.live, "housekeeping.hello", seconds=HELLO_SECONDS)
        hello = next((answer for answer in answers.values() if answer is not None), None)
        if hello is not None:
            _check_torch(wish, hello)

    def _start(self, ranks: Sequence[int], wish: Wish, app: str | None, deadline: float) -> list[Member]:
        """New engines for `ranks`."""
        cluster = self._ranks.cluster
        timeout = max(0.1, deadline - time.monotonic())
        first = not cluster.connected
        if first:
            self._progress("ddip: starting the controller", 0.0)
            cluster.start_controller(timeout)
        also = [apps.find(app)] if app else []
        started = cluster.start_engines(len(ranks), _environment(wish), also, timeout)
        if first:
            cluster.connect(deadline)
        here = wish.size - len(ranks)

        def tell(up: int) -> None:
            self._progress(f"ddip: {here + up} of {wish.size} engines are up", 0.1 + 0.8 * up / len(started))

        hellos = cluster.wait_for(started, deadline, tell)
        if hellos:
            _check_torch(wish, hellos[0])
        else:
            self.check_torch(wish)
        return [
            Member(engine, hello["pid"], hello["host"], Berth(wish.visible, wish.gpus[rank]))
            for rank, engine, hello in zip(ranks, started, hellos, strict=True)
        ]


def _environment(wish: Wish) -> dict[str, str]:
    """What must be set before torch loads: threads, and the GPUs that the rank sees."""
    environment = {}
    if "OMP_NUM_THREADS" not in os.environ:
        environment = {name: str(formation.threads(wish.size)) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    if wish.on_gpus:
        names = devices.gpu_names()
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(names[gpu] for gpu in wish.visible)
    return environment


def _check_torch(wish: Wish, hello: Mapping[str, Any]) -> None:
    """Raise BadInput if the torch that `hello` tells of cannot do what `wish` needs."""
    wanted = [part.rpartition(":")[2] for part in wish.backend.split(",")]
    for backend in wanted:
        if backend not in hello["backends"]:
            has = ", ".join(hello["backends"])
            raise BadInput(f"-b {wish.backend}: torch {hello['torch']} has no backend {backend!r}; it has {has}")
    if wish.on_gpus and not hello["cuda"]:
        raise BadInput(f"torch {hello['torch']} was built without CUDA; install a CUDA build, or type -n {wish.size}")
