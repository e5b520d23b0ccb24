"""What Tab and ``help`` show of ddip."""

from __future__ import annotations

import pydoc

import ddip


def test_tab_offers_only_public_names() -> None:
    assert {name for name in dir(ddip) if not name.startswith("_")} == set(ddip.__all__)


def test_help_describes_every_public_name() -> None:
    text = pydoc.plain(pydoc.render_doc(ddip))
    assert [name for name in ddip.__all__ if name not in text] == []
    assert "Number of ranks on the CPU" in text


def test_a_group_can_be_closed_like_a_file() -> None:
    assert ddip.Group.close is ddip.Group.shutdown
