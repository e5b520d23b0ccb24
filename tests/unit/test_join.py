"""What a rank does when it joins its first group, and is interrupted there."""

from __future__ import annotations

import importlib.metadata
import os
import sys
from typing import Any

import pytest
import torch.distributed as dist

from ddip.protocol.rank_spec import RankSpec
from ddip.rank.kernel import needed
from ddip.rank.process_group import membership
from ddip.rank.runtime import process_settings

SPEC = RankSpec(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    group_rank=0,
    group_world_size=1,
    run_id="run",
    master_addr="127.0.0.1",
    master_port=1,
    device="cpu",
    backend="gloo",
    store="/nowhere",
    groups=1,
    seconds=1.0,
    interfaces={"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"},
    threads=1,
    notebook="here",
    collect=True,
    directory="/the/notebook",
    path=("/of/the/notebook",),
)


class AsFarAsItGoes(Exception):
    """Raised instead of forming a group."""


def test_the_next_join_completes_an_interrupted_first_join(monkeypatch: pytest.MonkeyPatch) -> None:
    visited: list[str] = []

    def chdir(path: str) -> None:
        visited.append(path)
        if len(visited) == 1:
            raise KeyboardInterrupt

    def form(rank_spec: Any) -> None:
        raise AsFarAsItGoes

    for target, name, value in [
        (os, "chdir", chdir),
        (os, "environ", dict(os.environ)),
        (process_settings, "note_start", lambda: None),
        (sys, "argv", sys.argv[:]),
        (sys, "path", sys.path[:]),
        (membership, "_form_group", form),
        (membership, "_is_set_up", False),
        (membership, "_store", ""),
    ]:
        monkeypatch.setattr(target, name, value)
    with pytest.raises(KeyboardInterrupt):
        membership.join(SPEC)
    assert sys.path != ["/of/the/notebook"]
    for _ in range(2):  # what belongs to the first join alone is done once
        with pytest.raises(AsFarAsItGoes):
            membership.join(SPEC)
        assert visited == ["/the/notebook"] * 2 and sys.path == ["/of/the/notebook"]


def test_forming_a_group_never_searches_packages_for_torch_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has done so in the preload process: that takes longer than all the rest, on every rank."""

    def looks(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch looks for a backend")

    assert needed
    monkeypatch.setattr(importlib.metadata, "entry_points", looks)
    for backend in ("gloo", "cpu:gloo,cuda:nccl"):
        dist.BackendConfig(dist.Backend(backend))
