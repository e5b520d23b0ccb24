"""Private names of torch that a release lacks: what is off then, and what is said."""

from __future__ import annotations

import pytest

from ddip.errors import GroupError
from ddip.protocol import compat_torch

from .conftest import NewGroup
from .scripted import ScriptedEngine

NAMES = [(feature, name) for feature, names in compat_torch.FEATURES.items() for name in names]


def test_this_torch_has_all_names() -> None:
    assert compat_torch.find_off() == {} and compat_torch.find_missing(compat_torch.CORE) == []


@pytest.mark.parametrize(("feature", "name"), NAMES, ids=[name for _, name in NAMES])
def test_a_name_that_is_missing_turns_off_its_feature(feature: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, _, attribute = name.rpartition(".")
    monkeypatch.delattr(compat_torch.find_object(parent), attribute)
    assert compat_torch.find_off.__wrapped__() == {feature: [name]}


@pytest.mark.parametrize("name", compat_torch.CORE)
def test_a_name_without_which_there_is_no_group_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, _, attribute = name.rpartition(".")
    monkeypatch.delattr(compat_torch.find_object(parent), attribute)
    assert compat_torch.find_missing(compat_torch.CORE) == [name]


def test_what_is_off_is_said_once(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    def script(engine: ScriptedEngine) -> None:
        engine.hello["off"] = {compat_torch.WRAPPERS: ["torch.x"], compat_torch.RPC: ["torch.y"]}

    group = new_group(2, script=script)
    said = capsys.readouterr().err
    assert said.count("DDP wrappers must be made again after a fault") == 1 and "torch 2.15 (tested: " in said
    group.scripted.end_engine(group.members[1].engine, -9)
    group.repair()
    assert "wrappers" not in capsys.readouterr().err


def test_a_torch_that_ddip_cannot_use_is_an_error_that_names_others(new_group: NewGroup) -> None:
    def script(engine: ScriptedEngine) -> None:
        engine.hello["lacks"] = ["torch.z"]

    with pytest.raises(GroupError, match=r"^torch 2\.15 has no torch\.z, which ddip needs; install one of torch 2"):
        new_group(2, script=script)
