"""Every ddip magic runs in the notebook, on both sides."""

from __future__ import annotations

from ddip.notebook.autodip import LOCAL_MAGICS
from ddip.notebook.loading import GROUP_MAGICS
from ddip.notebook.magics import DipMagics
from ddip.protocol.cell_messages import NOTEBOOK_MAGICS

HOMES = (DipMagics, *GROUP_MAGICS)
OURS = {name for home in HOMES for name in home.magics["line"]}


def test_autodip_leaves_each_in_the_notebook() -> None:
    assert set(LOCAL_MAGICS) >= OURS


def test_a_rank_refuses_each_except_diprun() -> None:
    assert {*NOTEBOOK_MAGICS, "diprun"} == OURS
