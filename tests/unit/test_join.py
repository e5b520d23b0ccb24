"""A rank that joins its first group and is interrupted while it does."""

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

    def interrupted_chdir(path: str) -> None:
        visited.append(path)
        if len(visited) == 1:
            raise KeyboardInterrupt

    def stop_before_forming(rank_spec: Any) -> None:
        raise AsFarAsItGoes

    for target, name, value in [
        (os, "chdir", interrupted_chdir),
        (os, "environ", dict(os.environ)),
        (process_settings, "note_start", lambda: None),
        (sys, "argv", sys.argv[:]),
        (sys, "path", sys.path[:]),
        (membership, "_form_group", stop_before_forming),
        (membership, "_is_set_up", False),
        (membership, "_store", ""),
    ]:
        monkeypatch.setattr(target, name, value)
    with pytest.raises(KeyboardInterrupt):
        membership.join_group(SPEC)
    assert sys.path != ["/of/the/notebook"]
    for _ in range(2):  # set-up that belongs to the first join is done once
        with pytest.raises(AsFarAsItGoes):
            membership.join_group(SPEC)
        assert visited == ["/the/notebook"] * 2 and sys.path == ["/of/the/notebook"]


def test_forming_a_group_never_searches_packages_for_torch_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preload process has already searched: on every rank it would take longer than all other work."""

    def fail_on_search(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch looks for a backend")

    assert needed
    monkeypatch.setattr(importlib.metadata, "entry_points", fail_on_search)
    for backend in ("gloo", "cpu:gloo,cuda:nccl"):
        dist.BackendConfig(dist.Backend(backend))
