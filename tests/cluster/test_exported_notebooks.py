"""Every notebook is exported, and its script gives equal values under torchrun, or ddip refuses it with the reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest

from ddip.cluster.processes import preload_client

from .answers import AnsweringClient
from .test_notebooks import HOSTS, LESSONS, NOTEBOOKS

END = "%makedip -k"
EQUAL = {
    "01_quickstart": (END, "--data --check model losses accuracy"),
    "02_makedip": ("%makedip -n 3", "--check kept"),
    "06_failures": ("%%dip\nloss = model", "--check model"),
    "fsdp": ("import ddip", "--check model"),
    "hf_finetune": ("from transformers import TrainerCallback", "--check model"),
    "kaggle_colab": (END, "--check model losses points"),
    "long_runs": (END, "--check model losses right"),
    "scripts": ("%diprun train.py --crash-at 3", "--check model losses"),
    "multi_process_tutorial": ("args = argparse", "--check model mine"),
}
"""Cell before which a notebook is exported, and options: the end, or the first cell that no script repeats."""
REFUSED = {
    "03_dip_autodip": "await asyncio.sleep(0.1)",
    "04_output": "a script has no widgets",
    "05_dipush_dipull": "it contains code of the notebook; create it in a %%dip cell",
    "06_failures": "%makedip --repair replaced rank 2",
    "course_exercises": "-a lightning changes its framework on ranks, which a script does not",
    "debugging": "it failed (",
    "fsdp": "%makedip changed the group from 4 to 2 ranks",
    "hf_finetune": "-a hf changes its framework on ranks, which a script does not",
    "lightning": "-a lightning changes its framework on ranks, which a script does not",
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
    "keeping": "another process owns its group",
    **dict.fromkeys(map(str, LESSONS.values()), "-a fastai"),
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
    notebook = nbformat.read(path, as_version=4)
    exports = {}
    for before, line in exports_of(name):
        at = next(
            i
            for i, cell in enumerate(notebook.cells)
            if cell.cell_type == "code" and (cell.source.startswith(before) or END == before in cell.source)
        )
        exports[line] = nbformat.v4.new_code_cell(f"%%dip local\n{line}", metadata={"tags": ["raises-exception"]})
        notebook.cells.insert(at, exports[line])
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(preload_client.ONLY_ENGINES[0], raising=False)
        AnsweringClient(notebook, timeout=1000, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for line, cell in exports.items():
        shown = "".join(out.get("text", "") + out.get("evalue", "") for out in cell.outputs)
        if "equal.py" in line:
            assert "ddip: equal.py gives the session's values: " in shown
            assert "largest difference 0\n" in shown
            assert (tmp_path / "equal.py").exists()
        else:
            assert REFUSED[name] in shown
            assert not (tmp_path / "refused.py").exists()
