"""Private names that a library release lacks: the features that are off, and the messages."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from pathlib import Path

import IPython
import pytest

from ddip.cluster.attach import attached
from ddip.cluster.ipyparallel import own_cluster
from ddip.doctor import private_names
from ddip.errors import GroupError
from ddip.protocol import compat, compat_ipyparallel, compat_ipython, compat_torch
from ddip.protocol.compat import Names

from .conftest import NewGroup
from .scripted import ScriptedEngine

PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
APPS = {"fastai", "fastcore", "accelerate", "transformers", "lightning", "pytorch_lightning", "torchmetrics"}
"""Libraries that take seconds to import; ``tests/frameworks/test_names.py`` tests them."""
TABLES = [compat_torch.NAMES, *(names for names in private_names.name_tables() if names.library not in APPS)]
OLD = {compat_ipython.MODULES} if sys.version_info >= (3, 12) and IPython.version_info < (8,) else set()
"""Features that the installed versions lack."""
FEATURES = [
    (names, feature, name)
    for names in TABLES
    for feature, needed in names.features.items()
    for name in needed
    if feature not in OLD
]
CORES = [(names, name) for names in TABLES for name in names.core]


def delete_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for alternative in name.split(" or "):
        delete_one(alternative, monkeypatch)


def delete_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parent, _, attribute = name.rpartition(".")
    owner = compat.find_object(parent)
    for kind in inspect.getmro(owner) if inspect.isclass(owner) else [owner]:
        if attribute in vars(kind):
            monkeypatch.delattr(kind, attribute)


def test_the_installed_versions_have_all_names() -> None:
    assert [str(names) for names in TABLES if set(names.find_off()) - OLD or names.find_refusal()] == []


@pytest.mark.parametrize(("names", "feature", "name"), FEATURES, ids=[name for *_, name in FEATURES])
def test_a_missing_name_turns_off_its_feature(
    names: Names, feature: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_name(name, monkeypatch)
    off = names.find_off()
    assert {missing: off[missing] for missing in off.keys() - OLD} == {feature: [name]}


@pytest.mark.parametrize(("names", "name"), CORES, ids=[name for _, name in CORES])
def test_missing_names_that_every_group_needs_are_reported(
    names: Names, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete_name(name, monkeypatch)
    refusal = compat.find_refusal(names)
    version = re.escape(f"{names.library} {names.version}")
    assert re.fullmatch(f"{version} has no {name}, which ddip needs; install {names.library} {names.tested}", refusal)
    assert compat.REFUSAL.search(f"Traceback\n{refusal}\n")[0] == refusal  # type: ignore[index]


def test_the_doctor_checks_names_without_importing_modules() -> None:
    installed = [names for names in private_names.name_tables() if names.is_installed]
    reports = [private_names.report_missing(names, private_names.is_in_source) for names in installed]
    assert [one for one in reports if one["lacks"] or set(one["off"]) - OLD] == []
    missing = ["IPython.no_module.x", "IPython.core.completer.no_name", "IPython.core.completer.no_class.name"]
    assert [private_names.is_in_source(name) for name in (*missing, "IPython.core.completer.Completer")] == [
        *(False, False, False, True)
    ]


def test_modules_that_a_build_omits_do_not_count_as_missing() -> None:
    needed = ("json.no_module.name", "json.no_name")
    assert Names("json", "1", optional=needed).find_missing(needed) == ["json.no_name"]
    assert Names("json", "1").find_missing(needed) == [*needed]


def test_each_library_reports_disabled_features_once(new_group: NewGroup, capsys: pytest.CaptureFixture[str]) -> None:
    def script(engine: ScriptedEngine) -> None:
        engine.hello["off"] = {
            "torch 2.16 (tested: 2.15)": {compat_torch.WRAPPERS: ["torch.x"], compat_torch.RPC: ["torch.y"]},
            "ipykernel 8.1 (tested: 7.4)": {compat_ipython.STATES: ["ipykernel.x"]},
        }

    group = new_group(2, script=script)
    stderr = capsys.readouterr().err
    assert stderr.count("DDP wrappers must be recreated after a fault") == 1
    assert "ddip: torch 2.16 (tested: 2.15) lacks private names that ddip uses; DDP" in stderr
    assert "ddip: ipykernel 8.1 (tested: 7.4) lacks private names that ddip uses; each cell needs" in stderr
    group.scripted.end_engine(group.members[1].engine, -9)
    group.repair()
    assert "lacks" not in capsys.readouterr().err


@pytest.mark.parametrize("log", ["ipykernel 8 has no ipykernel.x, which ddip needs; install ipykernel 7\n", "other\n"])
def test_a_process_without_a_required_name_logs_its_absence(log: str) -> None:
    if "other" in log:
        own_cluster._check_names(log)
        return
    with pytest.raises(GroupError, match=f"^{log.strip()}$"):
        own_cluster._check_names(f"\nend of its log:\n  {log}")


def test_a_missing_name_in_the_notebook_prevents_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    delete_name("ipyparallel.client.client.Client._update_engines", monkeypatch)
    with pytest.raises(GroupError, match=r"Client\._update_engines"):
        own_cluster.OwnCluster(logging.getLogger(), False)


def test_missing_names_for_attaching_refuse_other_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compat_ipyparallel.NOTEBOOK.off, compat_ipyparallel.ATTACH, ["ipyparallel.x"])
    with pytest.raises(GroupError, match="-c and --engines"):
        attached.connect_client("no such file")


def test_the_page_says_which_versions_are_tested() -> None:
    rows = {tuple(cell.strip(" `") for cell in line.split("|")[1:3]) for line in PAGE.read_text().splitlines()}
    wanted = {(names.library, names.tested) for names in [compat_torch.NAMES, *private_names.name_tables()]}
    assert wanted <= rows


@pytest.mark.parametrize("page", ["fastai", "huggingface", "lightning"])
def test_a_framework_page_states_the_tested_versions(page: str) -> None:
    (sentence,) = re.findall(r"The tests run with (.*?)\.\s", (PAGE.parent / f"{page}.md").read_text(), re.DOTALL)
    stated = set(re.findall(r"(\w+) (\d+\.\d+)", sentence))
    assert stated and stated <= {(names.library, names.tested) for names in private_names.name_tables()}
