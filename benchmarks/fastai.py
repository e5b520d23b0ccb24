"""Measure how fast fastai trains on two ranks: ``python benchmarks/fastai.py [ROUNDS]``.

Compares, alternating, on one thread each and with the same batches: one process alone; two ranks with the app; two
ranks with hand-written DistributedDataParallel, a plain torch loop around the same model and optimizer; and the
machine's upper limit, two processes that each train on half of the data and do not communicate.
"""

from __future__ import annotations

import sys

from rows import Row, report_rows

import ddip

BATCH, STEPS, PIXELS = 16, 24, 96
"""The app creates a DistributedDataParallel in the first step of each fit, which would dominate a short fit."""
SETUP = f"""
import time
from fastai.basics import *
from fastai.vision.models.xresnet import xresnet18
from torch.nn.parallel import DistributedDataParallel as DDP
torch.set_num_threads(1)
torch.manual_seed(0)
N = 2 * {BATCH} * {STEPS}
x, y = torch.randn(N, 3, {PIXELS}, {PIXELS}), torch.randint(0, 10, (N,))
data = list(zip(x, y))

def loaders(bs, data=data):
    return DataLoaders(DataLoader(data, bs=bs, shuffle=True), DataLoader(data[:bs], bs=bs), device=torch.device("cpu"))

class Clock(Callback):
    def before_train(self): self.began = time.perf_counter()
    def after_train(self): self.seconds = time.perf_counter() - self.began

AdamW = partial(OptimWrapper, opt=torch.optim.AdamW)
learners = {{}}
def by_fastai(bs, name, data=data):
    if name not in learners:
        kinds = dict(loss_func=nn.CrossEntropyLoss(), opt_func=AdamW)
        learners[name] = Learner(loaders(bs, data), xresnet18(n_out=10), **kinds)
    clock, learn = Clock(), learners[name]
    with learn.no_bar(), learn.no_logging(): learn.fit(1, cbs=clock)
    return N / clock.seconds

def apart():
    from ddip.apps import rank_exchange as ranks
    with ranks.single_process_mode(): return by_fastai({BATCH}, "apart", data[rank::2])

model = DDP(xresnet18(n_out=10)); opt = torch.optim.AdamW(model.parameters(), 1e-3)
def by_hand():
    loader = loaders({BATCH}).train
    order = random.Random(0).sample(range(N), N)[rank::world_size]
    loader.get_idxs = lambda: order
    began = time.perf_counter()
    for xb, yb in loader:
        loss = nn.functional.cross_entropy(model(xb), yb)
        loss.backward(); opt.step(); opt.zero_grad()
        loss.item()
    return N / (time.perf_counter() - began)
"""
WAYS = {
    "two processes, apart": ("apart()", None),
    "one process": (f"by_fastai(2 * {BATCH}, 'one')", [0]),
    "two ranks, by hand": ("by_hand()", None),
    "two ranks, fastai's app": (f"by_fastai({BATCH}, 'two')", None),
}


def main(rounds: int) -> None:
    """Print one table: seconds per epoch."""
    measured: dict[str, list[float]] = {way: [] for way in WAYS}
    with ddip.Group(2, app="fastai", timeout=120) as group:
        group.run(SETUP)
        for number in range(rounds + 1):
            for way, (call, ranks) in list(WAYS.items())[:: 1 if number % 2 else -1]:
                group.run(f"speed = {call}", ranks=ranks)
                if number:  # round 0 warms up
                    measured[way].append(group.pull(["N"])["N"] / group.pull(["speed"])["speed"])
    ours = measured.pop("two ranks, fastai's app")
    what = f"an epoch of an xresnet18 with fastai's app, {2 * STEPS * BATCH} images of {PIXELS} x {PIXELS}"
    report_rows("fastai", [Row(what, "s", 2, ours, dict(measured))])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
