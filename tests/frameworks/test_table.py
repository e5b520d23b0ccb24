"""Each framework: unchanged, with torchrun's losses, twice in a session, after a fault and after a stop."""

from __future__ import annotations

from pathlib import Path

import pytest

import ddip
from ddip.errors import CellError, CellInterrupted

from ..cluster.meanwhile import meanwhile, press_stop
from .table import RANKS, STEPS, Losses, Script

WITHIN = 1e-6
CALL = "losses = train(lambda step: None)"


def train_in_cell(ranks: ddip.Group) -> Losses:
    """Train in a cell, and return the losses."""
    ranks.run(CALL)
    return [found["losses"] for found in ranks.pull_all(["losses"], range(RANKS))[0]]


def are_same(losses: Losses, theirs: Losses) -> bool:
    assert [len(of_rank) for of_rank in theirs] == [STEPS] * RANKS
    return losses == [pytest.approx(of_rank, rel=WITHIN, abs=WITHIN) for of_rank in theirs]


def test_the_losses_equal_torchrun(ranks: ddip.Group, script: Script) -> None:
    assert are_same(train_in_cell(ranks), script.under_torchrun)


def test_the_losses_of_a_second_run_equal_torchrun(ranks: ddip.Group, script: Script) -> None:
    assert are_same(train_in_cell(ranks), script.under_torchrun)


def test_the_losses_after_an_error_equal_torchrun(ranks: ddip.Group, script: Script) -> None:
    with pytest.raises(CellError, match="planted"):
        ranks.run("""
            def planted(step):
                if rank == 1 and step == 5: raise ValueError('planted')
            train(planted)
        """)
    assert are_same(train_in_cell(ranks), script.under_torchrun)


def test_the_losses_after_a_stop_equal_torchrun(ranks: ddip.Group, script: Script, tmp_path: Path) -> None:
    thread = meanwhile(lambda: len(list(tmp_path.iterdir())) == RANKS, press_stop)
    with pytest.raises(CellInterrupted):
        ranks.run(f"""
            import pathlib, time
            def wait_for_the_stop(step):
                if step == 5:
                    (pathlib.Path({str(tmp_path)!r}) / str(rank)).touch()
                    while True: time.sleep(0.01)
            train(wait_for_the_stop)
        """)
    thread.join()
    assert are_same(train_in_cell(ranks), script.under_torchrun)


def test_the_losses_of_a_file_equal_torchrun(ranks: ddip.Group, script: Script, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{script.code}\n\nif __name__ == '__main__':\n    {CALL}\n")
    ranks.run(f"%diprun {tmp_path / 'train.py'}")
    losses = [found["losses"] for found in ranks.pull_all(["losses"], range(RANKS))[0]]
    assert are_same(losses, script.under_torchrun)
