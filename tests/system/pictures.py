"""Make the README's pictures, of a real page: ``python -m tests.system.pictures FOLDER``."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from .lab import Lab, open_lab, wait_for

CELLS = [
    "%load_ext ddip\n%makedip -n 4",
    """%%dip -S all
import matplotlib.pyplot as plt, torch
from torch.utils.data import DataLoader, DistributedSampler

loader = DataLoader(range(1000), sampler=DistributedSampler(range(1000)))
mine = torch.cat(list(loader))
print(f"rank {rank} sees {len(mine)} of 1000 items, first {mine[:5].tolist()}")
plt.figure(figsize=(5, 1.6)); plt.hist(mine, bins=40); plt.show()""",
    """%%dip
import time
from tqdm.auto import tqdm
from pathlib import Path

for step in tqdm(range(200), desc="training"):
    time.sleep(0.02)
    while step == 130 and not Path("on").exists(): time.sleep(0.01)""",
    """%%dip -S all
loss = torch.ones(()) / (1 + rank // 2)
print(f"loss {loss:.2f}")
assert loss > 0.6, f"loss {loss:.2f} is too good to be true"
torch.distributed.all_reduce(loss)""",
]


def main(folder: Path) -> None:
    """Run a notebook and take pictures of its cells."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, open_lab(Path(scratch)) as lab:
        lab.page.set_viewport_size({"width": 900, "height": 1500})
        lab.open("pictures.ipynb", CELLS)
        lab.page.keyboard.press("Control+b")  # no file browser
        lab.run(0)
        lab.run(1)
        lab.output(1).locator("label.ddip-rank").nth(2).click()
        _take(lab, 1, folder / "tabs.png")
        lab.begin(2)
        wait_for(lambda: re.search(r"1[23]\d/200", lab.text(2)), "the bar")
        _take(lab, 2, folder / "bar.png")
        (lab.folder / "on").touch()
        lab.finish(2)
        lab.run(3)
        lab.output(3).locator("label.ddip-rank").last.click()
        _take(lab, 3, folder / "error.png")


def _take(lab: Lab, number: int, path: Path) -> None:
    lab.page.mouse.move(0, 0)
    lab.cell(number).screenshot(path=str(path))
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
