"""Until a started engine is usable, it may end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from jupyter_client.session import Session

from ddip.cluster.ipyparallel import greeting
from ddip.errors import GroupError


def test_the_check_names_an_engine_that_ends_while_greeted() -> None:
    """The client has been notified of the engine's end, and no longer knows it."""
    loop = SimpleNamespace(add_callback=lambda *_: None)
    client: Any = SimpleNamespace(_engines={}, _closed=False, session=Session(), _io_loop=loop)
    client._send = client._control_stream = client.send_cells = None

    def check(waiting: set[int]) -> None:
        raise GroupError(f"engine {min(waiting)} ended while it started")

    with pytest.raises(GroupError, match="engine 7"):
        greeting._greet_engines(client, [7], check)
