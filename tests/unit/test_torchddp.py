"""The group that in_torchddp uses, and for which app."""

from __future__ import annotations

from typing import Any

import pytest

import ddip
from ddip.call import torchddp
from ddip.errors import BadInput
from ddip.output.progress import Progress


@pytest.mark.parametrize(
    ("nprocs", "available", "asked", "told"),
    [
        (3, 0, ((3,), {}), ""),
        (3, 4, ((), {"gpus": range(3)}), ""),
        (3, 2, ((3,), {}), "ddip: the 3 ranks run on the CPU: this machine has only 2 GPUs\n"),
        (2, 1, ((2,), {}), "ddip: the 2 ranks run on the CPU: this machine has only 1 GPU\n"),
        (None, 4, ((None,), {}), ""),
    ],
)
def test_each_rank_gets_a_gpu_if_there_are_enough(
    nprocs: int | None,
    available: int,
    asked: tuple[Any, ...],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    calls = []
    monkeypatch.setattr(torchddp, "gpu_names", lambda: [str(i) for i in range(available)])
    monkeypatch.setattr(torchddp, "Group", lambda *args, **kwargs: calls.append((args, kwargs)))
    progress = Progress()
    torchddp._new_group(nprocs, "toy", progress)
    args, kwargs = asked
    assert calls == [(args, {**kwargs, "app": "toy", "progress": progress})]
    assert capsys.readouterr().err == told


def test_an_installed_package_selects_its_app(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchddp.apps, "find_module", lambda name: f"module_of_{name}")
    assert torchddp._app_for({"torch"}) is None
    assert torchddp._app_for({"torch", "fastai"}) == "fastai"

    def no_app(name: str) -> str:
        raise BadInput("there is no app")

    monkeypatch.setattr(torchddp.apps, "find_module", no_app)
    assert torchddp._app_for({"fastai"}) is None


def test_a_script_has_no_current_group() -> None:
    assert ddip.current_group() is None
