"""A notebook that runs without a viewer, and a terminal: their text is compared with golden files.

``pytest tests/system --golden`` writes the files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pexpect
import pytest

from .lab import KERNEL
from .readable import assert_golden, notebook_text, stable_text

GOLDEN = Path(__file__).parent / "golden"
CELLS = [
    "%load_ext ddip\n%makedip -n 3",
    "%%dip\nfrom tqdm import tqdm\nprint('one rank')\nfor i in tqdm(range(3000)): pass\n1 + 1",
    "%%dip -S all\nprint('same' if rank else 'different')\n{'rank': min(rank, 1)}",
    "%%dip -S all\nfor i in tqdm(range(3000), desc='bar'): pass",
    "%%dip\nimport matplotlib.pyplot as plt\nfrom fastprogress import progress_bar\n"
    "for i in progress_bar(range(50)): pass\nplt.figure(figsize=(1, 1)); plt.plot([1, 2]);",
    "%config DipMagics.max_output_chars = 1000",
    "%%dip\nfor i in range(1000): print('line', i)",
    "%autodip on",
    "rank * 10",
    "%autodip off",
    "%%dip -S 1\nif rank: 1 / 0",
]


@pytest.fixture
def write(pytestconfig: pytest.Config) -> bool:
    """Return True if the golden files are to be written."""
    return bool(pytestconfig.getoption("--golden"))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Write the notebook to run."""
    cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS]
    cells[-1].metadata["tags"] = ["raises-exception"]
    path = tmp_path / "source.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=KERNEL), path)
    return path


def test_nbconvert_runs_a_notebook(source: Path, write: bool) -> None:
    command = [
        sys.executable,
        "-m",
        "nbconvert",
        "--to",
        "notebook",
        "--execute",
        "--output",
        "done.ipynb",
        source.name,
    ]
    subprocess.run(command, cwd=source.parent, check=True, capture_output=True)
    done = nbformat.read(source.parent / "done.ipynb", as_version=4)
    assert_golden(notebook_text(done), GOLDEN / "notebook.txt", write)


def test_papermill_runs_a_notebook(source: Path) -> None:
    command = [sys.executable, "-m", "papermill", source.name, "done.ipynb", "--no-progress-bar"]
    ended = subprocess.run(command, cwd=source.parent, capture_output=True, text=True)
    assert "ZeroDivisionError" in ended.stderr  # papermill stops at the error, and reports it
    done = nbformat.read(source.parent / "done.ipynb", as_version=4)
    done.cells = [cell for cell in done.cells if "papermill-error-cell-tag" not in cell.metadata.get("tags", [])]
    assert_golden(notebook_text(done), GOLDEN / "notebook.txt", False)


IN_A_TERMINAL = ["-m", "IPython", "--simple-prompt", "--no-banner", "--no-confirm-exit", "--colors=nocolor"]
CONSOLE = ["-m", "jupyter_console"]


class Terminal:
    """A program with IPython's prompt in a terminal."""

    def __init__(self, folder: Path, command: list[str] = IN_A_TERMINAL, terminal: str = "xterm") -> None:
        environment = {**os.environ, "IPYTHONDIR": str(folder), "TERM": terminal, "COLUMNS": "120", "LINES": "50"}
        environment.pop("PYTEST_CURRENT_TEST", None)
        self.child = pexpect.spawn(
            sys.executable,
            command,
            env=environment,
            cwd=str(folder),
            encoding="utf-8",
            dimensions=(50, 120),
            echo=False,
        )
        self._wait()

    def _wait(self) -> str:
        self.child.expect(r"In \[\d+\]: ", timeout=240)
        return str(self.child.before)

    def begin(self, code: str) -> None:
        """Type a cell."""
        lines = code.splitlines()
        for number, line in enumerate(lines):
            if number:
                self.child.expect(r"\.\.\.: ", timeout=60)
            self.child.sendline(line)
        for _ in range(2 if len(lines) > 1 else 0):  # blank lines end a cell
            self.child.expect(r"\.\.\.: ", timeout=60)
            self.child.sendline("")

    def run(self, code: str) -> str:
        """Type a cell; return the text shown by its end."""
        self.begin(code)
        return self._wait()

    def finish(self) -> str:
        """Wait for the prompt."""
        return self._wait()


def test_ddip_works_in_a_terminal(tmp_path: Path, write: bool) -> None:
    terminal = Terminal(tmp_path)
    texts = []
    for cell in CELLS[:4] + CELLS[5:]:
        for part in cell.split("\n") if cell.startswith("%load_ext") else [cell]:
            texts += [f">>> {line}" for line in part.splitlines()]
            lines = stable_text(terminal.run(part)).strip("\n").splitlines()
            texts += sorted(lines) if "-S all" in part else lines  # the order of the ranks varies
    assert_golden("\n".join(texts) + "\n", GOLDEN / "terminal.txt", write)
    terminal.begin(
        "%%dip\nimport torch.distributed as dist\nprint('hangs')\nif rank: dist.barrier()\nwhile not rank: pass"
    )
    terminal.child.expect("hangs\r\n", timeout=90)
    terminal.child.sendintr()
    assert "KeyboardInterrupt: the cell was interrupted on ranks 0-2" in terminal.finish()
    terminal.run(
        "%%dip\nimport threading\ngo = threading.Event()\n"
        "threading.Thread(target=lambda: (go.wait(), print('late'))).start()"
    )
    terminal.run("%%dip\ngo.set()")
    seen = ""
    while "late" not in seen:
        seen = terminal.run("pass")
    assert "[cell " in seen and "] late" in seen
    terminal.child.sendline("exit")
    terminal.child.expect(pexpect.EOF, timeout=90)
    terminal.child.close()
    assert terminal.child.exitstatus == 0


def test_a_terminal_shows_background_output_during_dipwait(tmp_path: Path) -> None:
    terminal = Terminal(tmp_path)
    terminal.run("%load_ext ddip")
    terminal.run("%makedip -n 2")
    go = tmp_path / "go"
    waits = f"import time, os\nwhile not os.path.exists({str(go)!r}): time.sleep(0.1); print('step')"
    terminal.run(f"%%dip --bg\n{waits}\nprint('over')")
    assert "Out[4]: 2" in terminal.run("1 + 1")
    terminal.begin("%dipwait")
    for _ in range(20):
        terminal.child.expect("step", timeout=90)
    go.touch()
    shown = terminal.finish()
    assert "over\r\ncell 3 ended" in shown
    assert "over" not in terminal.run("2 + 2")
    terminal.child.sendline("exit")
    terminal.child.expect(pexpect.EOF, timeout=90)
    terminal.child.close()


class Console(Terminal):
    """jupyter-console, whose prompt ends a multi-line cell only after blank lines."""

    def begin(self, code: str) -> None:
        """Type a cell."""
        for line in code.splitlines():
            self.child.send(f"{line}\r")
        self.child.send("\r\r" if "\n" in code else "")


def test_ddip_works_in_jupyter_console(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """jupyter-console has a kernel, and ignores updates of displays."""
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")
    console = Console(tmp_path, CONSOLE, terminal="dumb")
    console.run("%load_ext ddip")
    console.run("%config DipMagics.stall_timeout = 1")
    assert re.search(r"ddip: 2 ranks on the CPU, gloo, \d", console.run("%makedip -n 2"))
    shown = console.run("%%dip -S all\nprint('I am', rank)")
    assert "[rank 0] I am 0" in shown and "[rank 1] I am 1" in shown
    console.begin("%%dip\nimport torch, torch.distributed as dist\nif rank: dist.recv(torch.ones(1))  # from any rank")
    console.child.expect("Ctrl-C ends the cell and keeps all variables", timeout=180)
    console.child.sendintr()
    assert "the cell was interrupted on rank 1" in console.finish()
    console.child.send("exit\r")
    console.child.expect(pexpect.EOF, timeout=90)
    console.child.close()
