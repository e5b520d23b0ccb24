"""torch.compile with a C++ compiler works on a rank."""

from __future__ import annotations

import shutil

import pytest

import ddip
from ddip.cluster.processes import preload_client


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler here")
def test_inductor_compiles_on_every_rank() -> None:
    with ddip.Group(2) as group:
        group.run("""
            import torch
            @torch.compile
            def f(x): return (x * 2).relu() + 1
            assert f(torch.tensor([-1.0, 3.0])).tolist() == [1.0, 7.0]
        """)
    preload_client.end_process()
