"""Training loops of frameworks for the fuzzer, each in a group with the framework's app."""

from __future__ import annotations

from .torch_loops import NET, Loop

NUMBERS = """
from torch.utils.data import DataLoader, TensorDataset
numbers = torch.randn(16, 5, generator=torch.Generator().manual_seed(5))
data = TensorDataset(numbers[:, :4], numbers[:, 4:])
"""

ACCELERATE = (
    NUMBERS
    + """
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
net = network()
opt = torch.optim.AdamW(net.parameters(), 0.02)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
net, opt, loader, sched = accelerator.prepare(net, opt, DataLoader(data, 4, shuffle=True), sched)
def train(k):
    global batches
    losses = []
    for _ in range(k):
        for x, y in loader:
            with accelerator.accumulate(net):
                loss = error(net(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                opt.step()
                sched.step()
                opt.zero_grad()
            batches += 1
            losses.append(loss.item())
    return losses
"""
)

TRAINER = """
import tempfile
from transformers import Trainer, TrainerCallback, TrainingArguments
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def forward(self, x, labels):
        output = self.layers(x)
        return {"loss": error(output, labels), "logits": output}

class Patience(TrainerCallback):
    count = 0

    def on_step_end(self, args, state, control, **kwargs):
        self.count += 1

numbers = torch.randn(64, 5, generator=torch.Generator().manual_seed(5))
net, patience = Net(), Patience()
opt = torch.optim.AdamW(net.parameters(), 0.02, fused=True)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
settings = {"output_dir": tempfile.mkdtemp(), "report_to": "none", "save_strategy": "no", "disable_tqdm": True}
trainer = Trainer(
    net,
    TrainingArguments(**settings, use_cpu=True, per_device_train_batch_size=4, logging_steps=1, max_steps=1),
    train_dataset=[{"x": row[:4], "labels": row[4:]} for row in numbers],
    optimizers=(opt, sched),
    callbacks=[patience],
)
def train(k):
    trainer.args.max_steps = k
    trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]
"""

LIGHTNING = (
    NUMBERS
    + """
import lightning as L
import logging
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
losses_seen = []
class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = network()

    def training_step(self, batch, index):
        global batches
        x, y = batch
        loss = error(self.layers(x), y)
        batches += 1
        losses_seen.append(loss.item())
        return loss

    def configure_optimizers(self):
        return {"optimizer": opt, "lr_scheduler": {"scheduler": sched, "interval": "step"}}

net = Net()
opt = torch.optim.Adam(net.parameters(), 0.02)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
loader = DataLoader(data, 4)
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = None
def train(k):
    global trainer
    losses_seen.clear()
    trainer = L.Trainer(max_steps=k, devices=2, accelerator="cpu", strategy="ddp", **quiet)
    trainer.fit(net, loader)
    return list(losses_seen)
"""
)

FABRIC = (
    NUMBERS
    + """
import lightning as L
fabric = L.Fabric(devices=2, accelerator="cpu", strategy="ddp")
fabric.launch()
net = network()
opt = torch.optim.Adam(net.parameters(), 0.02)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
net, opt = fabric.setup(net, opt)
loader = fabric.setup_dataloaders(DataLoader(data, 4, shuffle=True))
def train(k):
    global batches
    losses = []
    for _ in range(k):
        for x, y in loader:
            opt.zero_grad()
            loss = error(net(x), y)
            fabric.backward(loss)
            opt.step()
            sched.step()
            batches += 1
            losses.append(loss.item())
    return losses
"""
)

FASTAI = (
    NUMBERS
    + """
from fastai.basics import DataLoaders, Learner, MSELossFlat
from fastai.data.load import DataLoader as Loader
net = network()
dls = DataLoaders(Loader(data, bs=2, shuffle=False), Loader(data, bs=2))
learn = Learner(dls, net, loss_func=MSELossFlat(), lr=0.02, train_bn=False)
learn.create_opt()
def train(k):
    with learn.no_bar(), learn.no_logging():
        learn.fit(k)
    return [loss.item() for loss in learn.recorder.losses]
"""
)

FRAMEWORK_LOOPS: dict[str, Loop] = {
    "accelerate": Loop(
        ACCELERATE,
        {"net": "net", "opt": "opt.optimizer", "sched": "sched.scheduler", "loader": "loader.iteration"},
        needs="accelerate",
        per_call=2,
    ),
    "Trainer": Loop(
        TRAINER,
        {**NET, "patience": "patience.count"},
        needs="transformers",
        app="hf",
    ),
    "Lightning": Loop(LIGHTNING, NET, needs="lightning", app="lightning"),
    "Fabric": Loop(
        FABRIC,
        {"net": "net", "opt": "opt.optimizer", "sched": "sched", "loader": "loader._num_iter_calls"},
        needs="lightning",
        app="lightning",
        per_call=2,
    ),
    "fastai": Loop(
        FASTAI,
        {"net": "net", "learn/opt": "learn.opt"},
        needs="fastai",
        app="fastai",
        per_call=4,
    ),
}
