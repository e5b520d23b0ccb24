"""A kept group as a person sees it: the kernel restarts in JupyterLab while a cell trains in the background."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pytest

from ddip.kept import kept_folder
from ddip.kept.kept_folder import KeptGroup

from .lab import Lab, wait_for
from .test_headless import Terminal

CELLS = [
    "%load_ext ddip",
    "%makedip --keep -n 2",
    "%%dip --bg -S all\nimport os, time\nkept = rank\nfor step in range(6):\n"
    "    print('step', step, 'of', rank, flush=True)\n"
    "    while step == 2 and not os.path.exists('go'): time.sleep(0.05)\nprint('over', rank)",
    "%load_ext ddip\n%makedip --attach",
    "%dipwait",
    "%%dip -S all\nprint('kept', kept)",
    "%makedip -k",
]


@pytest.fixture
def find_kept() -> Iterator[Callable[[], KeptGroup]]:
    """Yield a function that returns the kept group of the test, which is ended if the test has failed."""
    before = {kept.pid for kept in kept_folder.list_kept()}
    new = lambda: [kept for kept in kept_folder.list_kept() if kept.pid not in before]  # noqa: E731
    yield lambda: new()[0]
    for kept in new():
        kept.end()


def test_the_kernel_restarts_while_a_cell_trains(lab: Lab, find_kept: Callable[[], KeptGroup]) -> None:
    lab.start("kept.ipynb", CELLS, 0)
    assert "is kept for 30 min" in lab.run(1)
    kept = find_kept()
    lab.run(2)
    wait_for(lambda: "step 2 of 0" in lab.text(2), "the third step")
    lab.page.keyboard.press("Escape")
    lab.page.keyboard.press("0")
    lab.page.keyboard.press("0")
    lab.page.locator(".jp-Dialog button.jp-mod-accept").click()
    wait_for(lambda: not kept.is_claimed, "the end of the kernel")
    (lab.folder / "go").touch()
    lab.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="idle"]', timeout=90_000)
    lab.run(3)
    lab.run(4)
    wait_for(lambda: "ended · ranks 0, 1" in lab.text(3), f"the end of the cell; shown: {lab.text(3)}")
    text = lab.text(3)
    assert all(f"step {step} of 0" in text for step in range(6)) and "over 0" in text, text
    lab.output(3).locator("label.ddip-rank").nth(1).click()
    wait_for(lambda: "over 1" in lab.text(3) and "step 0 of 1" in lab.text(3), "the tab of rank 1")
    assert "kept 0" in lab.run(5)
    assert "ended 2 ranks" in lab.run(6)
    assert not kept.is_alive


def test_a_terminal_attaches(tmp_path: Path, find_kept: Callable[[], KeptGroup]) -> None:
    first = Terminal(tmp_path)
    first.run("%load_ext ddip")
    assert "is kept for 90 s" in first.run("%makedip --keep 90s -n 2")
    assert "of 2" in first.run("%%dip\nx = rank + 40\nprint('of', world_size)")
    kept = find_kept()
    first.child.close(force=True)
    wait_for(lambda: not kept.is_claimed, "the end of IPython")
    second = Terminal(tmp_path)
    second.run("%load_ext ddip")
    assert "2 ranks on the CPU" in second.run("%makedip --attach")
    assert "x is 40" in second.run("%%dip\nprint('x is', x)")
    second.run("%dipull x -r 1")
    assert "41" in second.run("x")
    second.begin("%%dip\nprint('hangs')\nwhile True: pass")
    second.child.expect("hangs\r\n", timeout=90)
    second.child.sendintr()
    assert "KeyboardInterrupt: the cell was interrupted on ranks 0, 1" in second.finish()
    assert "ended 2 ranks" in second.run("%makedip -k")
    assert not kept.is_alive
    second.child.sendline("exit")
    second.child.expect(pexpect.EOF, timeout=90)
    second.child.close()
