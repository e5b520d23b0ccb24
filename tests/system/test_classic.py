"""Notebook 6.5, the classic front end, with the versions that Colab pins; Colab and Kaggle have its server.

Its server is in an environment of its own, as its versions do not fit JupyterLab's, and starts kernels of the tests'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Locator, Page

from ddip.cluster.processes.on_host import hold_port

from .lab import Lab, run_server, wait_for

PINS = Path(__file__).parents[1] / "platforms" / "colab.txt"
KERNEL = {"kernelspec": {"name": "tests", "display_name": "tests", "language": "python"}}
CELLS = {
    "start": "%load_ext ddip\n%config DipMagics.report_after = 10\n%makedip -n 2",
    "plot": (
        "%%dip -S all\nimport matplotlib.pyplot as plt\nprint('loss on rank', rank)\n"
        "plt.figure(figsize=(3, 2)); plt.plot([rank, 1]); plt.show()"
    ),
    "error": "%%dip\nif rank: 1 / 0",
    "hang": "%%dip\nimport time\nfrom pathlib import Path\nPath(f'hangs-{rank}').touch()\nwhile True: time.sleep(0.01)",
    "debug": "%%dip\nx = rank + 40\nif rank == 1: breakpoint()\nprint('after', x)",
    "push": "lr = 3\n%dipush lr",
    "cell": "%%dip\ndoubled = 2 * lr\nprint('doubled on', world_size)",
    "pull": "%dipull doubled\ndoubled",
    "end": "%makedip -k",
}
NUMBER = {name: number for number, name in enumerate(CELLS)}


class Classic:
    """A notebook in Notebook 6.5."""

    def __init__(self, page: Page, folder: Path) -> None:
        self.page = page
        self.folder = folder

    def output(self, name: str) -> Locator:
        """The output of a cell."""
        return self.page.locator(".code_cell").nth(NUMBER[name]).locator(".output_wrapper")

    def text(self, name: str) -> str:
        """The text that a person sees below a cell."""
        return self.output(name).inner_text()

    def begin(self, name: str) -> None:
        """Run a cell, by keyboard."""
        self.page.locator(".code_cell").nth(NUMBER[name]).locator(".CodeMirror").click()
        self.page.keyboard.press("Control+Enter")

    def finish(self, name: str) -> str:
        """Wait for the end of a cell; returns the text below it."""
        prompt = self.page.locator(".code_cell").nth(NUMBER[name]).locator(".input_prompt")
        wait_for(lambda: any(map(str.isdigit, prompt.inner_text())), f"the end of {name}: {self.text(name)}", 120)
        return self.text(name)

    def answer(self, name: str, line: str) -> None:
        """Wait for the prompt of a debugger below a cell, and type a line."""
        box = self.output(name).locator("input.raw_input")
        wait_for(lambda: box.count() == 1, f"a prompt; shown: {self.text(name)}")
        box.press_sequentially(line)
        box.press("Enter")
        wait_for(lambda: f"(Pdb) {line}" in self.text(name), "the page to take the line")

    def run(self, name: str) -> str:
        """Run a cell to its end; returns the text below it."""
        self.begin(name)
        return self.finish(name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A server of Notebook 6.5: the folder of its notebooks, and its URL."""
    folder = tmp_path_factory.mktemp("classic").resolve()
    venv.create(folder / "venv", symlinks=True)
    python = str(folder / "venv" / "bin" / "python")
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--constraint", str(PINS)]
    done = subprocess.run([*install, "notebook"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    kernel = folder / "data" / "kernels" / "tests"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    environment = {name: value for name, value in os.environ.items() if name == "PYTHONPATH"}
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "tests", "language": "python", "env": environment})
    )
    (folder / "notebooks").mkdir()
    port = hold_port()
    settings = {f"JUPYTER_{kind.upper()}_DIR": str(folder / kind) for kind in ("config", "data", "runtime")}
    settings |= {"IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": ""}
    command = [python, "-m", "notebook", "--no-browser", "--ip=127.0.0.1", "--allow-root", f"--port={port}"]
    command += ["--NotebookApp.token=", "--NotebookApp.password=", f"--NotebookApp.notebook_dir={folder / 'notebooks'}"]
    url = f"http://127.0.0.1:{port}"
    with run_server(command, settings, url, folder):
        yield folder / "notebooks", url


@pytest.fixture
def classic(server: tuple[Path, str], lab: Lab) -> Iterator[Classic]:
    """A notebook with all cells, in a page of the browser that JupyterLab's tests use."""
    folder, url = server
    notebook = nbformat.v4.new_notebook(metadata=KERNEL)
    notebook.cells = [nbformat.v4.new_code_cell(cell) for cell in CELLS.values()]
    nbformat.write(notebook, folder / "seen.ipynb")
    assert lab.page.context.browser is not None
    page = lab.page.context.browser.new_page(viewport={"width": 1100, "height": 1400})
    page.set_default_timeout(20_000)
    try:
        page.goto(f"{url}/notebooks/seen.ipynb")
        page.wait_for_selector("#kernel_indicator_icon.kernel_idle_icon", timeout=90_000)
        yield Classic(page, folder)
    finally:
        page.close()


def test_a_group_lives_and_ends_in_the_classic_notebook(classic: Classic) -> None:
    assert "ddip: 2 ranks on the CPU, gloo" in classic.run("start")

    classic.run("plot")
    tabs = classic.output("plot").locator("label.ddip-rank")
    assert tabs.all_inner_texts() == ["rank 0", "rank 1"]
    for rank in (1, 0):
        tabs.nth(rank).click()
        shown = classic.output("plot").locator(".ddip-shown:visible")
        assert shown.count() == 1 and f"loss on rank {rank}" in shown.inner_text()
        assert shown.locator("img").evaluate("image => image.naturalWidth") > 100

    assert "CellError: rank 1: ZeroDivisionError: division by zero" in classic.run("error")

    classic.begin("hang")
    wait_for(lambda: len(list(classic.folder.glob("hangs-*"))) == 2, "the cell to run on every rank")
    classic.page.locator('button[data-jupyter-action="jupyter-notebook:interrupt-kernel"]').click()
    assert "KeyboardInterrupt: the cell was interrupted on ranks 0, 1" in classic.finish("hang")

    classic.begin("debug")
    classic.answer("debug", "p x")
    classic.answer("debug", "c")
    shown = classic.finish("debug")
    assert "rank 1 of 2, cell [" in shown and "\n41\n" in shown and "after 40" in shown, shown

    classic.run("push")
    assert classic.run("cell").strip() == "doubled on 2"
    assert classic.run("pull").strip().endswith("6")
    assert "ended 2 ranks" in classic.run("end")
