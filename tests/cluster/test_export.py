"""``%dipexport`` in a real notebook, and its scripts under torchrun."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .notebook import Notebook

TRAINING = """\
%%dip
for step in range(steps):
    x = noisy(torch.randn(8, 3))
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[-1]:.4f}")
"""
SESSION = [
    """\
%%dip
import random

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP


def noisy(x, scale=0.1):
    return x + scale * torch.randn_like(x) + random.random() + np.random.rand() * rate
""",
    "%%dip --param\nrate, steps = 0.05, 3\nlr = 0.01",
    "targets = [1.0, 2.0]\ntargets.append(3.0)",
    "%dipush targets",
    """\
%%dip
model = DDP(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, 1)))
optimizer = torch.optim.Adam(model.parameters(), lr=lr)
losses = targets[:1]
""",
    TRAINING,
    TRAINING,
    "%%dip -r 1\nlosses.append(random.random())",
    "%%dip\nlosses[-1]",
]
"""A training without seeds: the script has the random states of the ranks' start."""


@pytest.fixture(scope="module")
def trained(shared_notebook: Notebook) -> Iterator[Notebook]:
    """Run the session on two new ranks."""
    shared_notebook.ok("%makedip -n 2\n%makedip -r")
    for cell in SESSION:
        shared_notebook.ok(cell)
    shared_notebook.run("%%dip\nlosses.append(1 / 0)")
    yield shared_notebook
    for path in shared_notebook.folder.glob("*.py"):
        path.unlink()
    shared_notebook.ok("%makedip -n 3\n%makedip -r")


def script_in(notebook: Notebook, name: str = "train.py") -> str:
    return (notebook.folder / name).read_text()


def test_the_script_gives_the_numbers_of_the_session(trained: Notebook) -> None:
    shown = trained.ok("%dipexport train.py --force --check model optimizer losses").stdout
    assert "ddip: cell " in shown  # the failed one
    assert "compared, largest difference 0\n" in shown
    assert "ddip: train.py gives the session's values: " in shown


def test_ruff_finds_nothing(trained: Notebook) -> None:
    trained.ok("%dipexport clean.py --force")
    command = [sys.executable, "-m", "ruff", "check", str(trained.folder / "clean.py")]
    found = subprocess.run(command, capture_output=True, text=True, cwd=trained.folder)
    assert (found.returncode, found.stdout) == (0, "All checks passed!\n")


def test_failed_and_idle_cells_are_comments(trained: Notebook) -> None:
    trained.ok("%dipexport train.py --force")
    text = script_in(trained)
    assert text.count("optimizer.step()") == 2
    assert (
        "is left out: it failed: ranks 0, 1: ZeroDivisionError: division by zero\n    #     losses.append(1 / 0)"
        in text
    )
    assert "is left out: it only shows values\n    #     losses[-1]" in text
    assert text.index("import torch\n") < text.index("def noisy") < text.index("def main")


def test_a_value_that_differs_is_named(trained: Notebook) -> None:
    trained.ok("%dipper g\ng.push({'losses': [5.0]})")  # the script does not repeat this
    try:
        refused = trained.run("%dipexport train.py --force --check losses")
        assert refused.error == "BadInput"
        assert "ddip: Group.push sent losses: the script does not repeat this" in refused.stdout
        assert "--check: train.py does not give the session's losses[0] on rank 0: the difference is" in refused.message
    finally:
        trained.ok("%%dip\nlosses = []")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("%dipexport", "%dipexport: type the name of the script, such as %dipexport train.py"),
        ("%dipexport train", "%dipexport train: type a name that ends with .py, such as %dipexport train.py"),
        ("%dipexport no/such/train.py", "%dipexport no/such/train.py: files cannot be written to the folder no/such"),
        ("%dipexport other.py --cells 99999", "--cells 99999: no cell 99999 has run since the group started"),
        ("%dipexport other.py --cells x", "--cells x: type numbers of cells, such as --cells 3-9,12"),
        ("%dipexport other.py --check modle", "--check modle: rank 0 has no variable modle; type --check model"),
        ("%dipexport other.py --check noisy", "--check noisy: a function has no values to compare, on rank 0"),
    ],
)
def test_invalid_input_is_refused(trained: Notebook, typed: str, message: str) -> None:
    refused = trained.run(typed)
    assert refused.error == "BadInput"
    assert refused.message.startswith(message)
    assert not Path(trained.folder, "other.py").exists()


def test_only_force_overwrites_a_file(trained: Notebook) -> None:
    Path(trained.folder, "mine.py").write_text("mine")
    assert trained.run("%dipexport mine.py").message == "%dipexport mine.py: the file exists; --force overwrites it"
    assert script_in(trained, "mine.py") == "mine"
    trained.ok("%dipexport mine.py --force")
    assert "def main" in script_in(trained, "mine.py")


def test_code_without_a_translation_is_named(trained: Notebook) -> None:
    Path(trained.folder, "other_script.py").write_text("pass")
    trained.ok("%%dip\n%run other_script.py")
    number = trained.ok("%dipcells").number - 1
    refused = trained.run("%dipexport partial.py")
    assert f"cell {number}: %run other_script.py" in refused.message
    assert not Path(trained.folder, "partial.py").exists()
    trained.ok("%dipexport partial.py --partial")
    assert f"raise NotImplementedError('cell {number}: %run other_script.py')" in script_in(trained, "partial.py")
