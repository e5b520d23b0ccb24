"""Options of the test run."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--spawn``: the same tests with engines that are spawned, as where processes cannot be forked."""
    parser.addoption("--golden", action="store_true", help="write the golden files of the system tests anew")
    parser.addoption("--spawn", action="store_true", help="spawn every engine instead of forking it")
