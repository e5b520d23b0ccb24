"""Take the README's pictures of a real page: ``python -m tests.system.pictures FOLDER``."""

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
WATCHED = [
    "%load_ext ddip\n%makedip -n 4",
    "%dipwatch",
    """%%dip
import time, torch
from torch.nn.parallel import DistributedDataParallel as DDP
from tqdm import tqdm

model = DDP(torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in tqdm(range(400)):
    if rank == 2: time.sleep(0.05)  # this one reads from a slow disk
    optimizer.zero_grad()
    model(torch.randn(32, 64)).sum().backward()
    optimizer.step()""",
]


TRAINER = [
    "%load_ext ddip\n%makedip -n 2 -a hf\n%autodip on",
    """%xmode Minimal
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(32, (256, 16))]
arguments = TrainingArguments(
    "out", per_device_train_batch_size=4, num_train_epochs=1, learning_rate=0.01, logging_steps=8, save_strategy="no",
    ddp_find_unused_parameters=False
)
trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
class Watch(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if rank == 1 and state.global_step == 12: raise ValueError("a batch of rank 1 cannot be used")""",
    "trainer.add_callback(Watch)\ntrainer.train()",
    "trainer.remove_callback(Watch)\ntrainer.train()",
]


def main(folder: Path) -> None:
    """Run notebooks, and take pictures of their cells; those of `CELLS` also in the dark theme."""
    folder.mkdir(parents=True, exist_ok=True)
    for theme, suffix in (("JupyterLab Light", ""), ("JupyterLab Dark", "_dark")):
        with tempfile.TemporaryDirectory() as scratch, open_lab(Path(scratch), theme) as lab:
            take_cell_pictures(lab, folder, suffix)
            if not suffix:
                take_watch_picture(lab, folder / "watch.png")
                take_trainer_pictures(lab, folder)


def take_cell_pictures(lab: Lab, folder: Path, suffix: str) -> None:
    """Take pictures of tabs, of a bar, and of an error on some ranks."""
    lab.page.set_viewport_size({"width": 900, "height": 1500})
    lab.open("pictures.ipynb", CELLS)
    lab.page.keyboard.press("Control+b")  # close the file browser
    lab.run(0)
    lab.run(1)
    lab.output(1).locator("label.ddip-rank").nth(2).click()
    _take_picture(lab, 1, folder / f"tabs{suffix}.png")
    lab.begin(2)
    wait_for(lambda: re.search(r"1[23]\d/200", lab.text(2)), "the bar")
    _take_picture(lab, 2, folder / f"bar{suffix}.png")
    (lab.folder / "on").touch()
    lab.finish(2)
    lab.run(3)
    lab.output(3).locator("label.ddip-rank").last.click()
    _take_picture(lab, 3, folder / f"error{suffix}.png")


def take_trainer_pictures(lab: Lab, folder: Path) -> None:
    """Take pictures of a Trainer that fails on one rank, and then trains again."""
    lab.page.set_viewport_size({"width": 900, "height": 1500})
    lab.start("trainer.ipynb", TRAINER, 0)
    lab.page.keyboard.press("Control+b")
    for number in range(1, len(TRAINER)):
        lab.run(number)
    _take_picture(lab, 2, folder / "trainer_error.png")
    _take_picture(lab, 3, folder / "trainer_again.png")


def take_watch_picture(lab: Lab, path: Path) -> None:
    """Take a picture of %dipwatch once it has found the straggler."""
    lab.page.set_viewport_size({"width": 1100, "height": 1500})
    lab.start("watched.ipynb", WATCHED, 0)
    lab.page.keyboard.press("Control+b")
    lab.run(1)
    lab.begin(2)
    wait_for(lambda: re.search(r"rank 2 is the straggler.* (8|9)\d % or more", lab.text(1)), "the straggler", 60)
    _take_picture(lab, 1, path)
    lab.finish(2)


def _take_picture(lab: Lab, number: int, path: Path) -> None:
    lab.page.mouse.move(0, 0)
    lab.cell(number).screenshot(path=str(path))
    print(path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
