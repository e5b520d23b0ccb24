"""Two ranks with the app that a script asks for; the next app gets new ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import ddip
from ddip.apps import NEEDED

from ..cluster.conftest import own_ipython_folder, warmed_up  # noqa: F401
from .table import RANKS, SCRIPTS, Script


@pytest.fixture(scope="module", params=SCRIPTS, ids=lambda script: script.name)
def script(request: pytest.FixtureRequest) -> Script:
    for module in NEEDED.get(request.param.app, ()):
        pytest.importorskip(module)
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def ranks(script: Script, warmed_up: None) -> Iterator[ddip.Group]:  # noqa: F811
    """Start two ranks that have run only the cell with the script; each script gets its own ranks."""
    with ddip.Group(RANKS, app=script.app) as group:
        group.run(script.code)
        yield group
