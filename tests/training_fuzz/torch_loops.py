"""Training loops of the fuzzer in plain torch: each is the text of a set-up cell that defines ``train(k)``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

COMMON = """
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

class Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient * 1.0
        return gradient

class Marked(nn.Module):
    def forward(self, x):
        return Mark.apply(x)

def network(inputs=4, outputs=1):
    return nn.Sequential(
        nn.Linear(inputs, 6), Marked(), nn.Tanh(), nn.Linear(6, 6), Marked(), nn.Tanh(), nn.Linear(6, outputs))

def batch(number):
    generator = torch.Generator().manual_seed(1000 * number + rank)
    x = torch.randn(4, 4, generator=generator)
    y = torch.randn(4, 1, generator=generator)
    return x, y

def error(output, y):
    return (output - y).square().mean()

def factor(number):
    return 1 / (1 + number % 5)

torch.manual_seed(1)
batches = 0
"""
"""Beginning of each set-up cell. Batches depend on the step and the rank; the learning rate changes at each step."""

PLAIN_TRAIN = """
def train(k):
    global batches
    losses = []
    for _ in range(k):
        x, y = batch(batches)
        opt.zero_grad()
        loss = error(net(x), y)
        loss.backward()
        opt.step()
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
"""
ADAM = """
opt = torch.optim.AdamW(net.parameters(), 0.02)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
"""
FSDP2_NET = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
net = network()
mesh = init_device_mesh("cpu", (world_size,))
for layer in net:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
"""
DDP_NET = "net = DDP(network(), bucket_cap_mb=1e-5)\n"

NET = {"net": "net", "opt": "opt", "sched": "sched"}


@dataclass(frozen=True)
class Loop:
    """A training loop, and the state that an undisturbed run needs to continue from the same place."""

    set_up: str
    state: Mapping[str, str] = field(default_factory=lambda: NET)
    """The variable that ddip must name if its state differs -> an expression for the state. A suffix after a slash
    distinguishes two parts of a variable."""
    app: str = ""
    """App of the group."""
    needs: str = ""
    """Package that the loop needs."""
    steps_after: int = 12
    """Number of batches after the fault that are compared with an undisturbed run."""
    close: str = ""
    """Code that ends an undisturbed copy of the loop."""
    seconds_per_step: float = 0.0
    """Additional seconds per step, for loops that write files."""
    sharded: bool = False
    per_call: int = 1
    """Steps per ``train(1)``."""

    @property
    def code(self) -> str:
        return COMMON + self.set_up.strip("\n") + "\n"


TORCH_LOOPS: dict[str, Loop] = {
    "DDP": Loop(DDP_NET + ADAM + PLAIN_TRAIN),
    "GradScaler": Loop(
        DDP_NET
        + ADAM
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
def train(k):
    global batches
    losses = []
    for _ in range(k):
        x, y = batch(batches)
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = error(net(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(opt)
        scaler.update()
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
""",
        {**NET, "scaler": "scaler"},
    ),
    "EMA": Loop(
        DDP_NET
        + ADAM
        + """
average = torch.optim.swa_utils.AveragedModel(net.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
def train(k):
    global batches
    losses = []
    for _ in range(k):
        x, y = batch(batches)
        opt.zero_grad()
        loss = error(net(x), y)
        loss.backward()
        opt.step()
        average.update_parameters(net.module)
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
""",
        {**NET, "average": "average"},
    ),
    "accumulation": Loop(
        DDP_NET
        + ADAM
        + """
def train(k):
    global batches
    losses = []
    for _ in range(k):
        opt.zero_grad()
        with net.no_sync():
            for part in range(2):
                x, y = batch(3 * batches + part)
                loss = error(net(x), y)
                loss.backward()
        x, y = batch(3 * batches + 2)
        loss = error(net(x), y)
        loss.backward()
        opt.step()
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
"""
    ),
    "clipping, zero_grad at the end": Loop(
        DDP_NET
        + """
opt = torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=100_000)
def train(k):
    global batches
    losses = []
    for _ in range(k):
        x, y = batch(batches)
        loss = error(net(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
"""
    ),
    "static_graph": Loop("net = DDP(network(), static_graph=True, bucket_cap_mb=1e-5)\n" + ADAM + PLAIN_TRAIN),
    "find_unused_parameters": Loop(
        """
class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.norm = network(), network(), nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.norm(x)
        return self.first(x) if batches % 2 else self.second(x)

net = DDP(Branches(), find_unused_parameters=True, bucket_cap_mb=1e-5)
opt = torch.optim.Adam(net.parameters(), 0.02, foreach=False)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
def train(k):
    global batches
    losses = []
    for _ in range(k):
        x, y = batch(batches)
        loss = error(net(x), y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
"""
    ),
    "compile": Loop("net = torch.compile(DDP(network()), backend='eager')\n" + ADAM + PLAIN_TRAIN),
    "FSDP2": Loop(
        FSDP2_NET + ADAM + PLAIN_TRAIN,
        sharded=True,
    ),
    "FSDP2, accumulation": Loop(
        FSDP2_NET
        + ADAM
        + """
def train(k):
    global batches
    losses = []
    for _ in range(k):
        for part in range(2):
            net.set_requires_gradient_sync(part == 1)
            x, y = batch(2 * batches + part)
            loss = error(net(x), y)
            loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
""",
        sharded=True,
    ),
    "GAN": Loop(
        """
maker, judge = DDP(network(4, 4)), DDP(network(4, 1), broadcast_buffers=False)
maker_opt = torch.optim.Adam(maker.parameters(), 0.01, betas=(0.5, 0.9))
judge_opt = torch.optim.RMSprop(judge.parameters(), 0.01)
def train(k):
    global batches
    losses = []
    for _ in range(k):
        x, y = batch(batches)
        judge_opt.zero_grad()
        real = error(judge(x), torch.ones(4, 1))
        false = error(judge(maker(x).detach()), torch.zeros(4, 1))
        (real + false).backward()
        judge_opt.step()
        maker_opt.zero_grad()
        loss = error(judge.module(maker(x)), torch.ones(4, 1))
        loss.backward()
        maker_opt.step()
        batches += 1
        losses.append(loss.item())
    return losses
""",
        {"maker": "maker", "judge": "judge", "maker_opt": "maker_opt", "judge_opt": "judge_opt"},
    ),
    "tied weights": Loop(
        """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.there, self.back = nn.Linear(4, 4), nn.Linear(4, 4)
        self.back.weight = self.there.weight
        self.mark = Marked()
        self.dropout = nn.Dropout(0.3)

    def forward(self, x):
        return self.back(self.dropout(self.mark(torch.tanh(self.there(x))))).sum(1, keepdim=True)

net = DDP(Tied())
"""
        + ADAM
        + PLAIN_TRAIN
    ),
    "gradients averaged by hand": Loop(
        """
net = network()
opt = torch.optim.AdamW(net.parameters(), 0.02, fused=True)
sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
def train(k):
    global batches
    losses = []
    for _ in range(k):
        x, y = batch(batches)
        opt.zero_grad()
        loss = error(net(x), y)
        loss.backward()
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= world_size
        opt.step()
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
"""
    ),
    "DistributedSampler": Loop(
        DDP_NET
        + ADAM
        + """
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
numbers = torch.randn(16, 5, generator=torch.Generator().manual_seed(5))
data = TensorDataset(numbers[:, :4], numbers[:, 4:])
sampler = DistributedSampler(data, world_size, rank, shuffle=True)
loader = DataLoader(data, 4, sampler=sampler)
epoch = 0
def train(k):
    global batches, epoch
    losses = []
    for _ in range(k):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = error(net(x), y)
            loss.backward()
            opt.step()
            sched.step()
            batches += 1
            losses.append(loss.item())
        epoch += 1
    return losses
""",
        {**NET, "sampler": "sampler.epoch", "epoch": "epoch"},
        per_call=2,
    ),
    "generators with the same seed": Loop(
        DDP_NET
        + ADAM
        + """
numbers = torch.randn(16, 5, generator=torch.Generator().manual_seed(5))
shuffling = torch.Generator().manual_seed(3)
def train(k):
    global batches
    losses = []
    for _ in range(k):
        order = torch.randperm(16, generator=shuffling)[rank::world_size]
        noise = torch.randn(8, 4) * 0.1
        rows = numbers[order]
        opt.zero_grad()
        loss = error(net(rows[:, :4] + noise), rows[:, 4:])
        loss.backward()
        opt.step()
        sched.step()
        batches += 1
        losses.append(loss.item())
    return losses
""",
        {**NET, "shuffling": "shuffling"},
    ),
    "async_save": Loop(
        DDP_NET
        + ADAM
        + """
import tempfile
import torch.distributed.checkpoint as dcp
side = dist.new_group(backend="gloo")
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
saved = None
def train(k):
    global batches, saved
    losses = []
    for _ in range(k):
        x, y = batch(batches)
        opt.zero_grad()
        loss = error(net(x), y)
        loss.backward()
        opt.step()
        sched.step()
        batches += 1
        losses.append(loss.item())
        if batches % 4 == 0:
            if saved is not None:
                saved.result()
            saved = dcp.async_save({"net": net.module.state_dict()}, checkpoint_id=folder[0], process_group=side)
    return losses
""",
        close="saved is None or saved.result()\ndist.destroy_process_group(side)",
        steps_after=6,
        seconds_per_step=0.2,
    ),
}
