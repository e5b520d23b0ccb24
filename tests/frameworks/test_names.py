"""Private names of the apps' libraries: each missing one is found, and disables only its app."""

from __future__ import annotations

import re
import warnings
from pathlib import Path

import pytest

import ddip
from ddip.apps import compat_fastai, compat_hf, compat_lightning
from ddip.errors import GroupError
from ddip.protocol import compat

from ..cluster.test_compat import rename_in_sources
from ..unit.test_compat import delete_name

TABLES = [compat_fastai.FASTAI, compat_fastai.FASTCORE, *compat_hf.BY_MODULE.values(), *compat_lightning.TABLES]
ALL = [(names, name) for names in TABLES for name in names.core]


@pytest.mark.parametrize(("names", "name"), ALL, ids=[name for _, name in ALL])
def test_missing_names_that_an_app_needs_are_reported(
    names: compat.Names, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(names.library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of the libraries
        assert names.find_refusal() == ""
        delete_name(name, monkeypatch)
        assert f"has no {name}, which ddip needs; install {names.library}" in names.find_refusal()


@pytest.mark.parametrize(
    ("app", "library", "name"),
    [
        ("hf", "transformers", "transformers.training_args.TrainingArguments._setup_devices"),
        ("lightning", "lightning", "lightning.pytorch.trainer.call._interrupt"),
    ],
)
def test_missing_names_in_the_core_refuse_only_the_app(
    app: str, library: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(library)
    rename_in_sources([name], b"", tmp_path, monkeypatch, (library,))
    missing = re.escape(name)
    with ddip.Group(2, spawn=True, timeout=120) as group:
        with pytest.raises(GroupError, match=f"ImportError: {library} .*{missing}.*install {library} "):
            group.change(ddip.Request(app=app))
        group.run("import torch.distributed as dist\ndist.barrier()")
