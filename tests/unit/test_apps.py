"""Apps by name."""

from __future__ import annotations

import pytest

from ddip import apps
from ddip.errors import BadInput


def test_an_app_whose_framework_is_missing_says_what_to_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(apps.NEEDED, "fastai", ("ddip", "no_such_framework"))
    with pytest.raises(
        BadInput, match="-a fastai: no_such_framework cannot be found; type %pip install no_such_framework"
    ):
        apps.find("fastai")
