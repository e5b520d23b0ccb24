"""A day of one user in JupyterLab: forty steps, each with a look at the page.

Set DDIP_PICTURES to a folder to keep a picture of each step for review.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest

from .lab import Lab, wait_for

TRAIN = """
for step in tqdm(range(10)):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 4)).square().mean()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.3f}")"""
NOT_THE_USERS = re.compile(r"(ddip|ipykernel|ipyparallel|IPython|zmq)/[\w/]+\.py")
"""A source file in a traceback that is not the user's."""


@dataclass(frozen=True)
class Step:
    """A cell that the user runs, and what the page must show below it."""

    code: str
    shows: str = ""
    """Part of the text below the cell."""
    fails: bool = False
    """True if the cell ends in an error."""
    warns: bool = False
    """True if the cell may write to stderr."""
    stop_at: str = ""
    """Beginning of the names of two files in the notebook's folder at which the user presses the stop button."""
    reload: bool = False
    """True if the user saves and reloads the page before the cell."""


MODEL = """%%dip
import torch, torch.distributed as dist
from pathlib import Path
from tqdm.auto import tqdm
from torch.nn.parallel import DistributedDataParallel as DDP
torch.manual_seed(0)
model = DDP(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)"""
DAY = [
    Step("%load_ext ddip\n%makedip -n 2", "ddip: 2 ranks on the CPU"),
    Step("%makedip -i", "idle"),
    Step(MODEL),
    Step(f"%%dip{TRAIN}", "loss"),
    Step("%%dip -S all\nprint('rank', rank)\ndist.get_world_size()", "rank 0"),
    Step("%%dip -S all\nimport matplotlib.pyplot as plt\nplt.plot([rank, 1]); plt.show()"),
    Step("%%dip\nimport pandas as pd\npd.DataFrame({'rank': [rank]})", "rank"),
    Step("%%dip\nif rank == 1: raise ValueError('only here')\ndist.barrier()", "ValueError: only here", fails=True),
    Step(f"%%dip{TRAIN}", "loss"),
    Step("%%dip\nmodle", "NameError: name 'modle' is not defined", fails=True),
    Step("%%dip\nfor step in range(3)\n    pass", "SyntaxError", fails=True),
    Step("%%dip\nPath(f'a{rank}').touch()\nif rank: dist.barrier()\nwhile not rank: pass", fails=True, stop_at="a"),
    Step("%%dip\nPath(f'b{rank}').touch()\nwhile True: print()", fails=True, stop_at="b"),
    Step("%%dip\nimport time\nPath(f'c{rank}').touch()\ntime.sleep(1000)", fails=True, stop_at="c"),
    Step(f"%%dip{TRAIN}", "loss", reload=True),
    Step("%%dip --bg\nlosses = []\nfor step in range(1000):\n    losses.append(step)\n    time.sleep(0.1)"),
    Step("%dipcells", "running"),
    Step("%dipull --now losses\nlosses[0]", "0"),
    Step("%dipwatch"),
    Step("%dipstack", "sleep"),
    Step("%dipstop", "was stopped", warns=True),  # the ranks have stopped at different steps
    Step("%dipcell", "interrupted", warns=True),
    Step("%%dip --bg\ntime.sleep(0.2)\nprint('the end')"),
    Step("%dipwait"),
    Step(f"%%dip --profile{TRAIN}", "loss"),
    Step("lr = 0.002\n%dipush lr"),
    Step("%%dip\nprint('lr', lr)\ntotal = rank + 10", "lr 0.002"),
    Step("%dipull total\ntotal", "10"),
    Step("%dipull nothing_there", "nothing_there", fails=True),
    Step("%makedip --num 2", "--num", fails=True),
    Step("%dipcheck"),
    Step("%autodip on"),
    Step("print('on rank', rank)", "on rank 0"),
    Step("!echo from a shell", "from a shell"),
    Step("%autodip off"),
    Step("%%dip\nimport ipywidgets\nipywidgets.IntSlider(3)", "3"),
    Step("%%dip\nimport os\nif rank == 1: os._exit(3)\ndist.barrier()", "rank 1", fails=True),
    Step(f"%%dip{TRAIN}", "--repair", fails=True),
    Step("%makedip --repair --from 0 model", warns=True),
    Step(MODEL.replace("model =", "new =").replace("model.p", "new.p")),
    Step("%makedip -n 3", "3 ranks", warns=True),  # wrappers must be recreated
    Step(
        "%%dip\nimport torch, torch.distributed as dist\nt = torch.ones(1)\ndist.all_reduce(t)\nt",
        "tensor([3.])",
    ),
    Step("%makedip -r", "3 ranks"),
    Step(MODEL),
    Step(f"%%dip{TRAIN}", "loss"),
    Step("%makedip -k"),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(os.environ.get("DDIP_PICTURES") or tmp_path_factory.mktemp("day"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def press_stop_at(lab: Lab, begins: str) -> None:
    """Interrupt the kernel by keyboard once two files whose names begin with `begins` exist."""
    wait_for(lambda: len(list(lab.folder.glob(f"{begins}[01]"))) == 2, "the cell to run on both ranks")
    lab.page.wait_for_selector('.jp-Notebook-ExecutionIndicator[data-status="busy"]')
    for key in ("Escape", "i", "i"):
        lab.page.keyboard.press(key)


def find_faults(step: Step, outputs: list[Any], text: str) -> str:
    """Compare a cell of the saved notebook, and the text that the page showed below it, with what the user expects."""
    kinds = {output.get("name", output["output_type"]) for output in outputs}
    is_found = {
        f"does not show {step.shows!r}": step.shows not in text,
        "does not fail": step.fails and "error" not in kinds,
        "fails": not step.fails and "error" in kinds,
        "has a red box without an error": not step.fails and "stderr" in kinds and not step.warns,
        f"shows a frame of {NOT_THE_USERS.findall(text)}": bool(NOT_THE_USERS.search(text)),
    }
    return "".join(f"{fault}:\n{step.code}\n{text}\n\n" for fault, is_so in is_found.items() if is_so)


@pytest.mark.long
def test_a_day_of_one_user_shows_no_false_alarm(lab: Lab, pictures: Path) -> None:
    lab.start("day.ipynb", [step.code for step in DAY], 0)
    texts = []
    for number, step in enumerate(DAY):
        if step.reload:
            lab.save()
            lab.load("day.ipynb")
        if number:
            lab.begin(number)
            if step.stop_at:
                press_stop_at(lab, step.stop_at)
            lab.finish(number)
        with contextlib.suppress(AssertionError):
            wait_for(lambda at=number, step=step: step.shows in lab.text(at), "the text", 5)  # type: ignore[misc]
        texts.append(lab.text(number))
        lab.cell(number).locator(".jp-Cell-inputWrapper").scroll_into_view_if_needed()
        lab.page.screenshot(path=str(pictures / f"{number:02}.png"))  # of the page, as an output may be too high
    lab.save()
    cells = nbformat.read(lab.folder / "day.ipynb", as_version=4).cells
    faults = [find_faults(*item) for item in zip(DAY, (cell.outputs for cell in cells), texts, strict=True)]
    assert not any(faults), "".join(faults)
