"""Apps, found by name."""

from __future__ import annotations

import pytest

from ddip import apps
from ddip.errors import BadInput


def test_an_app_without_its_framework_shows_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(apps.NEEDED, "fastai", ("ddip", "no_such_framework"))
    with pytest.raises(BadInput, match="%pip install no_such_framework"):
        apps.find_module("fastai")
