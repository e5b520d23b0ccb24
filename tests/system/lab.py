"""A real JupyterLab in a headless Chromium, used by keyboard and mouse as a person would."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import nbformat
from playwright.sync_api import Locator, Page, sync_playwright
from playwright.sync_api import TimeoutError as PageTimeout

from ddip.cluster.processes.on_host import hold_port

CHROMIUM = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
CHROMIUM += ("--disable-component-update", "--disable-sync")
SETTINGS = {
    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},  # cells out of sight stay in the page
}
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


def wait_for(condition: Callable[[], object], what: str, seconds: float = 90) -> None:
    """Wait until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds} s for: {what}")
        time.sleep(0.02)


class Lab:
    """A server in `folder`, and one browser page."""

    def __init__(self, folder: Path, page: Page, url: str) -> None:
        self.folder = folder
        self.page = page
        self.url = url

    def open(self, name: str, cells: list[str]) -> None:
        """Create a notebook with `cells`, and open it."""
        self.page.goto("about:blank")  # a page with the former file would open a dialog
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells], metadata=KERNEL)
        nbformat.write(notebook, self.folder / name)
        self.load(name)

    def start(self, name: str, cells: list[str], number: int) -> str:
        """Create and open a notebook, and run its cell `number`.

        Keystrokes may be lost while the page still connects, so this is tried three times.
        """
        dialogs = []
        for _ in range(3):
            self.open(name, cells)
            with contextlib.suppress(AssertionError, PageTimeout):
                return self.run(number, 20)
            dialogs += self.page.locator(".jp-Dialog").all_inner_texts()
        raise AssertionError(f"cell {number} of {name} did not end in three attempts; dialogs: {dialogs}")

    def load(self, name: str) -> None:
        """Open an existing notebook in a fresh page."""
        self.page.goto(f"{self.url}/lab/tree/{name}?reset")
        self.page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=90_000)
        self.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000)
        wait_for(lambda: self._is_busy() is False, "the kernel to be idle")

    def cell(self, number: int) -> Locator:
        """Return the cell `number`, from 0."""
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(number)

    def output(self, number: int) -> Locator:
        """Return the output area of a cell."""
        return self.cell(number).locator(".jp-Cell-outputWrapper")

    def text(self, number: int) -> str:
        """Return the text that a person sees below a cell."""
        output = self.output(number)
        return output.inner_text() if output.count() else ""

    def begin(self, number: int, has_effect: Callable[[], bool] = lambda: False) -> None:
        """Run a cell by keyboard; try again, as a person would, if the page was not ready.

        The cell has also begun if it `has_effect`: the server may report an idle kernel while a cell runs.
        """
        before = self.prompt(number)

        def has_begun() -> bool:
            prompt = self.prompt(number)
            return has_effect() or (prompt != before and any(map(str.isdigit, prompt))) or self._is_busy() is True

        for _ in range(5):
            self.cell(number).locator(".cm-content").click()
            self.page.keyboard.press("Control+Enter")
            with contextlib.suppress(AssertionError):
                return wait_for(has_begun, "the cell to begin", 4)
        raise AssertionError(f"cell {number} does not begin; its prompt is {self.prompt(number)}")

    def _is_busy(self) -> bool | None:
        """Return True if the server reports a busy kernel, None if it cannot tell, as while a kernel starts."""
        try:
            with urllib.request.urlopen(f"{self.url}/api/kernels", timeout=5) as answer:
                return any(kernel["execution_state"] == "busy" for kernel in json.load(answer))
        except OSError:
            return None

    def prompt(self, number: int) -> str:
        """Return the prompt of a cell, such as ``[7]:``."""
        return self.cell(number).locator(".jp-InputPrompt").inner_text()

    def is_running(self, number: int) -> bool:
        """Return True while a cell runs."""
        prompt = self.prompt(number)
        return "*" in prompt or not any(letter.isdigit() for letter in prompt)

    def run(self, number: int, seconds: float = 120) -> str:
        """Run a cell to its end, and return the text below it."""
        self.begin(number)
        self.finish(number, seconds)
        return self.text(number)

    def finish(self, number: int, seconds: float = 120) -> None:
        """Wait for the end of a cell."""
        try:
            wait_for(lambda: not self.is_running(number), f"the end of cell {number}", seconds)
        except AssertionError:
            self.page.screenshot(path=str(self.folder.parent / "page.png"))
            log = (self.folder.parent / "server.log").read_text()
            raise AssertionError(
                f"cell {number} did not end; it shows {self.text(number)!r}; the server's log:\n{log[-3000:]}"
            ) from None

    def save(self) -> None:
        """Save by keyboard; try again, because output that arrives during a save leaves the page unsaved."""
        dirty = self.page.locator(".lm-TabBar-tab.lm-mod-current.jp-mod-dirty")
        for _ in range(7):
            self.page.keyboard.press("Escape")
            self.page.keyboard.press("Control+s")
            with contextlib.suppress(AssertionError):
                return wait_for(lambda: dirty.count() == 0, "the notebook to be saved", 4)
        self.page.screenshot(path=str(self.folder.parent / "page.png"))
        dialog = self.page.locator(".jp-Dialog")
        raise AssertionError(f"the notebook is not saved; dialogs: {dialog.all_inner_texts()}")

    def picture(self, locator: Any, path: Path) -> None:
        """Take a picture of a part of the page."""
        locator.screenshot(path=str(path))


@contextlib.contextmanager
def open_lab(folder: Path, theme: str = "JupyterLab Light", scale: float = 1) -> Iterator[Lab]:
    """Start a server and a browser, with `scale` pixels per CSS pixel, and end both."""
    port = hold_port()
    settings = {"JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_DATA_DIR": str(folder / "data")}
    settings |= {"JUPYTER_RUNTIME_DIR": str(folder / "runtime"), "IPYTHONDIR": str(folder / "ipython")}
    settings |= {f"JUPYTERLAB_{kind}_DIR": str(folder / kind) for kind in ("SETTINGS", "WORKSPACES")}
    overrides = folder / "config" / "labconfig"
    overrides.mkdir(parents=True)
    (overrides / "default_setting_overrides.json").write_text(
        json.dumps({**SETTINGS, "@jupyterlab/apputils-extension:themes": {"theme": theme}})
    )
    extensions = {"ServerApp": {"jpserver_extensions": {"jupyter_server_mcp": False}}}  # it would use a fixed port
    (folder / "config" / "jupyter_server_config.json").write_text(json.dumps(extensions))
    work = folder / "notebooks"
    work.mkdir()
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1", "--allow-root"]
    command += [f"--port={port}", "--ServerApp.port_retries=0"]
    command += ["--ServerApp.token=", "--ServerApp.password=", f"--ServerApp.root_dir={work}"]
    url = f"http://127.0.0.1:{port}"
    with run_server(command, settings, url, folder), sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=list(CHROMIUM))
        try:
            page = browser.new_page(viewport={"width": 1100, "height": 1400}, device_scale_factor=scale)
            page.set_default_timeout(20_000)
            yield Lab(work, page, url)
        finally:
            browser.close()


@contextlib.contextmanager
def run_server(command: list[str], settings: dict[str, str], url: str, folder: Path) -> Iterator[None]:
    """Run a Jupyter server until the context ends; it writes to ``server.log`` in `folder`."""
    with (folder / "server.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **settings}, cwd=folder / "notebooks"
        )
        try:
            # 90 s because other tests may keep both cores busy
            wait_for(lambda: _is_reachable(url) or server.poll() is not None, "the server", 90)
            assert server.poll() is None, (folder / "server.log").read_text()
            yield
        finally:
            server.terminate()
            server.wait(timeout=30)


def _is_reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/api", timeout=1):
            return True
    except OSError:
        return False
