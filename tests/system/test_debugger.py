"""The debugger of a rank as a person sees it: in JupyterLab, in terminals, and where no one can answer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Locator

from .lab import Lab, wait_for

CELLS = {
    "start": "%load_ext ddip\n%config DipMagics.report_after = 10\n%makedip -n 3",
    "steps": (
        "%%dip\nimport torch, torch.distributed as dist\nx = torch.ones(2) * rank\nprint('before', rank)\n"
        "if rank == 1:\n    breakpoint()\n    y = x + 1\n    z = y * 2\ndist.all_reduce(x)\nprint('sum', x.tolist())"
    ),
    "stop": "%%dip\nkept = rank\nif rank == 1: breakpoint()\ndist.all_reduce(x)\nlate = 1",
    "after": "%%dip\ndist.barrier()\nprint('kept', kept, 'late' in globals())",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


@pytest.fixture(scope="module")
def notebook(lab: Lab) -> Iterator[Lab]:
    """Open a notebook with three ranks."""
    lab.start("debugged.ipynb", list(CELLS.values()), NUMBER["start"])
    yield lab


class InputBox:
    """The box below a cell in which JupyterLab asks."""

    def __init__(self, lab: Lab, name: str) -> None:
        self._lab, self._name = lab, name

    @property
    def _box(self) -> Locator:
        return self._lab.output(NUMBER[self._name]).locator("input.jp-Stdin-input:not([disabled])")

    def wait_for_prompt(self) -> str:
        """Wait for an open box, and return its prompt."""
        wait_for(lambda: self._box.count() == 1, f"a prompt; shown: {self._lab.text(NUMBER[self._name])}")
        return self._lab.output(NUMBER[self._name]).locator(".jp-Stdin-prompt").last.inner_text().strip()

    def type(self, line: str) -> None:
        """Type a line, and wait until the page has taken it."""
        self._box.fill(line)
        self._box.press("Enter")
        wait_for(lambda: line in self._lab.text(NUMBER[self._name]), f"the typed line {line}")


def test_a_person_steps_through_a_rank_in_jupyterlab(notebook: Lab) -> None:
    notebook.begin(NUMBER["steps"])
    box = InputBox(notebook, "steps")
    number = 0
    lines = []
    for line in ("p x", "ranks", "n", "n", "p z", "c"):
        prompt = box.wait_for_prompt()
        found = re.fullmatch(r"rank 1 of 3, cell \[(\d+)\] line (\d+) \(Pdb\)", prompt)
        assert found, prompt
        lines.append(int(found[2]))
        box.type(line)
    notebook.finish(NUMBER["steps"])
    text = notebook.text(NUMBER["steps"])
    if folder := os.environ.get("PICTURES"):
        notebook.picture(notebook.output(NUMBER["steps"]), Path(folder) / "steps.png")
    assert lines[-1] > lines[0]
    assert text.index("before 0") < text.index("tensor([1., 1.])") < text.index("tensor([4., 4.])"), text
    assert "ranks 0, 2: all_reduce" in text


def test_stop_at_the_prompt_ends_the_cell(notebook: Lab) -> None:
    notebook.begin(NUMBER["stop"])
    InputBox(notebook, "stop").wait_for_prompt()
    notebook.page.locator('jp-button[data-command="notebook:interrupt-kernel"], .jp-StopButton').first.click()
    notebook.finish(NUMBER["stop"])
    assert "KeyboardInterrupt: the cell was interrupted on ranks 0-2" in notebook.text(NUMBER["stop"])
    assert notebook.run(NUMBER["after"]).strip().endswith("kept 0 False")
