"""The debugger of a rank as a person sees it: in JupyterLab, in terminals, and where no one can answer."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pexpect
import pytest
from nbclient import NotebookClient
from playwright.sync_api import Locator

from .lab import KERNEL, Lab, wait_for
from .test_headless import CONSOLE, Console, Terminal

CELLS = {
    "start": "%load_ext ddip\n%config DipMagics.report_after = 10\n%makedip -n 3",
    "steps": (
        "%%dip -S all\nimport torch, torch.distributed as dist\nx = torch.ones(2) * rank\nprint('before', rank)\n"
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
        box = self._box.element_handle()
        box.fill(line)
        box.press("Enter")
        wait_for(lambda: not box.evaluate("box => box.isConnected && !box.disabled"), "the page to take the line")


def test_a_person_steps_through_a_rank_in_jupyterlab(notebook: Lab) -> None:
    notebook.begin(NUMBER["steps"])
    box = InputBox(notebook, "steps")
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
    assert notebook.output(NUMBER["steps"]).locator("label.ddip-rank").count() == 3
    assert text.index("before 0") < text.index("tensor([1., 1.])") < text.index("tensor([4., 4.])"), text
    assert "ranks 0, 2: all_reduce" in text


def test_stop_at_the_prompt_ends_the_cell(notebook: Lab) -> None:
    notebook.begin(NUMBER["stop"])
    InputBox(notebook, "stop").wait_for_prompt()
    notebook.page.locator('jp-button[data-command="notebook:interrupt-kernel"], .jp-StopButton').first.click()
    notebook.finish(NUMBER["stop"])
    assert "KeyboardInterrupt: the cell was interrupted on ranks 0-2" in notebook.text(NUMBER["stop"])
    assert notebook.run(NUMBER["after"]).strip().endswith("kept 0 False")


def test_notebook_7_asks_below_the_cell(notebook: Lab) -> None:
    notebook.page.goto(f"{notebook.url}/notebooks/debugged.ipynb")
    notebook.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
    notebook.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000)
    notebook.begin(NUMBER["stop"])
    box = InputBox(notebook, "stop")
    for line in ("p rank + 40", "c"):
        assert box.wait_for_prompt().startswith("rank 1 of 3, cell [")
        box.type(line)
    notebook.finish(NUMBER["stop"])
    assert "\n41\n" in notebook.text(NUMBER["stop"])


# -- terminals


def open_terminal(folder: Path) -> Terminal:
    return Terminal(folder)


def open_console(folder: Path) -> Terminal:
    return Console(folder, CONSOLE, terminal="dumb")


class Prompt:
    """The prompt of a rank in a terminal."""

    def __init__(self, child: pexpect.spawn[str], end: str) -> None:
        self._child, self._end = child, end

    def wait_for_prompt(self) -> str:
        """Wait for the prompt, and return the text before it."""
        self._child.expect(r"rank 1 of \d, .*cell \[\d+\] line \d+ \(Pdb\) ", timeout=120)
        return str(self._child.before)

    def type(self, line: str) -> None:
        """Type a line."""
        self._child.send(line + self._end)

    def press(self, key: Callable[[], object]) -> None:
        """Press Ctrl-C or Ctrl-D once the program waits for input.

        A signal between the output of the prompt and the call that reads has no effect before that call ends.
        """
        waits = Path(f"/proc/{self._child.pid}/wchan")
        wait_for(lambda: waits.read_text() in ("wait_woken", "do_select"), f"a read call; now: {waits.read_text()}")
        key()


@pytest.mark.parametrize("start", [open_terminal, open_console])
def test_a_rank_is_debugged_in_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: Callable[[Path], Terminal]
) -> None:
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    terminal = start(tmp_path)
    prompt = Prompt(terminal.child, "\n" if start is open_terminal else "\r")
    terminal.run("%load_ext ddip")
    terminal.run("%makedip -n 3")
    terminal.begin(
        "%%dip\nimport torch, torch.distributed as dist\nx = torch.ones(2) * rank\nif rank == 1: breakpoint()\n"
        "y = x + 7\ndist.all_reduce(x)\nprint('sum', x.tolist())"
    )
    assert "rank 1 has stopped" in prompt.wait_for_prompt()
    for line, shown in {"p x": "tensor([1., 1.])", "ranks": "ranks 0, 2: all_reduce", "n": "", "p y": "8., 8."}.items():
        prompt.type(line)
        assert shown in prompt.wait_for_prompt()
    prompt.type("c")
    assert "sum [3.0, 3.0]" in terminal.finish()

    for end in (terminal.child.sendintr, terminal.child.sendeof):
        terminal.begin("%%dip\nkept = rank\nif rank == 1: breakpoint()\ndist.barrier()\nlate = 1")
        prompt.wait_for_prompt()
        prompt.press(end)
        shown = terminal.finish()
        assert shown.startswith("\r\n") and "KeyboardInterrupt: the cell was interrupted on ranks 0-2" in shown
        assert "kept 0 False" in terminal.run("%%dip\ndist.barrier()\nprint('kept', kept, 'late' in globals())")
    terminal.child.send("exit" + ("\n" if start is open_terminal else "\r"))
    terminal.child.expect(pexpect.EOF, timeout=90)
    terminal.child.close()


SCRIPT = """
import ddip
with ddip.Group(2) as group:
    group.run('''
        import torch, torch.distributed as dist
        x = torch.ones(1) * rank
        if rank == 1: breakpoint()
        y = x + 7
        dist.all_reduce(x)
        assert x.item() == 1
    ''')
    print("done", group.pull(["y"], 1)["y"].item())
"""


def test_a_script_in_a_terminal_asks(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    child = pexpect.spawn(sys.executable, ["script.py"], cwd=str(tmp_path), encoding="utf-8", echo=False)
    prompt = Prompt(child, "\n")
    prompt.wait_for_prompt()
    prompt.type("n")
    assert "dist.all_reduce(x)" in prompt.wait_for_prompt()
    prompt.type("c")
    child.expect("done 8.0", timeout=60)
    child.expect(pexpect.EOF, timeout=60)
    child.close()
    assert child.exitstatus == 0


# -- notebooks that run without a viewer

STOPPING = [
    "%load_ext ddip\n%config DipMagics.report_after = 10\n%makedip -n 2",
    "%%dip\nimport torch.distributed as dist\nx = rank + 40\nif rank == 1: breakpoint()\ny = x + 1\ndist.barrier()",
    "%%dip -r 1\nprint(y)",
]


def new_source(folder: Path) -> Path:
    """Write a notebook with a breakpoint."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in STOPPING], metadata=KERNEL)
    path = folder / "source.ipynb"
    nbformat.write(notebook, path)
    return path


class AnsweringClient(NotebookClient):
    """nbclient with a person who answers."""

    def __init__(self, *args: object, answers: list[str], **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.answers = answers
        self.prompts: list[str] = []

    async def async_start_new_kernel_client(self) -> object:
        """Start the client with stdin, and answer."""
        client = await super().async_start_new_kernel_client()
        client.allow_stdin = True
        self.answering = asyncio.ensure_future(self._answer_prompts(client))
        return client

    async def _answer_prompts(self, client: object) -> None:
        for answer in self.answers:
            request = await client.stdin_channel.get_msg(timeout=None)
            self.prompts.append(request["content"]["prompt"])
            client.input(answer)


def test_nbclient_with_stdin_answers(tmp_path: Path) -> None:
    notebook = nbformat.read(new_source(tmp_path), as_version=4)
    client = AnsweringClient(notebook, timeout=240, answers=["p x + 30", "n", "c"])
    client.execute()
    assert len(client.prompts) == 3 and client.prompts[0].startswith("rank 1 of 2, cell [2] line ")
    shown = "".join(output.get("text", "") for output in notebook.cells[1].outputs)
    assert "71\n" in shown and "rank 1 has stopped" in shown
    assert "42" in str(notebook.cells[2].outputs)


@pytest.mark.parametrize(
    "command", [["nbconvert", "--to", "notebook", "--execute", "--allow-errors"], ["papermill", "--no-progress-bar"]]
)
def test_without_stdin_a_breakpoint_is_one_error(tmp_path: Path, command: list[str]) -> None:
    source = new_source(tmp_path)
    output = ["--output", "done.ipynb"] if "nbconvert" in command else ["done.ipynb"]
    ended = subprocess.run(
        [sys.executable, "-m", *command, source.name, *output],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
    )
    done = nbformat.read(tmp_path / "done.ipynb", as_version=4)
    cell = next(cell for cell in done.cells if cell.source == STOPPING[1])
    errors = [output for output in cell.outputs if output.output_type == "error"]
    assert len(errors) == 1 and "no one can answer a debugger here" in errors[0].evalue, ended.stderr
    assert "Traceback" not in str(cell.outputs[:-1]) and "File" not in str(cell.outputs[:-1]), cell.outputs
