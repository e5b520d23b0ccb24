"""Every notebook is exported, and its script gives equal values under torchrun, or ddip refuses it with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest

from .answers import AnsweringClient
from .conftest import whole_preload
from .test_notebooks import HOSTS, LESSONS, NOTEBOOKS

END = "%makedip -k"
EQUAL = {
    "01_quickstart": (END, "--data --check model losses accuracy"),
    "02_makedip": ("%makedip -n 3", "--check kept"),
    "03_dip_autodip": (END, "--cells 2,4-30 --check tau"),
    "04_output": (END, "--cells 2-11,14-40 --check step"),
    "05_dipush_dipull": (END, "--cells 8-30 --check weights"),
    "06_failures": ("%%dip\nloss = model", "--check model"),
    "course_exercises": (END, "--check model mine"),
    "debugging": (END, "--cells 2,8 --check last"),
    "fsdp": ("import ddip", "--check model"),
    "hf_finetune": ("from transformers import TrainerCallback", "--check model"),
    "keeping": (END, "--check model loss"),
    "lightning": ('main("--strategy ddp_notebook")', "--check net"),
    "kaggle_colab": (END, "--check model losses points"),
    "long_runs": (END, "--check model losses right"),
    "saving": ("%makedip -r", "--check model losses"),
    "scripts": ("%diprun train.py --crash-at 3", "--check model losses"),
    "multi_process_tutorial": ("args = argparse", "--check model mine"),
}
"""Cell before which a notebook is exported, and options: the end, or the first cell that no script repeats."""
REFUSED = {
    "03_dip_autodip": "await asyncio.sleep(0.1)",
    "04_output": "a script has no widgets",
    "05_dipush_dipull": "it contains code of the notebook; create it in a %%dip cell",
    "06_failures": "%makedip --repair replaced rank 2",
    "debugging": "it failed (",
    "fsdp": "%makedip changed the group from 4 to 2 ranks",
    "hf_finetune": "it failed (",
    "lightning": "it failed (",
    "multi_process_tutorial": "it failed (",
    "saving": "%makedip changed the group from 2 to 3 ranks",
    "scripts": "only a script in the notebook's folder can be exported",
}
"""Reason why ddip refuses to export a notebook at its end; without --check, so that any doubt counts."""
NEEDS = {
    "course_exercises": "lightning",
    "hf_finetune": "trl",
    "lightning": "lightning",
    "multi_process_tutorial": "torchvision",
}
"""Packages that ``make test`` does not install."""
NOT_RUN = {
    HOSTS.stem: "--check needs all ranks on this machine",
    **dict.fromkeys(map(str, LESSONS.values()), "tests/system/test_lessons.py exports them"),
}


def test_every_notebook_is_exported_or_has_a_reason() -> None:
    assert {path.stem for path in NOTEBOOKS} == EQUAL.keys() | REFUSED.keys() | NOT_RUN.keys()


def exports_of(name: str) -> list[tuple[str, str]]:
    """Return the cells before which the notebook is exported, with the line to type."""
    found = [(EQUAL[name][0], f"%dipexport equal.py {EQUAL[name][1]}")] if name in EQUAL else []
    return found + ([(END, "%dipexport refused.py")] if name in REFUSED else [])


SLOW = {
    "02_makedip",
    "05_dipush_dipull",
    "course_exercises",
    "debugging",
    "fsdp",
    "hf_finetune",
    "kaggle_colab",
    "lightning",
    "long_runs",
    "multi_process_tutorial",
}
"""Notebooks whose export takes half a minute or more; ``make test-long`` exports them."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in SLOW else pytest.mark.grid)
        for name in sorted(EQUAL.keys() | REFUSED.keys())
    ],
)
def test_the_script_of_the_notebook_gives_its_values(name: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(NEEDS.get(name, "torch")) is None:
        pytest.skip(f"{NEEDS[name]} is not installed")
    (path,) = (path for path in NOTEBOOKS if path.stem == name)
    for line, shown in shown_by_exports(path, tmp_path, exports_of(name)).items():
        if "equal.py" in line:
            assert_equal(shown, tmp_path)
        else:
            assert REFUSED[name] in shown
            assert not (tmp_path / "refused.py").exists()


def shown_by_exports(path: Path, folder: Path, exports: list[tuple[str, str]]) -> dict[str, str]:
    """Run the notebook at `path` in `folder` with `exports`, pairs of a cell's beginning and the line before it.

    Returns the text that each line shows, with that of its error.
    """
    notebook = nbformat.read(path, as_version=4)
    cells = {}
    for before, line in exports:
        at = next(
            i
            for i, cell in enumerate(notebook.cells)
            if cell.cell_type == "code" and (cell.source.startswith(before) or END == before in cell.source)
        )
        cells[line] = nbformat.v4.new_code_cell(f"%%dip local\n{line}", metadata={"tags": ["raises-exception"]})
        notebook.cells.insert(at, cells[line])
    with whole_preload():
        AnsweringClient(notebook, timeout=1000, resources={"metadata": {"path": str(folder)}}).execute()
    return {
        line: "".join(out.get("text", "") + out.get("evalue", "") for out in cell.outputs)
        for line, cell in cells.items()
    }


def assert_equal(shown: str, folder: Path) -> None:
    """Assert that ``%dipexport equal.py --check`` has found equal values, and written the script."""
    assert "ddip: equal.py gives the session's values: " in shown
    assert "largest difference 0\n" in shown
    assert (folder / "equal.py").exists()
