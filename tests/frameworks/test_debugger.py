"""A breakpoint in code that a framework calls: it stops, and training continues as if it had not."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ddip.apps import NEEDED

from ..cluster.conftest import new_notebook  # noqa: F401
from ..cluster.fastai_source import DATA
from ..cluster.notebook import Notebook
from .test_hf import SET_UP as HF
from .test_lightning import SET_UP as LIGHTNING

NewNotebook = Callable[[], Notebook]

TORCH = """
    import torch
    from torch.nn.parallel import DistributedDataParallel as DDP
    class Net(torch.nn.Module):
        stops = False
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)
        def forward(self, x):
            y = self.layer(x)
            if self.stops and rank == 1: breakpoint()
            return y
    def train(stops):
        torch.manual_seed(0)
        net = Net()
        net.stops, model, losses = stops, DDP(net), []
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(3):
            loss = model(torch.full((2, 4), rank + step + 1.0)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, [*net.parameters()]
"""
FASTAI = (
    DATA
    + """
class Stops(Callback):
    def before_backward(self):
        if self.iter < 3 and rank == 1: breakpoint()
        self.seen = True
def train(stops):
    set_seed(0)
    learn = learner()
    with learn.no_bar(), learn.no_logging(): learn.fit(1, 0.05, cbs=[Stops()] if stops else [])
    return [float(loss) for loss in learn.recorder.losses], [*learn.model.parameters()]
"""
)
TRAINER = """
    def stop_at_first_steps(state):
        if state.global_step < 3 and rank == 1: breakpoint()
        state.seen = True
    def train(stops):
        spy.called = {"before": stop_at_first_steps} if stops else {}
        trainer = make("out")
        trainer.train()
        return history(trainer, "loss"), [*trainer.model.parameters()]
"""
TRAINING_STEP = """
    class Stops(Net):
        def training_step(self, batch, index):
            loss = super().training_step(batch, index)
            if self.stops and index < 3 and rank == 1: breakpoint()
            return loss
    def train(stops):
        net = Stops()
        net.stops = stops
        L.Trainer(max_epochs=1, **NOTHING).fit(net, loader)
        return net.losses, [*net.parameters()]
"""
SAME = """
    import torch
    assert undisturbed[0] and undisturbed[0] == stopped[0], (undisturbed[0], stopped[0])
    assert all(map(torch.equal, undisturbed[1], stopped[1]))
"""


def start(new_notebook: NewNotebook, options: str) -> Notebook:  # noqa: F811
    """Return a notebook with ranks."""
    notebook = new_notebook()
    notebook.ok(f"%load_ext ddip\n%config DipMagics.report_after = 10\n%makedip {options}")
    return notebook


@pytest.mark.parametrize(
    ("options", "source", "shown"),
    [
        pytest.param("", [TORCH], "p y.shape", id="forward of DDP"),
        pytest.param("--app fastai", [FASTAI], "p self.learn.pred.shape", id="callback of fastai"),
        pytest.param("--app hf", [HF, TRAINER], "p state.is_world_process_zero", id="callback of Trainer"),
        pytest.param("--app lightning", [LIGHTNING, TRAINING_STEP], "p loss.shape", id="training_step of Lightning"),
    ],
)
def test_training_goes_on_after_a_breakpoint(
    new_notebook: NewNotebook,  # noqa: F811
    options: str,
    source: list[str],
    shown: str,
) -> None:
    for module in NEEDED.get(options.removeprefix("--app "), ()):
        pytest.importorskip(module)
    notebook = start(new_notebook, f"-n 2 {options}")
    for code in source:
        notebook.ok(f"%%dip\n{code}")
    notebook.ok("%%dip\nundisturbed = train(False)")
    seen = notebook.converse("%%dip\nstopped = train(True)", shown, "c", "n", "c", "c")
    assert (seen.shown.status, len(seen.prompts)) == ("ok", 5), f"{seen}"
    assert all(prompt.startswith("rank 1 of 2, ") and "() cell [" in prompt for prompt in seen.prompts)
    assert {"p y.shape": "[2, 4]", "p loss.shape": "[]", "p self.learn.pred.shape": "[8, 3]"}.get(
        shown, "F"
    ) in seen.text
    notebook.ok(f"%%dip\n{SAME}")


def test_in_torchddp_stops_at_a_breakpoint(new_notebook: NewNotebook) -> None:  # noqa: F811
    notebook = new_notebook()
    notebook.ok(
        "from ddip import in_torchddp\ndef total(x, stops):\n    import torch, torch.distributed as dist\n"
        "    x = torch.tensor([x * (dist.get_rank() + 1)])\n    if stops and dist.get_rank() == 1:\n"
        "        breakpoint()\n    dist.all_reduce(x)\n    return x.item()"
    )
    seen = notebook.converse("print('total', in_torchddp(2, total, 3, True))", "p x", "n", "c")
    assert (seen.shown.status, len(seen.prompts)) == ("ok", 3), f"{seen}"
    assert "tensor([6])" in seen.text and "total 9" in seen.text
    notebook.ok("assert in_torchddp(2, total, 3, False) == 9")


COMPILED = """%%dip -r 1
    import torch
    @torch.compile(backend="eager")
    def f(x):
        y = x * 2
        breakpoint()
        z = y + 1
        return z
    assert f(torch.ones(1)).item() == 3
"""


def test_a_compiled_function_says_how_to_step_through_it(new_notebook: NewNotebook) -> None:  # noqa: F811
    notebook = start(new_notebook, "-n 2")
    seen = notebook.converse(COMPILED, "p x + 41", "n")
    assert seen.shown.status == "ok", seen.shown.message
    assert [prompt.split(" cell")[0] for prompt in seen.prompts] == ["rank 1 of 2, f()"] * 2
    assert "tensor([42.])" in seen.text and 'torch.compiler.set_stance("force_eager") before it' in seen.text
    notebook.ok("%%dip\nimport torch\nstance = torch.compiler.set_stance('force_eager')")
    seen = notebook.converse(COMPILED, "p y + 40", "n", "p z + 39", "c")
    assert seen.shown.status == "ok", seen.shown.message
    assert seen.text.count("tensor([42.])") == 2 and "set_stance" not in seen.text
    notebook.ok("%%dip\ntorch.compiler.set_stance('default')\ntorch._dynamo.reset()")
    assert "Unsupported" in notebook.fails(COMPILED.replace("backend=", "fullgraph=True, backend=")).message
